"""The configuration of a Qwen-VL model, read from a ModelCard; everything that differs between the two generations is decided here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from modelrunner.checkpoint import ModelCard
from modelrunner.model_states.common.card import architecture_of, positive
from modelrunner.model_states.dense.config import DenseConfig, dense_config

NEWER = "Qwen3VLForConditionalGeneration"
TEXT_ARCHITECTURES = {NEWER: "Qwen3ForCausalLM"}  # the others: Qwen2ForCausalLM
SECTIONS = {NEWER: (24, 20, 20)}  # pairs of components that follow time, height and width, when the configuration does not say
OLDER_SECTIONS = (16, 24, 24)
ACTIVATIONS = {NEWER: "gelu_pytorch_tanh"}  # of the vision tower
OLDER_ACTIVATION = "silu"


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower. A patch is patch_size x patch_size pixels of temporal_patch_size frames; merge x merge patches become one token.

    window: tokens along the side of an attention window, 0 for none. full_layers: layers that see the whole frame all the same.
    position_side: side of the square table of learned positions, 0 for none. deepstack: layers after which a copy leaves for the text
    layers. gated: the MLP has a gate and norms are RMS norms; else it has two products and norms are layer norms.
    tokens_per_second: steps of the temporal position in a second of video.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    merge: int
    theta: float
    window: int
    full_layers: tuple[int, ...]
    position_side: int
    deepstack: tuple[int, ...]
    gated: bool
    tokens_per_second: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def inner_size(self) -> int:
        """The MLP's size in memory: where lines of `intermediate_size` would not begin at multiples of 16 bytes, which makes products slow,
        they are filled up with zeros."""
        return self.intermediate_size if self.intermediate_size % 8 == 0 else -(-self.intermediate_size // 64) * 64


@dataclass(frozen=True)
class QwenVLConfig:
    """text: the decoder, a dense one. axes: for each pair of rotary components, the position that it follows: 0 time, 1 height, 2 width.

    stamped: a video's frames stand apart in the text, each after its time, instead of in one run.
    """

    text: DenseConfig
    vision: VisionConfig
    axes: tuple[int, ...]
    image_token: int
    video_token: int
    start_token: int
    end_token: int
    stamped: bool


def qwen_vl_config(card: ModelCard) -> QwenVLConfig:
    """Read `card`. Raises ValueError that names the field for whatever this family cannot run."""
    newer = architecture_of(card) == NEWER
    fields = text_fields(card)
    architecture = TEXT_ARCHITECTURES.get(architecture_of(card), "Qwen2ForCausalLM")
    text = dense_config(replace(card, config=fields, architectures=(architecture,)))
    vision = vision_config(card, newer)
    if len(vision.deepstack) > text.num_layers:
        raise ValueError(f"{card.name}: deepstack_visual_indexes has {len(vision.deepstack)} entries for {text.num_layers} text layers")
    return QwenVLConfig(
        text=text,
        vision=vision,
        axes=rotary_axes(card, fields["rope_parameters"], text.rope.rotary_dim // 2, newer),
        image_token=positive(card, "image_token_id"),
        video_token=positive(card, "video_token_id"),
        start_token=positive(card, "vision_start_token_id"),
        end_token=positive(card, "vision_end_token_id"),
        stamped=newer,
    )


def text_fields(card: ModelCard) -> dict[str, Any]:
    """The decoder's fields: in `text_config`, or at the top as the first checkpoints have them. Ties are said at the top alone."""
    nested = card.config.get("text_config")
    fields = dict(nested if isinstance(nested, Mapping) else card.config)
    rope: dict[str, Any] = {**(fields.pop("rope_scaling", None) or {}), **(fields.get("rope_parameters") or {})}
    if rope.get("type") == "mrope":  # plain frequencies; the sections say the rest
        rope.pop("type")
    if rope.get("rope_type") == "mrope":
        rope["rope_type"] = "default"
    fields["rope_parameters"] = rope
    if "tie_word_embeddings" in card.config:
        fields["tie_word_embeddings"] = card.config["tie_word_embeddings"]
    fields.pop("architectures", None)
    return fields


def rotary_axes(card: ModelCard, rope: Mapping[str, Any], pairs: int, newer: bool) -> tuple[int, ...]:
    """Which position each pair of rotary components follows.

    Qwen2.5-VL (arXiv:2502.13923, section 2.1.3; M-RoPE is from Qwen2-VL, arXiv:2409.12191) cuts the pairs into three sections. Qwen3-VL
    deals the three out in turn, so that each has fast and slow ones, and what is left over follows time.
    """
    sections = [int(n) for n in rope.get("mrope_section") or (SECTIONS.get(architecture_of(card), OLDER_SECTIONS))]
    if len(sections) != 3 or sum(sections) != pairs:
        raise ValueError(f"{card.name}: mrope_section is {sections}; three numbers are needed that add up to {pairs}, the rotary pairs")
    if not newer:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    axes = [0] * pairs
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], pairs), 3):
            axes[pair] = axis
    return tuple(axes)


def vision_config(card: ModelCard, newer: bool) -> VisionConfig:
    """Read the configuration's `vision_config`."""
    given = card.config.get("vision_config")
    if not isinstance(given, Mapping):
        raise ValueError(f"{card.name}: vision_config is {given!r}; the vision tower's fields are needed")
    part = replace(card, name=f"{card.name}: vision_config", config=given)
    architecture = architecture_of(card)
    activation, known = given.get("hidden_act"), ACTIVATIONS.get(architecture, OLDER_ACTIVATION)
    if activation not in (None, known):
        raise ValueError(f"{part.name}: hidden_act is {activation!r}; the vision tower of {architecture} runs with {known!r}")
    depth, patch, merge = positive(part, "depth"), positive(part, "patch_size"), positive(part, "spatial_merge_size")
    hidden, heads = positive(part, "hidden_size"), positive(part, "num_heads")
    if hidden % (4 * heads):
        raise ValueError(
            f"{part.name}: hidden_size {hidden} over {heads} heads; a head needs a multiple of 4 components, two for each axis"
        )
    window = 0 if newer else positive(part, "window_size") // merge // patch
    if not newer and window < 1:
        raise ValueError(f"{part.name}: window_size is {given['window_size']} pixels; a window holds at least {merge * patch}")
    return VisionConfig(
        depth=depth,
        hidden_size=hidden,
        intermediate_size=positive(part, "intermediate_size"),
        num_heads=heads,
        in_channels=int(given.get("in_channels") or given.get("in_chans") or 3),
        patch_size=patch,
        temporal_patch_size=positive(part, "temporal_patch_size"),
        merge=merge,
        theta=float((given.get("rope_parameters") or {}).get("rope_theta") or 10000.0),
        window=window,
        full_layers=() if newer else layer_numbers(part, "fullatt_block_indexes", depth),
        position_side=position_side(part) if newer else 0,
        deepstack=layer_numbers(part, "deepstack_visual_indexes", depth) if newer else (),
        gated=not newer,
        tokens_per_second=float(given.get("tokens_per_second") or 1.0),
    )


def layer_numbers(part: ModelCard, field: str, depth: int) -> tuple[int, ...]:
    """A list of layers of the vision tower."""
    numbers: Sequence[int] = part.config.get(field) or ()
    if any(not 0 <= int(n) < depth for n in numbers):
        raise ValueError(f"{part.name}: {field} is {list(numbers)}; layers count from 0 to {depth - 1}")
    return tuple(int(n) for n in numbers)


def position_side(part: ModelCard) -> int:
    """Side of the square table of learned positions."""
    count = positive(part, "num_position_embeddings")
    side = int(count**0.5)
    if side * side != count:
        raise ValueError(f"{part.name}: num_position_embeddings is {count}; the table is square, so a square number is needed")
    return side

"""The configuration of an Idefics3 or SmolVLM model, read from a ModelCard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from modelrunner.checkpoint import ModelCard
from modelrunner.model_states.common.card import architecture_of, positive
from modelrunner.model_states.common.processing import IMAGE_FILE, file_fields
from modelrunner.model_states.dense.config import DenseConfig, dense_config

SMOLVLM = "SmolVLMForConditionalGeneration"
TEXT_ARCHITECTURES = {"llama": "LlamaForCausalLM"}  # by the decoder's model type
ACTIVATION = "gelu_pytorch_tanh"
TILES_ACROSS = 4  # tiles along the longer side of an image, when the processor's file does not say


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower (SigLIP: Zhai et al. 2023, arXiv:2303.15343). side: of a tile, in pixels. position_side: of the square table of
    learned positions. shuffle: shuffle x shuffle patches become one token."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    channels: int
    patch_size: int
    side: int
    position_side: int
    shuffle: int
    eps: float

    @property
    def patches_across(self) -> int:
        return self.side // self.patch_size

    @property
    def tokens(self) -> int:
        """Of a tile."""
        return (self.patches_across // self.shuffle) ** 2


@dataclass(frozen=True)
class Idefics3Config:
    """text: the decoder, a dense one. longest_edge: pixels that an image's longer side is resized to. smol: the processor is SmolVLM's."""

    text: DenseConfig
    vision: VisionConfig
    image_token: int
    longest_edge: int
    smol: bool

    @property
    def max_tiles(self) -> int:
        """Of an image: all that its square has, and the whole image once more."""
        across = -(-self.longest_edge // self.vision.side)
        return across * across + 1


def idefics3_config(card: ModelCard) -> Idefics3Config:
    """Read `card`, and the sizes in the processor's file. Raises ValueError that names the field for whatever this family cannot run."""
    given = card.config.get("text_config")
    if not isinstance(given, Mapping):
        raise ValueError(f"{card.name}: text_config is {given!r}; the decoder's fields are needed")
    model_type = str(given.get("model_type"))
    if model_type not in TEXT_ARCHITECTURES:
        raise ValueError(f"{card.name}: text_config: model_type is {model_type!r}; the decoder can be {', '.join(TEXT_ARCHITECTURES)}")
    fields = {name: value for name, value in given.items() if name != "architectures"}
    fields["tie_word_embeddings"] = card.config.get("tie_word_embeddings", given.get("tie_word_embeddings", False))
    processing = file_fields(card, IMAGE_FILE)
    vision = vision_config(card, processing)
    return Idefics3Config(
        text=dense_config(replace(card, config=fields, architectures=(TEXT_ARCHITECTURES[model_type],))),
        vision=vision,
        image_token=positive(card, "image_token_id"),
        longest_edge=int((processing.get("size") or {}).get("longest_edge") or TILES_ACROSS * vision.side),
        smol=architecture_of(card) == SMOLVLM,
    )


def vision_config(card: ModelCard, processing: Mapping[str, object]) -> VisionConfig:
    """Read the configuration's `vision_config`. processing: fields of the processor's file."""
    given = card.config.get("vision_config")
    if not isinstance(given, Mapping):
        raise ValueError(f"{card.name}: vision_config is {given!r}; the vision tower's fields are needed")
    part = replace(card, name=f"{card.name}: vision_config", config=given)
    activation = given.get("hidden_act", ACTIVATION)
    if activation != ACTIVATION:
        raise ValueError(f"{part.name}: hidden_act is {activation!r}; the vision tower runs with {ACTIVATION}")
    hidden, heads, patch, table = (positive(part, name) for name in ("hidden_size", "num_attention_heads", "patch_size", "image_size"))
    if hidden % heads:
        raise ValueError(f"{part.name}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    tile = processing.get("max_image_size")
    side = int(tile["longest_edge"]) if isinstance(tile, Mapping) and tile.get("longest_edge") else table
    shuffle = positive(card, "scale_factor")
    if side % patch or side // patch % shuffle:
        raise ValueError(f"{card.name}: tiles of {side} pixels are not whole tokens of {shuffle} x {shuffle} patches of {patch} pixels")
    return VisionConfig(
        num_layers=positive(part, "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=positive(part, "intermediate_size"),
        num_heads=heads,
        channels=int(given.get("num_channels") or 3),
        patch_size=patch,
        side=side,
        position_side=table // patch,
        shuffle=shuffle,
        eps=float(given.get("layer_norm_eps", 1e-6)),
    )

"""Where the tensors of a Qwen-VL checkpoint go. Names are the Hugging Face ones.

Checkpoints come in two spellings: `visual.*` and `model.layers.*`, as they were published first, and `model.visual.*` and
`model.language_model.*`, as transformers writes them since. Both are known, whichever the file has; a parameter that neither fills is
still an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch.nn.functional import pad

from modelrunner.model_states.common.decoder_weights import HEAD_NORMS, Targets, ignored_names, layer_targets, outer_targets
from modelrunner.model_states.common.encoder_weights import linear_targets, norm_targets
from modelrunner.model_states.dense.weights import NORMS, biased_linears
from modelrunner.model_states.qwen_vl.config import QwenVLConfig, VisionConfig
from modelrunner.weights import Target, WeightMap

PREFIXES = {"model.": ("model.language_model.", "language_model.model."), "visual.": ("model.visual.",)}
GATED = {"mlp.gate_proj": ("mlp.gate_up", 0), "mlp.up_proj": ("mlp.gate_up", 1), "mlp.down_proj": ("mlp.down", 0)}
UNGATED = {"mlp.linear_fc1": ("mlp.up", 0), "mlp.linear_fc2": ("mlp.down", 0)}
ATTENTION: Mapping[str, tuple[str, int | None]] = {"attn.qkv": ("attention.qkv", None), "attn.proj": ("attention.output", 0)}
MERGER = {"norm": "norm", "linear_fc1": "up", "linear_fc2": "down"}
GATED_MERGER = {"ln_q": "norm", "mlp.0": "up", "mlp.2": "down"}


def qwen_vl_weight_map(config: QwenVLConfig) -> WeightMap:
    """The weight map of a checkpoint of `config`."""
    text = config.text
    names: Targets = outer_targets(text.tied)
    norms = {**NORMS, **(HEAD_NORMS if text.qk_norm else {})}
    for layer in range(text.num_layers):
        names.update(layer_targets(layer, norms, biased=biased_linears(text)))
    inside = {name: tuple(replace(target, path=f"text.{target.path}") for target in targets) for name, targets in names.items()}
    inside.update(vision_targets(config.vision))
    both = {spelling: targets for name, targets in inside.items() for spelling in spellings(name)}
    ignored = [spelling for name in ignored_names(text.num_layers, text.tied) for spelling in spellings(name)]
    return WeightMap(both, tuple(ignored), optional=frozenset(both))


def spellings(name: str) -> list[str]:
    """`name` and the same under the other prefixes."""
    return [
        name,
        *(other + name.removeprefix(prefix) for prefix, others in PREFIXES.items() if name.startswith(prefix) for other in others),
    ]


def vision_targets(config: VisionConfig) -> Targets:
    """Tensors of the vision tower."""
    names: Targets = linear_targets("visual.patch_embed.proj", "vision.embed", bias=not config.gated, flatten=True)
    if config.position_side:
        names["visual.pos_embed.weight"] = (Target("vision.positions", kind="parameter"),)
    for block in range(config.depth):
        source, target = f"visual.blocks.{block}", f"vision.blocks.{block}"
        for name, (path, part) in {**ATTENTION, **(GATED if config.gated else UNGATED)}.items():
            names.update(filled_up(config, path, linear_targets(f"{source}.{name}", f"{target}.{path}", part)))
        for name, path in (("norm1", "attention_norm"), ("norm2", "mlp_norm")):
            names.update(norm_targets(f"{source}.{name}", f"{target}.{path}", bias=not config.gated))
    mergers = {"visual.merger": "vision.merger"}
    mergers |= {f"visual.deepstack_merger_list.{place}": f"vision.stack_mergers.{place}" for place in range(len(config.deepstack))}
    for source, target in mergers.items():
        for name, path in (GATED_MERGER if config.gated else MERGER).items():
            if path == "norm":
                names.update(norm_targets(f"{source}.{name}", f"{target}.{path}", bias=not config.gated))
            else:
                names.update(linear_targets(f"{source}.{name}", f"{target}.{path}"))
    return names


def filled_up(config: VisionConfig, path: str, targets: Targets) -> Targets:
    """`targets` of a product of the MLP, with zeros where it is larger in memory than in the checkpoint."""
    missing = config.inner_size - config.intermediate_size
    if not missing or not path.startswith("mlp."):
        return targets
    sides = {"mlp.down": {"weight": (0, missing)}}.get(path, {"weight": (0, 0, 0, missing), "bias": (0, missing)})
    return {
        name: tuple(replace(target, transform=partial(pad, pad=sides[target.kind])) if target.kind in sides else target for target in many)
        for name, many in targets.items()
    }

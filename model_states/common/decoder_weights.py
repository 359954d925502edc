"""Where the tensors of a decoder's checkpoint go, for modules of the layers in `common.layers` and the Hugging Face names.

The module has `embed`, `norm`, `head` and `layers.i`; a layer has `attention` (an `Attention`), `mlp` (a `GatedMLP`) and norms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from modelrunner.weights import Target

Targets = dict[str, tuple[Target, ...]]

# Hugging Face name of a projection -> (Linear in the layer, part, dimension split over devices)
PROJECTIONS: Mapping[str, tuple[str, int | None, int]] = {
    "self_attn.q_proj": ("attention.qkv", 0, 0),
    "self_attn.k_proj": ("attention.qkv", 1, 0),
    "self_attn.v_proj": ("attention.qkv", 2, 0),
    "self_attn.o_proj": ("attention.output", 0, 1),
    "mlp.gate_proj": ("mlp.gate_up", 0, 0),
    "mlp.up_proj": ("mlp.gate_up", 1, 0),
    "mlp.down_proj": ("mlp.down", 0, 1),
}
# The same for checkpoints that store q, k and v, and gate and up, as one tensor each.
FUSED_PROJECTIONS: Mapping[str, tuple[str, int | None, int]] = {
    "self_attn.qkv_proj": ("attention.qkv", None, 0),
    "self_attn.o_proj": ("attention.output", 0, 1),
    "mlp.gate_up_proj": ("mlp.gate_up", None, 0),
    "mlp.down_proj": ("mlp.down", 0, 1),
}
HEAD_NORMS = {"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"}


def outer_targets(tied: bool, norm_transform: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Targets:
    """Embedding, final norm and head. tied: the checkpoint has no head of its own. norm_transform: see `layer_targets`."""
    embed = Target("embed.weight", kind="parameter", shard_dim=0)
    head = Target("head", shard_dim=0)
    norm: Targets = {"model.norm.weight": (Target("norm.weight", kind="parameter", transform=norm_transform),)}
    if tied:
        return {"model.embed_tokens.weight": (embed, head), **norm}
    return {"model.embed_tokens.weight": (embed,), "lm_head.weight": (head,), **norm}


def layer_targets(
    layer: int,
    norms: Mapping[str, str],
    *,
    projections: Mapping[str, tuple[str, int | None, int]] = PROJECTIONS,
    biased: Collection[str] = (),
    norm_transform: Callable[[torch.Tensor], torch.Tensor] | None = None,
    source: str | None = None,
    target: str | None = None,
) -> Targets:
    """Tensors of layer `layer`.

    norms: Hugging Face name within the layer -> norm within our layer. biased: Linears of our layer with a bias.
    norm_transform: applied to the weights of norms, e.g. adding one where the checkpoint stores the distance from one.
    source, target: the layer's name in the checkpoint and in the module; None for `model.layers.<layer>` and `layers.<layer>`.
    """
    source, target = source or f"model.layers.{layer}", target or f"layers.{layer}"
    names: Targets = {}
    for name, (linear, part, shard_dim) in projections.items():
        names[f"{source}.{name}.weight"] = (Target(f"{target}.{linear}", part, shard_dim=shard_dim),)
        if linear in biased:
            # The bias of a product whose input is split is added once, so it is not split.
            names[f"{source}.{name}.bias"] = (Target(f"{target}.{linear}", part, "bias", shard_dim=0 if shard_dim == 0 else None),)
    for name, norm in norms.items():
        names[f"{source}.{name}.weight"] = (Target(f"{target}.{norm}.weight", kind="parameter", transform=norm_transform),)
    return names


def ignored_names(layers: int, tied: bool) -> tuple[str, ...]:
    """Tensors that some exports carry needlessly: rotary buffers, and the head although it is tied."""
    return (*(f"model.layers.{n}.self_attn.rotary_emb.inv_freq" for n in range(layers)), *(["lm_head.weight"] * tied))

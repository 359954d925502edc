"""Tiny checkpoints of a target and of every kind of drafter, in the published names.

The target's layers say little, so that its next token hangs mostly on the last one, and the heads are made to know that much: they are
right often, and wrong often. Loud heads hear all earlier tokens, and are wrong nearly always: any wrong entry of their caches shows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from modelrunner.testing.tiny import DENSE, dense_weights

Tensors = dict[str, torch.Tensor]

LAYERS = 3
QUIET, LOUD = 0.1, 4.0
TARGET = DENSE | {"num_hidden_layers": LAYERS}
HIDDEN, VOCAB = DENSE["hidden_size"], DENSE["vocab_size"]
FUSED = [0, 1, 2]
DRAFT_VOCAB = 128


def write(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(config)))
    return folder


def quiet(tensors: Tensors, share: float) -> Tensors:
    """`tensors` with what layers add to the residual stream made smaller."""
    return {name: tensor * share if "o_proj" in name or "down_proj" in name else tensor for name, tensor in tensors.items()}


def target_tensors(seed: int = 1) -> Tensors:
    return quiet(dense_weights(TARGET, seed), 0.3)


def layer_tensors(config: Mapping[str, Any], name: str, seed: int, share: float = QUIET) -> Tensors:
    """A random decoder layer under `name`."""
    tensors = quiet(dense_weights({**config, "num_hidden_layers": 1}, seed), share)
    return {key.replace("model.layers.0", name): tensor for key, tensor in tensors.items() if key.startswith("model.layers.0.")}


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def eagle_config(**changes: Any) -> dict[str, Any]:
    return {**DENSE, "num_hidden_layers": 1} | changes


def eagle_tensors(seed: int = 11, *, own_embedding: bool = True, bias: bool = False, loud: bool = False) -> Tensors:
    """As published: no norm before the first layer's attention, no final norm, no head."""
    tensors = {"fc.weight": torch.cat((torch.eye(HIDDEN), noise(seed, HIDDEN, HIDDEN) * 0.02), 1)}
    tensors |= layer_tensors(eagle_config(), "layers.0", seed, LOUD if loud else QUIET)
    del tensors["layers.0.input_layernorm.weight"]
    if own_embedding:
        tensors["embed_tokens.weight"] = target_tensors()["model.embed_tokens.weight"]
    if bias:
        tensors["fc.bias"] = noise(seed + 1, HIDDEN) * 0.1
    return tensors


EAGLE3 = DENSE | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "num_key_value_heads": 4,
    "draft_vocab_size": DRAFT_VOCAB,
    "eagle_aux_hidden_state_layer_ids": FUSED,
}


def draft_ids() -> torch.Tensor:
    """The target's ids that the EAGLE-3 head predicts, ascending."""
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:DRAFT_VOCAB].sort().values


def eagle3_tensors(
    seed: int = 21, *, own_embedding: bool = False, full: bool = False, layer: str = "midlayer", loud: bool = False
) -> Tensors:
    """Attention looks at its own place (queries equal keys), or everywhere, and takes over the embedding there. full: without a vocabulary
    of its own."""
    target = target_tensors()
    query = torch.cat((noise(seed, HIDDEN, HIDDEN) / (16 if loud else 2), torch.zeros(HIDDEN, HIDDEN)), 1)
    block = layer_tensors(EAGLE3, layer, seed + 1)
    block |= {
        f"{layer}.self_attn.q_proj.weight": query,
        f"{layer}.self_attn.k_proj.weight": query.clone(),
        f"{layer}.self_attn.v_proj.weight": torch.cat((torch.eye(HIDDEN), noise(seed + 2, HIDDEN, HIDDEN) * 0.02), 1),
        f"{layer}.self_attn.o_proj.weight": torch.eye(HIDDEN) * (LOUD if loud else 2),
        f"{layer}.hidden_norm.weight": 1 + 0.1 * noise(seed + 3, HIDDEN),
    }
    ids = torch.arange(VOCAB) if full else draft_ids()
    tensors = {
        **block,
        "fc.weight": noise(seed + 4, HIDDEN, 3 * HIDDEN) * 0.02,
        "norm.weight": target["model.norm.weight"],
        "lm_head.weight": target["lm_head.weight"][ids],
    }
    if own_embedding:
        tensors["embed_tokens.weight"] = target["model.embed_tokens.weight"]
    if not full:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def mtp_tensors(seed: int = 31, *, loud: bool = False) -> Tensors:
    name = "model.mtp_layers.0"
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    return {
        f"{name}.input_proj.weight": torch.cat((noise(seed, HIDDEN, HIDDEN) * 0.02, torch.eye(HIDDEN)), 1),
        **{f"{name}.{norm}.weight": 1 + 0.1 * noise(seed + i, HIDDEN) for i, norm in enumerate(norms)},
        **layer_tensors(TARGET, name, seed + 7, LOUD if loud else QUIET),
    }


MEDUSA = {"model_type": "medusa", "medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "target"}


def medusa_tensors(seed: int = 41, heads: int = 3) -> Tensors:
    """Three heads, whatever the configuration says, as published."""
    tensors = {}
    for head in range(heads):
        tensors[f"{head}.0.linear.weight"] = noise(seed + head, HIDDEN, HIDDEN) * 0.1
        tensors[f"{head}.0.linear.bias"] = noise(seed + head + 9, HIDDEN) * 0.1
        tensors[f"{head}.1.weight"] = noise(seed + head + 19, VOCAB, HIDDEN)
    return tensors


def draft_model_tensors() -> Tensors:
    """The target with fewer layers' worth of noise: right often."""
    return {name: tensor * (1 + 0.2 * noise(51, *tensor.shape)) for name, tensor in target_tensors().items()}

"""What GGUF files of decoders share: tensor names, and the row order of rotated projections."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<inner>.+)")
_HF_LAYER_NAMES = {hf: gguf for gguf, hf in LAYER_NAMES.items()}
_HF_GLOBAL_NAMES = {hf: gguf for gguf, hf in GLOBAL_NAMES.items()}


def gguf_name(name: str, own: Mapping[str, str] | None = None) -> str:
    """The GGUF name of a tensor with the Hugging Face name `name`, e.g. `model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`.

    own: a family's own names within a layer, Hugging Face -> GGUF, which come first. Raises ValueError for a name that neither has.
    """
    stem, _, leaf = name.rpartition(".")
    if stem in _HF_GLOBAL_NAMES:
        return f"{_HF_GLOBAL_NAMES[stem]}.{leaf}"
    found = LAYER.fullmatch(stem)
    names = {**_HF_LAYER_NAMES, **(own or {})}
    if found is None or found["inner"] not in names:
        known = f"in a layer {', '.join(sorted(names))}; outside {', '.join(sorted(_HF_GLOBAL_NAMES))}"
        raise ValueError(f"no GGUF name is known for {name!r}; known are, {known}. Give others of a layer in `own`")
    return f"blk.{found['layer']}.{names[found['inner']]}.{leaf}"


def unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo the row order in which llama.cpp's converter stores q and k projections of the Llama family.

    There, within each head, components that rotate together are neighbours; here they are half a head apart.
    tensor: [num_heads * head_dim, ...]. Returns the same shape, copied.
    """
    heads = tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return heads.transpose(1, 2).reshape(tensor.shape)

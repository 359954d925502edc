"""What heads propose, written from their papers in plain torch: one sequence, all of it again for each draft, no cache.

A head sees pairs of a feature and the token that follows it. From known tokens x[0..n] and the target's hidden states h[0..n-1] it makes
features of (h[i], x[i+1]); the last one predicts the token after x[n], and comes back together with that token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import silu

Tensors = Mapping[str, torch.Tensor]
Head = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """x: [length, heads, dim], each head's halves turned by its position (Su et al. 2021)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[0])[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attention(x: torch.Tensor, tensors: Tensors, name: str, config: Mapping[str, Any]) -> torch.Tensor:
    dim, length = config["head_dim"], x.shape[0]

    def project(part: str) -> torch.Tensor:
        bias = tensors.get(f"{name}.{part}_proj.bias")
        return (x @ tensors[f"{name}.{part}_proj.weight"].T + (0 if bias is None else bias)).view(length, -1, dim)

    q, k, v = rotated(project("q"), config["rope_theta"]), rotated(project("k"), config["rope_theta"]), project("v")
    groups = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(groups, 1)) / dim**0.5
    hidden = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(groups, 1)).flatten(1) @ tensors[f"{name}.o_proj.weight"].T


def mlp(x: torch.Tensor, tensors: Tensors, name: str) -> torch.Tensor:
    gate, up, down = (tensors[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def decoder_layer(x: torch.Tensor, tensors: Tensors, name: str, config: Mapping[str, Any]) -> torch.Tensor:
    """A layer whose attention norm may be missing, as in EAGLE's first one."""
    eps, norm = config["rms_norm_eps"], tensors.get(f"{name}.input_layernorm.weight")
    x = x + attention(x if norm is None else rms_norm(x, norm, eps), tensors, f"{name}.self_attn", config)
    return x + mlp(rms_norm(x, tensors[f"{name}.post_attention_layernorm.weight"], eps), tensors, f"{name}.mlp")


def eagle_head(tensors: Tensors, config: Mapping[str, Any]) -> Head:
    """Li et al. 2024, figure 6: a fully connected layer on [embedding; feature], then a decoder layer."""

    def head(embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        x = torch.cat((embeddings, features), -1) @ tensors["fc.weight"].T + tensors.get("fc.bias", torch.zeros(1))
        return decoder_layer(x, tensors, "layers.0", config)

    return head


def eagle3_head(tensors: Tensors, config: Mapping[str, Any], layer: str = "midlayer") -> Head:
    """Li et al. 2025, figure 5, from fused features on."""

    def head(embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        eps = config["rms_norm_eps"]
        normed = rms_norm(features, tensors[f"{layer}.hidden_norm.weight"], eps)
        both = torch.cat((rms_norm(embeddings, tensors[f"{layer}.input_layernorm.weight"], eps), normed), -1)
        stream = normed if config.get("norm_before_residual") else features
        x = stream + attention(both, tensors, f"{layer}.self_attn", config)
        return x + mlp(rms_norm(x, tensors[f"{layer}.post_attention_layernorm.weight"], eps), tensors, f"{layer}.mlp")

    return head


def mtp_head(tensors: Tensors, config: Mapping[str, Any]) -> Head:
    """DeepSeek-AI 2024, equations 21 to 23, with MiMo's order of the two parts and its norm at the end."""

    def head(embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        name, eps = "model.mtp_layers.0", config["rms_norm_eps"]
        parts = (
            rms_norm(features, tensors[f"{name}.hidden_layernorm.weight"], eps),
            rms_norm(embeddings, tensors[f"{name}.token_layernorm.weight"], eps),
        )
        x = decoder_layer(torch.cat(parts, -1) @ tensors[f"{name}.input_proj.weight"].T, tensors, name, config)
        return rms_norm(x, tensors[f"{name}.final_layernorm.weight"], eps)

    return head


def propose(
    head: Head,
    logits: Callable[[torch.Tensor], torch.Tensor],
    embedding: torch.Tensor,
    ids: Sequence[int],
    features: torch.Tensor,
    count: int,
) -> list[tuple[int, float]]:
    """`count` drafts after `ids`, each with its lead over the second best. logits: [H] -> scores by target id. features:
    [len(ids) - 1, H], what the head reads of the target."""
    tokens, drafts = list(ids[1:]), list[tuple[int, float]]()
    for _ in range(count):
        out = head(embedding[tokens], features)
        best = logits(out[-1]).topk(2)
        drafts.append((int(best.indices[0]), float(best.values[0] - best.values[1])))
        tokens.append(drafts[-1][0])
        features = torch.cat((features, out[-1:]))
    return drafts

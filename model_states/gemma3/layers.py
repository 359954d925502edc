"""Gemma 3's layers. Dimension letters: T tokens, H hidden size, D head size, V vocabulary size."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import cast

import torch
from torch import nn

from modelrunner.attention import BoundAttention
from modelrunner.model_state import BuildContext, FullAttention, Tap
from modelrunner.model_states.common.groups import group_of_layer, window_groups
from modelrunner.model_states.common.layers import Attention, Embedding, GatedMLP, RMSNorm
from modelrunner.model_states.common.rope import cos_sin_table, inverse_frequencies
from modelrunner.model_states.gemma3.config import Gemma3Config


def cache_groups(config: Gemma3Config) -> tuple[FullAttention, ...]:
    """The groups `full` and `sliding`, whichever there are."""
    return window_groups(config.windows, config.num_heads, config.num_kv_heads, config.head_dim, config.scale)


class ScaledEmbedding(Embedding):
    """Token embeddings times sqrt(H), a factor that is rounded to the model's type, as it was in training."""

    def __init__(self, ctx: BuildContext, vocab_size: int, hidden_size: int) -> None:
        super().__init__(ctx, vocab_size, hidden_size)
        self.factor = torch.tensor(hidden_size**0.5, dtype=ctx.dtype).item()

    def forward(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        super().forward(ids, out)
        out.mul_(self.factor)


class DecoderLayer(nn.Module):
    """Attention and MLP, each between two norms; the second norm's result joins the residual stream."""

    def __init__(self, ctx: BuildContext, config: Gemma3Config, layer: int) -> None:
        super().__init__()
        norm = partial(RMSNorm, ctx, eps=config.eps, wide=True)
        self.attention_norm = norm(config.hidden_size)
        self.attention = Attention(
            ctx,
            config.hidden_size,
            group_of_layer(cache_groups(config), layer),
            layer,
            qkv_bias=config.bias,
            output_bias=config.bias,
            norm=norm,
        )
        self.attention_post_norm = norm(config.hidden_size)
        self.mlp_norm = norm(config.hidden_size)
        self.mlp = GatedMLP(ctx, config.hidden_size, config.intermediate_size, activation="gelu_tanh_mul")
        self.mlp_post_norm = norm(config.hidden_size)


class Gemma3Model(nn.Module):
    """Embedding, decoder layers, final norm, head.

    Norms hold 1 + the checkpoint's weight, in float32. `cos_sin_full`, `cos_sin_sliding`: rotary tables [max length, D] float32 of the
    cache groups that there are.
    """

    def __init__(self, ctx: BuildContext, config: Gemma3Config, max_length: int) -> None:
        super().__init__()
        self.embed = ScaledEmbedding(ctx, config.vocab_size, config.hidden_size)
        self.stack = tuple(DecoderLayer(ctx, config, layer) for layer in range(config.num_layers))  # the same modules, typed
        self.layers = nn.ModuleList(self.stack)
        self.norm = RMSNorm(ctx, config.hidden_size, config.eps, wide=True)
        self.head = ctx.linear(config.hidden_size, config.vocab_size, tied=self.embed.weight if config.tied else None)
        self.final_softcap = config.final_softcap
        self.groups = tuple(config.ropes)
        for group, rope in config.ropes.items():
            self.register_buffer(f"cos_sin_{group}", cos_sin_table(*inverse_frequencies(rope, max_length), max_length, ctx.device))

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, attention: Mapping[str, BoundAttention], tap: Tap) -> torch.Tensor:
        """hidden: [T, H] embeddings. Returns [T, H], normalised."""
        cos_sin = {group: self.get_buffer(f"cos_sin_{group}").index_select(0, positions) for group in self.groups}
        total = tap("layer.0", hidden)
        normed: torch.Tensor = self.stack[0].attention_norm(total)
        for index, layer in enumerate(self.stack):
            attended = layer.attention(normed, cos_sin[layer.attention.group], attention)
            normed, total = layer.mlp_norm.add(layer.attention_post_norm(attended), total)
            following = self.stack[index + 1].attention_norm if index + 1 < len(self.stack) else self.norm
            normed, total = following.add(layer.mlp_post_norm(layer.mlp(normed)), total)
            tapped = tap(f"layer.{index + 1}", total)
            if tapped is not total:  # somebody changed the stream: the norm was taken of what it was before
                total = tapped
                normed = following(total)
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, V]"""
        logits = cast(torch.Tensor, self.head(hidden))
        return logits if self.final_softcap is None else (logits / self.final_softcap).tanh_().mul_(self.final_softcap)

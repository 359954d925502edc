"""OLMo 2: norms stand behind attention and MLP, not before them, and q and k are normed over all heads at once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import cast

from torch import Tensor, nn

from modelrunner.attention import BoundAttention
from modelrunner.batch import Batch
from modelrunner.checkpoint import ModelCard
from modelrunner.model_state import BuildContext, FullAttention, ModelState, Needs, No, Tap, Yes
from modelrunner.model_states.common.card import head_counts, positive
from modelrunner.model_states.common.decoder_weights import HEAD_NORMS, ignored_names, layer_targets, outer_targets
from modelrunner.model_states.common.layers import Attention, Embedding, GatedMLP, RMSNorm
from modelrunner.model_states.common.rope import cos_sin_table, inverse_frequencies
from modelrunner.model_states.common.rope_spec import rope_spec
from modelrunner.settings import RunnerSettings
from modelrunner.weights import WeightMap

NORMS = {"post_attention_layernorm": "attention_norm", "post_feedforward_layernorm": "mlp_norm", **HEAD_NORMS}


class Olmo2Layer(nn.Module):
    """Attention and MLP; what they give is normed and joins the residual stream."""

    def __init__(self, ctx: BuildContext, state: Olmo2State, layer: int) -> None:
        super().__init__()
        size, bias = state.hidden, state.bias
        norm = partial(RMSNorm, ctx, eps=state.eps, wide=True)  # wide: rounded after the product with the weight, as in training
        self.attention = Attention(ctx, size, state.group, layer, qkv_bias=bias, output_bias=bias, norm=norm, norm_all_heads=True)
        self.attention_norm = norm(size)
        self.mlp = GatedMLP(ctx, size, positive(ctx.card, "intermediate_size"))
        self.mlp_norm = norm(size)

    def forward(self, hidden: Tensor, cos_sin: Tensor, attention: Mapping[str, BoundAttention]) -> Tensor:
        hidden = hidden + self.attention_norm(self.attention(hidden, cos_sin, attention))
        return cast(Tensor, hidden + self.mlp_norm(self.mlp(hidden)))


class Olmo2Model(nn.Module):
    cos_sin: Tensor  # the rotary table

    def __init__(self, ctx: BuildContext, state: Olmo2State, length: int) -> None:
        super().__init__()
        self.embed = Embedding(ctx, state.vocab, state.hidden)
        self.layers = nn.ModuleList(Olmo2Layer(ctx, state, layer) for layer in state.group.layers)
        self.norm = RMSNorm(ctx, state.hidden, state.eps, wide=True)
        self.head = ctx.linear(state.hidden, state.vocab, tied=self.embed.weight if state.tied else None)
        self.register_buffer("cos_sin", cos_sin_table(*inverse_frequencies(state.rope, length), length, ctx.device))


class Olmo2State(ModelState):
    """Tap points: `layer.i`, the residual stream [T, H] that enters layer i; the last one leaves the last layer."""

    module: Olmo2Model

    def __init__(self, card: ModelCard, settings: RunnerSettings) -> None:
        super().__init__(card, settings)
        self.hidden, self.vocab = positive(card, "hidden_size"), positive(card, "vocab_size")
        head_dim = int(card.config.get("head_dim") or self.hidden // positive(card, "num_attention_heads"))
        layers = tuple(range(positive(card, "num_hidden_layers")))
        self.group = FullAttention("full", layers, *head_counts(card), head_dim, head_dim**-0.5)
        self.rope = rope_spec(card.config, head_dim)
        self.eps = float(card.config["rms_norm_eps"])
        self.tied = bool(card.config.get("tie_word_embeddings", False))
        self.bias = bool(card.config.get("attention_bias", False))

    def declare(self, card: ModelCard, settings: RunnerSettings) -> Needs:
        taps = tuple(f"layer.{layer}" for layer in range(len(self.group.layers) + 1))
        return Needs((self.group,), self.hidden, self.vocab, self.rope.max_length, tap_points=taps)

    def supports(self, feature: str) -> Yes | No:
        known = ("prefix_cache", "chunked_prefill", "speculation", "prompt_logprobs", "graphs", "taps", "deterministic")
        return Yes() if feature in known else No(f"the OLMo 2 plugin knows nothing of {feature!r}")

    def weight_map(self, card: ModelCard) -> WeightMap:
        names = outer_targets(self.tied)
        for layer in self.group.layers:
            names.update(layer_targets(layer, NORMS, biased=("attention.qkv", "attention.output") if self.bias else ()))
        return WeightMap(names, ignored_names(len(self.group.layers), self.tied))

    def build(self, ctx: BuildContext) -> Olmo2Model:
        return Olmo2Model(ctx, self, min(self.settings.model.max_model_len or self.rope.max_length, self.rope.max_length))

    def embed(self, batch: Batch, out: Tensor) -> None:
        self.module.embed(batch.input_ids, out)

    def forward(
        self, hidden: Tensor, positions: Tensor, attention: Mapping[str, BoundAttention], caches: Mapping[str, Tensor], tap: Tap
    ) -> Tensor:
        cos_sin = self.module.cos_sin.index_select(0, positions)
        for index, layer in enumerate(self.module.layers):
            hidden = layer(tap(f"layer.{index}", hidden), cos_sin, attention)
        return cast(Tensor, self.module.norm(tap(f"layer.{len(self.module.layers)}", hidden)))

    def logits(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.module.head(hidden))

"""The model: layers of gated linear attention and of full attention take turns, each followed by a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from modelrunner.attention import BoundAttention
from modelrunner.batch import Batch
from modelrunner.checkpoint import ModelCard
from modelrunner.model_state import BuildContext, FullAttention, ModelState, Needs, No, RecurrentState, Tap, Yes
from modelrunner.model_states.common.card import positive
from modelrunner.model_states.common.layers import Attention, Embedding, GatedMLP, RMSNorm
from modelrunner.model_states.common.rope import cos_sin_table, inverse_frequencies
from modelrunner.model_states.common.rope_spec import rope_spec
from modelrunner.settings import RunnerSettings
from modelrunner.weights import Target, WeightMap
from modelrunner_recurrent.scan import page_elements

EPS = 1e-6
REPLAY = 4  # tokens that a page can replay: a step may hold one known token and three drafts
TEMPER = 16  # decays are sigmoid(gate) ** (1 / 16), as in the paper: a state remembers dozens of tokens


class GatedLinearAttention(nn.Module):
    """Its state is the only thing that reaches a token from those before it. Linears: `inputs` (q, k, v, gate) and `output`."""

    def __init__(self, ctx: BuildContext, state: RecurrentExample, layer: int) -> None:
        super().__init__()
        self.ops, self.group, self.heads, self.size = ctx.ops, state.recurrent, state.heads, state.head_dim
        self.layer = state.recurrent.layers.index(layer)
        self.inputs = ctx.linear(state.hidden, (self.heads * self.size,) * 4)
        self.norm = RMSNorm(ctx, self.size, EPS)
        self.output = ctx.linear(self.heads * self.size, state.hidden)

    def forward(self, x: Tensor, attention: Mapping[str, BoundAttention], caches: Mapping[str, Tensor]) -> Tensor:
        q, k, v, gate = (part.unflatten(-1, (self.heads, self.size)) for part in self.inputs(x).chunk(4, -1))
        decay = torch.sigmoid(gate.float()) ** (1 / TEMPER)
        meta, cache = attention[self.group.name].meta, caches[self.group.name][:, self.layer]
        places = (meta.block_table, meta.query_start, meta.query_len, meta.seq_len)
        out = self.ops.gated_scan(q, k, v, decay, cache, *places, interval=self.group.interval, replay=REPLAY, max_query=meta.max_query)
        return cast(Tensor, self.output(self.norm(out).flatten(1)))


class Layer(nn.Module):
    def __init__(self, ctx: BuildContext, state: RecurrentExample, layer: int) -> None:
        super().__init__()
        self.recurrent = layer in state.recurrent.layers
        self.mixer_norm, self.mlp_norm = RMSNorm(ctx, state.hidden, EPS), RMSNorm(ctx, state.hidden, EPS)
        self.mixer = GatedLinearAttention(ctx, state, layer) if self.recurrent else Attention(ctx, state.hidden, state.full, layer)
        self.mlp = GatedMLP(ctx, state.hidden, 2 * state.hidden)

    def forward(self, x: Tensor, cos_sin: Tensor, attention: Mapping[str, BoundAttention], caches: Mapping[str, Tensor]) -> Tensor:
        rest = (attention, caches) if self.recurrent else (cos_sin, attention)
        x = x + self.mixer(self.mixer_norm(x), *rest)
        return cast(Tensor, x + self.mlp(self.mlp_norm(x)))


class Model(nn.Module):
    cos_sin: Tensor  # the rotary table of the layers with full attention

    def __init__(self, ctx: BuildContext, state: RecurrentExample) -> None:
        super().__init__()
        self.embed = Embedding(ctx, state.vocab, state.hidden)
        self.layers = nn.ModuleList(Layer(ctx, state, layer) for layer in range(state.num_layers))
        self.norm = RMSNorm(ctx, state.hidden, EPS)
        self.head = ctx.linear(state.hidden, state.vocab)
        self.register_buffer("cos_sin", cos_sin_table(*inverse_frequencies(state.rope), state.rope.max_length, ctx.device))


class RecurrentExample(ModelState):
    """Even layers carry a state, in the cache group `recurrent`; odd ones attend, in `full`. Tap points: `layer.i`, what enters layer i."""

    module: Model

    def __init__(self, card: ModelCard, settings: RunnerSettings) -> None:
        super().__init__(card, settings)
        self.hidden, self.vocab, self.num_layers = (positive(card, f) for f in ("hidden_size", "vocab_size", "num_hidden_layers"))
        self.heads = positive(card, "num_attention_heads")
        self.head_dim = self.hidden // self.heads
        self.rope = rope_spec(card.config, self.head_dim)
        even, odd = tuple(range(0, self.num_layers, 2)), tuple(range(1, self.num_layers, 2))
        page, wanted = settings.cache.page_size, positive(card, "snapshot_interval")
        interval = -(-wanted // page) * page  # so that pages of both groups often end together, where a prefix can be found
        shape = (page_elements(self.heads, self.head_dim, REPLAY),)
        self.recurrent = RecurrentState("recurrent", even, shape, interval, torch.float32)
        self.full = FullAttention("full", odd, self.heads, self.heads, self.head_dim, self.head_dim**-0.5)

    def declare(self, card: ModelCard, settings: RunnerSettings) -> Needs:
        taps = tuple(f"layer.{layer}" for layer in range(self.num_layers))
        return Needs((self.full, self.recurrent), self.hidden, self.vocab, self.rope.max_length, tap_points=taps)

    def supports(self, feature: str) -> Yes | No:
        most = self.settings.speculation.num_tokens
        if feature == "speculation" and most >= REPLAY:
            return No(f"a page replays {REPLAY} tokens, the newest one included, and speculation.num_tokens is {most}")
        known = ("prefix_cache", "chunked_prefill", "speculation", "prompt_logprobs", "graphs", "taps")
        return Yes() if feature in known else No(f"the example knows nothing of {feature!r}")

    def weight_map(self, card: ModelCard) -> WeightMap:
        names = {f"{path}.weight": (Target(f"{path}.weight", kind="parameter"),) for path in ("embed", "norm")}
        names["head.weight"] = (Target("head"),)
        for layer in range(self.num_layers):
            mixer, norms = ("inputs", ["mixer.norm"]) if layer in self.recurrent.layers else ("qkv", [])
            for linear in (f"mixer.{mixer}", "mixer.output", "mlp.gate_up", "mlp.down"):
                names[f"layers.{layer}.{linear}.weight"] = (Target(f"layers.{layer}.{linear}", None),)
            for norm in (*norms, "mixer_norm", "mlp_norm"):
                names[f"layers.{layer}.{norm}.weight"] = (Target(f"layers.{layer}.{norm}.weight", kind="parameter"),)
        return WeightMap(names)

    def build(self, ctx: BuildContext) -> Model:
        return Model(ctx, self)

    def embed(self, batch: Batch, out: Tensor) -> None:
        self.module.embed(batch.input_ids, out)

    def forward(
        self, hidden: Tensor, positions: Tensor, attention: Mapping[str, BoundAttention], caches: Mapping[str, Tensor], tap: Tap
    ) -> Tensor:
        cos_sin = self.module.cos_sin.index_select(0, positions)
        for index, layer in enumerate(self.module.layers):
            hidden = layer(tap(f"layer.{index}", hidden), cos_sin, attention, caches)
        return cast(Tensor, self.module.norm(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.module.head(hidden))

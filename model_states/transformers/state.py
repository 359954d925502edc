"""The ModelState of any decoder of transformers that takes a custom attention function."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from modelrunner.attention import BoundAttention
from modelrunner.batch import Batch
from modelrunner.checkpoint import ModelCard
from modelrunner.model_state import BuildContext, ModelState, Needs, No, Tap, Yes
from modelrunner.model_states.transformers.config import hf_config, longest
from modelrunner.model_states.transformers.experts import experts_function, grouped_product_waits
from modelrunner.model_states.transformers.layers import PagedCalls, SplitModel, refuse_mixing
from modelrunner.model_states.transformers.probe import DecoderPlan, create, follow, new_name
from modelrunner.model_states.transformers.weights import PatternWeightMap, map_weights
from modelrunner.settings import RunnerSettings
from modelrunner.weights import WeightMap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNSUPPORTED = {
    "deterministic": "the products are torch's, which chooses their kernels by how many tokens there are",
    "graphs": "transformers' own Python runs in every step, and parts of it may wait for the device",
    "taps": "the layers are transformers' own, and name no points where hidden states could be read or changed",
}


class TransformersState(ModelState):
    """transformers' own modules, with attention on the paged cache: one cache group for the layers that ask the same of it.

    The linear layers stay torch's. transformers' tables of attention and experts are touched only while the model is made or runs, under
    a name of this state's own.
    """

    module: PreTrainedModel
    split: SplitModel
    names: PatternWeightMap

    def __init__(self, card: ModelCard, settings: RunnerSettings) -> None:
        super().__init__(card, settings)
        self.config = hf_config(card)
        self.max_length = longest(card, self.config, settings.model.max_model_len)
        self.checked = False

    @cached_property
    def plan(self) -> DecoderPlan:
        """What the model asks of attention. Raises ValueError when it asks for something that is not there."""
        return follow(self.card.architectures[0], self.config, self.max_length)

    def declare(self, card: ModelCard, settings: RunnerSettings) -> Needs:
        return Needs(
            cache_groups=self.plan.groups,
            hidden_size=self.plan.hidden_size,
            vocab_size=self.plan.vocab_size,
            max_model_len=self.max_length,
            capture="none",
            capture_reason=UNSUPPORTED["graphs"],
        )

    def supports(self, feature: str) -> Yes | No:
        if feature in ("prefix_cache", "chunked_prefill", "speculation", "prompt_logprobs", "prompt_embeds"):
            return Yes()
        return No(UNSUPPORTED.get(feature, f"models of transformers know nothing of {feature!r}"))

    def build(self, ctx: BuildContext) -> PreTrainedModel:
        if ctx.shard.size != 1:
            raise ValueError(f"models of transformers run on one device; a shard of {ctx.shard.size} was asked for")
        asked = ctx.settings.linear.scheme != "auto" or ctx.settings.pin.linear_scheme is not None or ctx.card.quantization is not None
        if asked and ctx.linear.scheme.name != "plain":  # else it is but a faster way to run plain weights, which these layers do without
            raise ValueError(f"linear.scheme is {ctx.linear.scheme.name!r}, but the linear layers are torch's own; only plain fits")
        name = new_name()
        with experts_function(name):
            experts = {"experts_implementation": name} if grouped_product_waits(ctx.device, ctx.dtype) else {}
            model = create(self.card.architectures[0], self.config, name, ctx.dtype, ctx.device, **experts)
        keep_wide(model, ctx.dtype)
        self.split = SplitModel(model, self.plan, name)
        self.names = map_weights(model)
        return model

    def weight_map(self, card: ModelCard) -> WeightMap:
        """Known once `build` has run: names and shapes are read off the model."""
        return self.names

    def fill_dummy(self, batch: Batch) -> None:
        """Before the first step, check on the weights that the batch may be run as one sequence without rows."""
        if not self.checked:
            refuse_mixing(self.split, batch.input_ids.device)
            self.checked = True

    def embed(self, batch: Batch, out: torch.Tensor) -> None:
        out.copy_(self.split.embed(batch.input_ids))

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: Mapping[str, BoundAttention],
        caches: Mapping[str, torch.Tensor],
        tap: Tap,
    ) -> torch.Tensor:
        return self.split.hidden(positions, PagedCalls(self.plan, attention), inputs_embeds=hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.split.logits(hidden)


def keep_wide(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Keep in float32 what the model says must stay so in a 16-bit `dtype`."""
    parts: set[str] = set(model._keep_in_fp32_modules_strict or ()) if dtype in (torch.float16, torch.bfloat16) else set()
    if dtype == torch.float16:
        parts |= set(model._keep_in_fp32_modules or ())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if any(part in name for part in parts) and tensor.is_floating_point():
            tensor.data = tensor.data.float()

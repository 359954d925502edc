"""A model of transformers, cut in two: hidden states from embeddings, and logits from hidden states.

Dimension letters: T tokens of the step, H hidden size, HQ query heads, HK key and value heads, D head size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from modelrunner.attention import BoundAttention
from modelrunner.model_states.transformers.experts import experts_function
from modelrunner.model_states.transformers.probe import AttentionCall, DecoderPlan, attention_function

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SplitModel:
    """`hidden` and `logits` of one model. name: the implementation of attention (and experts) that its configuration asks for."""

    def __init__(self, model: PreTrainedModel, plan: DecoderPlan, name: str) -> None:
        self.plan = plan
        self.name = name
        self.embed = model.get_input_embeddings()
        self.decoder = model.get_submodule(plan.decoder)
        # The model's own forward knows what follows its head (scales, softcaps); it gets its hidden states from us instead of its decoder.
        self.head = replaced(model, plan.decoder, GivenHidden(plan.output))

    def hidden(self, positions: torch.Tensor, attend: Callable[..., Any], **inputs: torch.Tensor) -> torch.Tensor:
        """positions [T]; inputs: `inputs_embeds` [T, H] or `input_ids` [T]; attend: the attention function. Returns [T, H], normalised."""
        batched = {name: tensor.unsqueeze(0) for name, tensor in inputs.items()}
        with attention_function(self.name, attend), experts_function(self.name):
            output = self.decoder(**batched, position_ids=positions.unsqueeze(0), use_cache=False)
        return cast(torch.Tensor, output.last_hidden_state[0])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, V]."""
        return cast(torch.Tensor, self.head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0])


class GivenHidden(nn.Module):
    """Stands in a decoder's place and returns its input embeddings as the hidden states."""

    def __init__(self, output: type[Any]) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> Any:
        return self.output(last_hidden_state=inputs_embeds)


def replaced(module: nn.Module, path: str, part: nn.Module) -> nn.Module:
    """A copy of `module` that has `part` at `path` and shares everything else."""
    first, _, rest = path.partition(".")
    twin = copy(module)
    children = cast(dict[str, nn.Module], module._modules)
    twin._modules = {**children, first: replaced(children[first], rest, part) if rest else part}
    return twin


class PagedCalls:
    """The attention function of one step: the n-th call of a forward is served by the cache group of the n-th call that was planned."""

    def __init__(self, plan: DecoderPlan, attention: Mapping[str, BoundAttention]) -> None:
        self.plan = plan
        self.attention = attention
        self.place = 0

    def __call__(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """query [1, HQ, T, D], key and value [1, HK, T, D] -> ([1, T, HQ, D], no weights)."""
        place, self.place = self.place, self.place + 1
        call = self.plan.calls[place]
        q, k, v = (widened(tensor[0].transpose(0, 1), call) for tensor in (query, key, value))
        out = self.attention[self.plan.group_of[place]](q, k, v, place, kwargs.get("s_aux"))
        return out.view(1, -1, call.num_heads, call.cached_dim)[..., : call.value_dim], None


def widened(tensor: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """[T, heads, D] -> [T, heads, size of a head in the cache], filled up with zeros."""
    lacking = call.cached_dim - tensor.shape[-1]
    return nn.functional.pad(tensor, (0, lacking)) if lacking else tensor


def attend_self(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attention in which every token sees itself alone."""
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None


def refuse_mixing(split: SplitModel, device: torch.device) -> None:
    """Check on the loaded weights what the batch relies on: that tokens meet in attention alone, and that embeddings are all of the input.

    With an attention in which tokens see only themselves, other neighbours must not change a token's hidden state. Raises ValueError.
    """
    ids = torch.arange(4, device=device) % split.plan.vocab_size
    positions = torch.arange(4, device=device)
    order = torch.tensor([2, 0, 3, 1], device=device)
    with torch.inference_mode():
        plain = split.hidden(positions, attend_self, inputs_embeds=split.embed(ids))
        mixed = split.hidden(positions[order], attend_self, inputs_embeds=split.embed(ids[order]))
        by_id = split.hidden(positions, attend_self, input_ids=ids)
    allowed = 1e-3 if plain.dtype == torch.float32 else 5e-2
    compared = {
        "a token's hidden state depends on its neighbours in the batch": (mixed, plain[order]),
        "it reads more of its input than the embeddings": (by_id, plain),
    }
    for meaning, (found, wanted) in compared.items():
        if not torch.allclose(found, wanted, rtol=allowed, atol=allowed * float(plain.abs().max()), equal_nan=True):
            raise ValueError(f"{type(split.decoder).__name__} cannot run on the paged cache: with attention switched off, {meaning}")

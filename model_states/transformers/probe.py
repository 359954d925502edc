"""What a decoder of transformers asks of attention, found by running it once without data.

A copy of the model on the `meta` device (shapes only) runs a few tokens with an attention function that takes notes. So heads, scales and
softcaps are those that the model really passes, and windows those of the masks that it really makes, whatever its configuration calls them.
Whatever the paged cache cannot do is refused here, by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from torch import nn
from transformers.initialization import no_init_weights
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modelrunner.model_state import CacheGroup, FullAttention, SlidingWindow

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedConfig, PreTrainedModel

TOKENS = 7  # of the dataless run; a number that no sensible model has elsewhere in its shapes
# Keywords of an attention function that change nothing here: no training, no cache of theirs, positions already used.
IGNORED = frozenset({"cache_position", "dropout", "is_causal", "output_attentions", "past_key_values", "position_ids", "use_cache"})
READ = frozenset({"s_aux", "scaling", "sliding_window", "softcap"})
MEANING = {"position_bias": "position_bias (scores by distance)"}

_names = count()


class Unfit(ValueError):
    """The model asks for something that attention over the paged cache, or a batch without rows, cannot give."""


@dataclass(frozen=True)
class AttentionCall:
    """What one call of the attention function asks for. head_dim: of queries and keys; value_dim: of values.

    scale: factor on q.k. window: tokens that a query sees, itself included; None for all. sinks: each head has a sink (`s_aux`).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool

    @property
    def cached_dim(self) -> int:
        """Size of a head in the cache, which keeps keys and values of one size: the smaller is filled up with zeros."""
        return max(self.head_dim, self.value_dim)


@dataclass(frozen=True)
class DecoderPlan:
    """calls: what each attention call of a forward asks for, in order. groups: cache groups; their layers are indices of `calls`.

    group_of: group name of each call. decoder: path in the model of the part that gives hidden states. output: type of what it returns.
    hidden_size: of the embeddings.
    """

    calls: tuple[AttentionCall, ...]
    groups: tuple[CacheGroup, ...]
    group_of: tuple[str, ...]
    decoder: str
    output: type[Any]
    hidden_size: int
    vocab_size: int


@contextmanager
def attention_function(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """transformers knows `function` as the attention implementation `name` while the block runs, and not after it."""
    ALL_ATTENTION_FUNCTIONS[name] = function
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS.pop(name)


@contextmanager
def mask_function(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """The same for masks. They are looked up in the class's own table, which has a way in and none out."""
    AttentionMaskInterface.register(name, function)
    try:
        yield
    finally:
        AttentionMaskInterface._global_mapping.pop(name, None)


def new_name() -> str:
    """A name for an attention implementation that nobody else uses, so that engines in one process do not meet."""
    return f"modelrunner_{next(_names)}"


def create(
    architecture: str, config: PreTrainedConfig, name: str, dtype: torch.dtype, device: torch.device | str, **options: Any
) -> PreTrainedModel:
    """The model `architecture` with empty parameters and its attention looked up under `name`."""
    cls: Any = getattr(transformers, architecture)
    with attention_function(name, unbound), torch.device(device), no_init_weights():
        model: Any = cls._from_config(deepcopy(config), dtype=dtype, attn_implementation=name, **options)
        model.tie_weights()  # part of the initialisation that was left out
    return cast("PreTrainedModel", model.eval().requires_grad_(False))


def unbound(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("attention was called outside of a step")


def follow(architecture: str, config: PreTrainedConfig, max_length: int) -> DecoderPlan:
    """Run the model without data and note what it asks. max_length: tokens that a request may have.

    Raises Unfit (a ValueError) that says what the model does and why it cannot be run.
    """
    name = new_name()
    try:
        # Experts as one batched product run without data, and shapes do not depend on the type.
        model = create(architecture, config, name, torch.float32, "meta", experts_implementation="batched_mm")
        refuse_memory(model)
        notes = _run(model, name, max_length)
    except Unfit as error:
        raise Unfit(f"the transformers fallback does not run {architecture}: {error}") from None
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise Unfit(
            f"the transformers fallback does not run {architecture}: without data its forward fails, so what it needs is unknown: {cause}"
        ) from error
    return notes


def refuse_memory(model: PreTrainedModel) -> None:
    """Refuse modules that carry something from token to token besides attention, and ones that look at all rows together."""
    if model._is_stateful or any(getattr(module, "_is_stateful", False) for module in model.modules()):
        raise Unfit("it keeps a recurrent state besides the attention cache")
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.RNNBase):
            raise Unfit(f"{path} ({type(module).__name__}) mixes neighbouring tokens outside of attention")
        kinds = getattr(module, "rope_type", "")
        for kind in kinds.values() if isinstance(kinds, Mapping) else [kinds]:
            if "dynamic" in kind or kind == "longrope":
                raise Unfit(f"{path} ({kind}) stretches rotary positions by the longest request of a batch; requests must stay apart")


def _run(model: PreTrainedModel, name: str, max_length: int) -> DecoderPlan:
    decoder = cast(Any, model).get_decoder()
    path = next((path for path, module in model.named_modules() if module is decoder), "")
    if not path:
        raise Unfit("it has no decoder apart from its head")
    takes = inspect.signature(decoder.forward).parameters
    lacking = [argument for argument in ("inputs_embeds", "position_ids") if argument not in takes]
    if lacking:
        raise Unfit(f"{type(decoder).__name__} takes no {' and no '.join(lacking)}")
    calls: list[AttentionCall] = []

    def note(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None, **extra: Any
    ) -> Any:
        calls.append(attention_call(module, query, key, value, attention_mask, extra, max_length))
        return value.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None

    zeros = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    with torch.inference_mode(), attention_function(name, note), mask_function(name, seen_by):
        embeddings = model.get_input_embeddings()(zeros)
        # A mask of ones asks for the mask of one plain sequence. Without it transformers would look at positions, of which there are none.
        output = decoder(inputs_embeds=embeddings, position_ids=zeros, attention_mask=torch.ones_like(zeros), use_cache=False)
    if not calls:
        raise Unfit("it never calls the attention function")
    hidden = output.last_hidden_state
    if hidden.shape[:2] != (1, TOKENS):
        raise Unfit(f"{type(decoder).__name__} returns hidden states of shape {tuple(hidden.shape)} for {TOKENS} tokens")
    groups, group_of = cache_groups(calls)
    vocab_size = model.config.get_text_config().vocab_size
    return DecoderPlan(tuple(calls), groups, group_of, path, type(output), embeddings.shape[-1], vocab_size)


def attention_call(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, extra: Mapping[str, Any], max_length: int
) -> AttentionCall:
    """Read one call: query [1, H, T, D], key [1, HK, T, D], value [1, HK, T, DV], and keywords. Raises Unfit for whatever is not served."""
    layer = type(module).__name__
    if not (query.shape[:1] == key.shape[:1] == (1,) and query.shape[2] == key.shape[2] == value.shape[2] == TOKENS):
        shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
        raise Unfit(f"{layer} attends with q, k, v of shapes {shapes}; [1, heads, {TOKENS}, head size] each is needed")
    given = {name for name, value in extra.items() if value is not None and value is not False}
    unknown = sorted(MEANING.get(name, name) for name in given - IGNORED - READ)
    if unknown:
        raise Unfit(f"{layer} passes {', '.join(unknown)} to attention, which attention over the paged cache does not take")
    if extra.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise Unfit(f"{layer} looks at later tokens too")
    window = mask.window(layer, max_length) if isinstance(mask, Mask) else plain_window(layer, mask, extra.get("sliding_window"))
    if window is not None and window >= max_length:
        window = None
    scale = extra.get("scaling")
    return AttentionCall(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        scale=float(query.shape[3] ** -0.5 if scale is None else scale),
        window=window,
        softcap=extra.get("softcap"),
        sinks=extra.get("s_aux") is not None,
    )


def plain_window(layer: str, mask: Any, window: int | None) -> int | None:
    """The window of a call without a mask made by transformers: the keyword. A mask of the model's own making is refused."""
    if isinstance(mask, torch.Tensor) and mask.ndim > 2:
        raise Unfit(f"{layer} attends with a mask of its own making, of shape {tuple(mask.shape)}")
    return window


@dataclass(frozen=True)
class Mask:
    """A mask as the rule that would fill it: rule(batch, head, query position, key position) -> visible."""

    rule: Callable[..., Any]

    def window(self, layer: str, length: int) -> int | None:
        """Tokens that a query sees, itself included; None for all before it. Raises Unfit when it sees anything else."""
        keys = torch.arange(length)
        zero = torch.zeros((), dtype=torch.long)
        last = length - 1
        queries = sorted({min(max(query, 0), last) for query in (0, 1, 2, last // 3, last // 2, 2 * last // 3, last - 1, last)})
        try:
            rows = [torch.as_tensor(self.rule(zero, zero, torch.tensor(query), keys)).expand(length) for query in queries]
            seen = [int(row.sum()) for row in rows]
        except Exception as error:
            raise Unfit(f"{layer} has a mask that depends on data ({type(error).__name__})") from error
        window = max(seen)
        for query, row in zip(queries, rows, strict=True):
            if not torch.equal(row, (keys <= query) & (keys > query - window)):
                raise Unfit(f"{layer} has a mask that is neither causal nor a causal sliding window")
        return None if window == length else window


def seen_by(mask_function: Callable[..., Any], **_: Any) -> Mask:
    """The mask implementation of the dataless run: keeps the rule instead of filling a tensor."""
    return Mask(mask_function)


def cache_groups(calls: list[AttentionCall]) -> tuple[tuple[CacheGroup, ...], tuple[str, ...]]:
    """One cache group for calls that ask for the same: (groups, the group name of each call). The layers are places in `calls`."""
    kinds = list(dict.fromkeys(calls))
    groups: list[CacheGroup] = []
    names: dict[AttentionCall, str] = {}
    for kind in kinds:
        stem = "full" if kind.window is None else "sliding"
        same = sum(name.partition(".")[0] == stem for name in names.values())
        names[kind] = f"{stem}.{same}" if same else stem
        layers = tuple(place for place, call in enumerate(calls) if call == kind)
        shape = (kind.num_heads, kind.num_kv_heads, kind.cached_dim, kind.scale, kind.softcap, kind.sinks)
        if kind.window is None:
            groups.append(FullAttention(names[kind], layers, *shape))
        else:
            groups.append(SlidingWindow(names[kind], layers, *shape, window_size=kind.window))
    return tuple(groups), tuple(names[call] for call in calls)

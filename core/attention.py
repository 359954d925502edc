"""Attention as a plugin point: the metadata of a step, and the backend that a plugin supplies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from modelrunner.errors import PluginError
from modelrunner.model_state import CacheGroup, FullAttention

if TYPE_CHECKING:
    from modelrunner.batch import Batch, Prompts
    from modelrunner.ops import Ops

V = TypeVar("V")


@dataclass(frozen=True)
class AttentionMeta:
    """What attention over one cache group needs to know of a step. Tensors are exact and on the device; integers are host upper bounds.

    query_start [N+1], query_len [N], seq_len [N] int32; token_row [T], positions [T] int64; slots [T] int64 (-1: do not write);
    block_table [N, pages] int32. The first `num_decode` rows have exactly `decode_query` query slots each; it is 0 in a captured step with
    prompts, which serves any number of such rows. captured: the step is made for a graph, which runs it again with other contents.
    prompts: exact lengths, on the host, of the rows after those (not of padding); None where only the device has them: in a step made for a
    graph or at start-up. Lengths of decode rows depend on what earlier steps sampled, so the host bounds them alone, by max_seq_len.
    """

    num_rows: int
    num_tokens: int
    num_decode: int
    decode_query: int
    max_query: int
    max_seq_len: int
    query_start: torch.Tensor
    query_len: torch.Tensor
    seq_len: torch.Tensor
    token_row: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_table: torch.Tensor
    captured: bool = False
    prompts: Prompts | None = None


@dataclass(frozen=True)
class Rotary:
    """What happens to queries and keys between the projection and attention.

    cos_sin: [T, R] float32 for the step's positions, as in the operation `apply_rope`. q_norm, k_norm: weights [head_dim] of RMS norms over
    each head, both or none. eps: of these norms.
    """

    cos_sin: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0


def attention_meta(group: CacheGroup, batch: Batch, captured: bool = False) -> AttentionMeta:
    """The core's own metadata for `group`: views of the batch."""
    return AttentionMeta(
        num_rows=batch.num_rows,
        num_tokens=batch.num_tokens,
        num_decode=batch.num_decode,
        decode_query=1 + batch.num_draft,
        max_query=batch.max_query,
        max_seq_len=batch.max_seq_len,
        query_start=batch.query_start,
        query_len=batch.query_len,
        seq_len=batch.seq_len,
        token_row=batch.token_row,
        positions=batch.positions,
        slots=batch.slots[group.name],
        block_table=batch.block_tables[group.name],
        captured=captured,
        prompts=batch.prompts,
    )


class AttentionBackend(ABC):
    """Runs attention over one cache group. One instance per group and engine.

    needs_host_lengths: it cannot work from device lengths alone, so no step is captured. One that only makes use of
    `AttentionMeta.prompts` where they are needs none. capturable: its calls may be captured into a graph. deterministic: a query's result
    depends, bit for bit, on no other query, provided that this holds for the operations. takes_scales: it can serve a cache of
    float8_e4m3fn, in which heads are kept divided by `scales` (see the operations `write_cache` and `paged_attention`).

    scales: [num_layers, 2, num_kv_heads] float32 on the device, of keys and of values; None for a cache of a larger type. Set by the core
    before the first step. Their memory stays where it is, their values may change between steps.
    """

    needs_host_lengths: bool = False
    capturable: bool = True
    deterministic: bool = False
    takes_scales: bool = False
    scales: torch.Tensor | None = None

    def __init__(self, group: FullAttention, cache: torch.Tensor, ops: Ops, dtype: torch.dtype) -> None:
        """cache: [num_pages, num_layers, tokens_per_page, 2, num_kv_heads, head_dim]; page 0 is the null page, zeros. dtype: of queries."""
        self.group = group
        self.cache = cache
        self.ops = ops
        self.dtype = dtype

    def begin(self, meta: AttentionMeta) -> Any:
        """D. Once a step, before its first layer: work that all layers share, e.g. a list of what to read. The result goes to `attend`."""
        return meta

    @abstractmethod
    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, step: Any, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """D. Write k and v at the step's slots, then attend causally.

        q: [T, num_heads, head_dim]. k, v: [T, num_kv_heads, head_dim]. layer: index within the group (place in a page). step: what
        `begin` returned. sinks: [num_heads], given only if `group.sinks`; a backend that takes none declines such groups.
        Returns [T, num_heads * head_dim] in q's dtype; rows of invalid tokens are finite.
        """

    def attend_qkv(self, qkv: torch.Tensor, rotary: Rotary, layer: int, step: Any, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """D. `attend` from the projection's output: norm and rotate queries and keys first. A backend may do all of it in fewer passes.

        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim]: queries, keys, values. The rest as in `attend`.
        """
        heads, kv_heads, dim = self.group.num_heads, self.group.num_kv_heads, self.group.head_dim
        q, k, v = (part.unflatten(-1, (-1, dim)) for part in qkv.split((heads * dim, kv_heads * dim, kv_heads * dim), -1))
        if rotary.q_norm is not None:
            q, k = self.ops.rms_norm(q, rotary.q_norm, rotary.eps), self.ops.rms_norm(k, rotary.k_norm, rotary.eps)
        q, k = self.ops.apply_rope(q, k, None, rotary.cos_sin)
        return self.attend(q, k, v, layer, step, sinks)

    def attend_qkv_at(
        self,
        qkv: torch.Tensor,
        rotary: Rotary,
        layer: int,
        step: Any,
        meta: AttentionMeta,
        tokens: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """D. `attend_qkv` of one token of each of the step's first rows, its last one; the keys and values of all tokens are written.

        meta: of the step. tokens: [n] int64, where these are in the step; those of rows that have no token are anywhere, and their outputs
        finite. Returns [n, num_heads * head_dim].
        """
        return self.attend_qkv(qkv, rotary, layer, step, sinks).index_select(0, tokens)


class NoAttention(AttentionBackend):
    """Stands for a backend where a cache group does not attend: the metadata is all that there is."""

    def __init__(self, group: CacheGroup, cache: torch.Tensor, ops: Ops, dtype: torch.dtype) -> None:
        self.group = group  # type: ignore[assignment]
        self.cache = cache
        self.ops = ops
        self.dtype = dtype

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, step: Any, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        raise PluginError(attends_not(self.group))


def attends_not(group: CacheGroup) -> str:
    """What to do with a group that does not attend, for messages."""
    return (
        f"cache group {group.name!r} ({type(group).__name__}) does not attend; read and write `caches[{group.name!r}]`, with the metadata "
        f"in `attention[{group.name!r}].meta`"
    )


class BoundAttention:
    """`attention[group]` of a step: backend and metadata, called with the model's own layer numbers."""

    __slots__ = ("_step", "backend", "layer_index", "meta")

    def __init__(self, backend: AttentionBackend, layer_index: dict[int, int], meta: AttentionMeta) -> None:
        self.backend = backend
        self.layer_index = layer_index
        self.meta = meta
        self._step: Any = None

    def begin(self) -> None:
        """D. Called by the runner at the head of the step."""
        self._step = self.backend.begin(self.meta)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of the model's layer `layer`; shapes as in `AttentionBackend.attend`. Raises KeyError for a layer of another group,
        ValueError when the group declares sinks and none are given, or the other way round."""
        place = self._place(layer, sinks)
        if sinks is None:
            return self.backend.attend(q, k, v, place, self._step)
        return self.backend.attend(q, k, v, place, self._step, sinks)

    def from_qkv(self, qkv: torch.Tensor, rotary: Rotary, layer: int, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attention from the projection's output, see `AttentionBackend.attend_qkv`. Raises as the call does."""
        return self.backend.attend_qkv(qkv, rotary, self._place(layer, sinks), self._step, sinks)

    def from_qkv_at(
        self, qkv: torch.Tensor, rotary: Rotary, layer: int, tokens: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The same of some tokens alone, see `AttentionBackend.attend_qkv_at`: of a last layer, of which nothing else is wanted."""
        return self.backend.attend_qkv_at(qkv, rotary, self._place(layer, sinks), self._step, self.meta, tokens, sinks)

    def _place(self, layer: int, sinks: torch.Tensor | None) -> int:
        group = self.backend.group
        try:
            place = self.layer_index[layer]
        except KeyError:
            raise KeyError(f"layer {layer} is not in cache group {group.name!r}, which has the layers {list(self.layer_index)}") from None
        if (sinks is not None) != getattr(group, "sinks", False):
            declared, given = ("no sinks", "some") if sinks is not None else ("sinks", "none")
            raise ValueError(f"cache group {group.name!r} declares {declared}, but layer {layer} gives {given}; see FullAttention.sinks")
        return place


class ByGroup(dict[str, V]):
    """Something for each cache group, by name. A name that was not declared raises a KeyError that lists those that were."""

    def __missing__(self, name: str) -> V:
        raise KeyError(f"no cache group is called {name!r}; `declare` named {', '.join(map(repr, self)) or 'none'}")

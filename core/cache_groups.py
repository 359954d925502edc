"""Cache groups: layers that share one block table, and what their pages hold.

A ModelState and a drafter declare theirs; `modelrunner.model_state` names them for plugins.
"""

from __future__ import annotations

import math
from abc import ABC
from dataclasses import dataclass
from numbers import Integral
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CacheGroup(ABC):
    """Layers that share one block table. An open protocol: a family may subclass it for a memory of its own.

    A group whose pages hold something for each token defines `token_shape`. One whose pages hold a fixed amount, however many tokens they
    stand for, overrides `page_shape` and gives `page_tokens` (see `RecurrentState`).

    name: key of the group in `attention` and `caches`.
    layers: the model's layer indices that the group serves, in the order in which they lie in a page.
    """

    name: str
    layers: tuple[int, ...]

    attends: ClassVar[bool] = True
    """Whether an `attention_backend` serves the group. If not, the state reads and writes `caches[name]` itself."""

    def token_shape(self) -> tuple[int, ...]:
        """Shape of what one layer keeps for one token, e.g. [2, num_kv_heads, head_dim]."""
        raise NotImplementedError(f"{type(self).__name__} {self.name!r} keeps nothing by the token; its pages have a `page_shape`")

    def page_shape(self, tokens: int) -> tuple[int, ...]:
        """Shape of what one layer keeps in a page of `tokens` tokens."""
        return (tokens, *self.token_shape())

    def page_tokens(self) -> int | None:
        """Tokens that a page stands for, where the group decides that itself. None: as many as fit into a page."""
        return None

    def cache_dtype(self) -> torch.dtype | None:
        """Type of the group's elements; None for that of the cache."""
        return None

    def page_elements(self, tokens: int) -> int:
        """Cache elements of a page of `tokens` tokens, over all layers of the group."""
        return len(self.layers) * math.prod(self.page_shape(tokens))

    def needed_from(self, length: IntArray) -> IntArray:
        """Lowest position that computing position `length` and later ones can still read, for an array of lengths (tokens).

        It decides what may be freed (`length` = committed tokens) and what a prefix hit of `length` tokens must find. Full
        attention needs everything: 0.
        """
        return np.zeros_like(length)


def check_group(group: CacheGroup) -> None:
    """Raise ValueError or TypeError, with the group's name, unless its pages hold something of a known size and type."""
    if not group.layers:
        raise ValueError(f"cache group {group.name!r}: layers is {group.layers!r}; the index of at least one layer is needed")
    tokens = group.page_tokens() or 1
    shape = group.page_shape(tokens)
    if not all(isinstance(size, Integral) and size > 0 for size in shape):
        raise ValueError(
            f"cache group {group.name!r}: what a layer keeps in a page of {tokens} tokens has the shape {tuple(shape)}; whole numbers "
            "above 0 are needed"
        )
    dtype: object = group.cache_dtype()
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"cache group {group.name!r}: its type is {dtype!r}; a torch.dtype is needed, e.g. torch.float32, or None for the cache's own"
        )


@dataclass(frozen=True)
class FullAttention(CacheGroup):
    """Attention over all earlier tokens.

    scale: factor on q.k. softcap: scores become softcap * tanh(scores / softcap); None for none. sinks: every call of `attention[group]`
    passes `sinks`, each head's score of one more key that has no value.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        for field_name in ("num_heads", "num_kv_heads", "head_dim"):
            value: object = getattr(self, field_name)
            if not isinstance(value, Integral) or value < 1:
                raise ValueError(f"cache group {self.name!r}: {field_name} is {value!r}; a whole number above 0 is needed")

    def token_shape(self) -> tuple[int, ...]:
        return (2, self.num_kv_heads, self.head_dim)

    @property
    def window(self) -> int | None:
        """Tokens that a query sees, itself included; None for all."""
        return None


@dataclass(frozen=True)
class SlidingWindow(FullAttention):
    """Attention over the last `window_size` tokens, the query's own included."""

    window_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window_size < 1:
            raise ValueError(f"cache group {self.name!r}: window_size is {self.window_size}; it must be at least 1 token")

    @property
    def window(self) -> int | None:
        return self.window_size

    def needed_from(self, length: IntArray) -> IntArray:
        return np.maximum(length - self.window_size + 1, 0)


@dataclass(frozen=True)
class RecurrentState(CacheGroup):
    """Layers that carry a state from token to token, of a size that does not grow.

    Entry i of the block table holds the state after min(length, (i + 1) * P) tokens of the request, P = tokens a page. A step reads entry
    (length - 1) // P (none for a request without tokens: its state is the null page's, zeros) and writes the entries of its own tokens,
    first to last: each is left at its own end, the last one at the end of the step. So a full page is a snapshot that never changes
    again and can be found by other requests, and only the newest page is still needed.

    With drafts a step may compute tokens that do not count. A page then keeps an older state, and the inputs of the tokens since, and
    its reader applies as many of them as `batch.computed` says: K + 1 copies of the state are never needed. Room for these inputs is part
    of `state_shape`.

    state_shape: what one layer keeps in a page. interval: P, the tokens between snapshots; a larger one takes less memory while a prompt is
    read, a smaller one finds longer prefixes. A prefix ends where the pages of all groups do, so let it be a multiple of
    `cache.page_size`; where no prefix is to be found, it can be the model's whole context. dtype: None for the cache's.
    """

    state_shape: tuple[int, ...]
    interval: int
    dtype: torch.dtype | None = None

    attends: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(f"cache group {self.name!r}: the interval is {self.interval}; it must be at least 1 token")

    def page_shape(self, tokens: int) -> tuple[int, ...]:
        return self.state_shape

    def page_tokens(self) -> int:
        return self.interval

    def cache_dtype(self) -> torch.dtype | None:
        return self.dtype

    def needed_from(self, length: IntArray) -> IntArray:
        return np.maximum(length - 1, 0)

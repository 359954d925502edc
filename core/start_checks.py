"""Checks of what the steps of a start call, and with what, so that a mistake is told there and not at the first prompt.

Only steps at the warm-up are made with them: later ones get the plain `BoundAttention` and tap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

import torch

from modelrunner.attention import AttentionBackend, AttentionMeta, BoundAttention, Rotary, attends_not
from modelrunner.model_state import CacheGroup, FullAttention, Tap

Wanted = tuple[str, object, Sequence[int]]  # the name of an argument, what was given, and the shape that is accepted


class CheckedAttention(BoundAttention):
    """`attention[group]` that looks at its arguments before the backend does.

    Raises TypeError that names who called, the group, the layer, and what is wrong and accepted.
    """

    __slots__ = ("_dtype", "_owner")

    def __init__(self, backend: AttentionBackend, layer_index: dict[int, int], meta: AttentionMeta, owner: str, dtype: torch.dtype) -> None:
        """owner: who calls it, for messages. dtype: of activations."""
        super().__init__(backend, layer_index, meta)
        self._owner = owner
        self._dtype = dtype

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, sinks: torch.Tensor | None = None) -> torch.Tensor:
        if (group := self._group(layer)) is not None:
            queries, keys = ([self.meta.num_tokens, heads, group.head_dim] for heads in (group.num_heads, group.num_kv_heads))
            accepted = f"q [T, H, D] = {queries}, k and v [T, HK, D] = {keys}"
            self._require(group, layer, accepted, ("q", q, queries), ("k", k, keys), ("v", v, keys))
            self._require_sinks(group, layer, sinks)
        return super().__call__(q, k, v, layer, sinks)

    def from_qkv(self, qkv: torch.Tensor, rotary: Rotary, layer: int, sinks: torch.Tensor | None = None) -> torch.Tensor:
        self._require_qkv(qkv, layer, sinks)
        return super().from_qkv(qkv, rotary, layer, sinks)

    def from_qkv_at(
        self, qkv: torch.Tensor, rotary: Rotary, layer: int, tokens: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._require_qkv(qkv, layer, sinks)
        return super().from_qkv_at(qkv, rotary, layer, tokens, sinks)

    def _require_qkv(self, qkv: object, layer: int, sinks: torch.Tensor | None) -> None:
        if (group := self._group(layer)) is not None:
            shape = [self.meta.num_tokens, (group.num_heads + 2 * group.num_kv_heads) * group.head_dim]
            self._require(group, layer, f"qkv [T, (H + 2 * HK) * D] = {shape}", ("qkv", qkv, shape))
            self._require_sinks(group, layer, sinks)

    def _call(self, group: CacheGroup, layer: int) -> str:
        """What was called, for messages."""
        return f"{self._owner} called `attention[{group.name!r}]` for layer {layer}"

    def _group(self, layer: int) -> FullAttention | None:
        """The group, which must attend and have the layer; None for one of a family's own kind, whose shapes only its backend knows."""
        group: CacheGroup = self.backend.group
        if not group.attends:
            raise TypeError(f"{self._call(group, layer)}, but {attends_not(group)}")
        if layer not in self.layer_index:
            raise TypeError(
                f"{self._call(group, layer)}, but layer {layer} is not in cache group {group.name!r}, which has the layers "
                f"{list(self.layer_index)}"
            )
        return group if isinstance(group, FullAttention) else None

    def _require(self, group: FullAttention, layer: int, accepted: str, *wanted: Wanted) -> None:
        if wrong := [f"{name} {told(value)}" for name, value, shape in wanted if not fits(value, shape, self._dtype)]:
            raise TypeError(
                f"{self._call(group, layer)} with {' and '.join(wrong)}; accepted: {accepted}, of {self._dtype} (T tokens of the step; H, "
                "HK and D are num_heads, num_kv_heads and head_dim of the cache group)"
            )

    def _require_sinks(self, group: FullAttention, layer: int, sinks: torch.Tensor | None) -> None:
        if sinks is not None and not fits(sinks, [group.num_heads]):
            raise TypeError(
                f"{self._call(group, layer)} with sinks {told(sinks)}; accepted: {[group.num_heads]}, one for each of the cache group's "
                "num_heads"
            )


class TapNames:
    """The points at which a model state's `forward` calls its tap while an engine starts."""

    def __init__(self, owner: str, declared: Iterable[str]) -> None:
        """owner: the model state's class, for messages. declared: `Needs.tap_points`."""
        self.owner = owner
        self.declared = tuple(declared)
        self.called: set[str] = set()

    def noting(self, inner: Tap) -> Tap:
        """`inner`, of which the names are noted. A name that was not declared raises ValueError."""

        def tap(point: str, hidden: torch.Tensor) -> torch.Tensor:
            if point not in self.declared:
                raise ValueError(self._undeclared(point))
            self.called.add(point)
            return inner(point, hidden)

        return tap

    def _undeclared(self, point: object) -> str:
        near = get_close_matches(str(point), self.declared, n=1)
        known = ", ".join(map(repr, self.declared)) or "none"
        return (
            f"{self.owner}.forward called its tap at {point!r}, which is not among the tap points of its `declare`"
            f"{f'; did you mean {near[0]!r}?' if near else ''}; declared (Needs.tap_points): {known}"
        )

    def require_all(self) -> None:
        """Raise ValueError for declared points that no step has called."""
        if missing := [point for point in self.declared if point not in self.called]:
            called = ", ".join(repr(point) for point in self.declared if point in self.called) or "none"
            raise ValueError(
                f"{self.owner}.forward never called its tap at {', '.join(map(repr, missing))}: taps and drafters that want hidden states "
                f"there would get none. Of the points that `declare` names it called {called}; call `hidden = tap(name, hidden)` at each, "
                "or leave it out of Needs.tap_points"
            )


def fits(value: object, shape: Sequence[int], dtype: torch.dtype | None = None) -> bool:
    """Whether `value` is a tensor of that shape and, where one is given, type."""
    return isinstance(value, torch.Tensor) and list(value.shape) == list(shape) and dtype in (None, value.dtype)


def told(value: object) -> str:
    """What an argument is, for messages: "[5, 4, 16] torch.float32"."""
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else f"{value!r} ({type(value).__name__})"

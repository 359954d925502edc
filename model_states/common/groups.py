"""Cache groups of decoders whose layers see everything or a sliding window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from modelrunner.model_state import FullAttention, SlidingWindow


def window_groups(
    windows: Sequence[int | None], num_heads: int, num_kv_heads: int, head_dim: int, scale: float
) -> tuple[FullAttention, ...]:
    """One group, `full`, for the layers that see everything, and one, `sliding`, for those that see a window; whichever there are.

    windows: each layer's window in tokens, or None; at most one size of window. scale: factor on q.k.
    """
    shape = (num_heads, num_kv_heads, head_dim, scale)
    full = tuple(layer for layer, window in enumerate(windows) if window is None)
    sliding = tuple(layer for layer, window in enumerate(windows) if window is not None)
    groups: list[FullAttention] = []
    if full:
        groups.append(FullAttention("full", full, *shape))
    sizes = {window for window in windows if window is not None}
    if len(sizes) > 1:
        raise ValueError(f"layers have windows of {sorted(sizes)} tokens; one size is supported")
    for size in sizes:
        groups.append(SlidingWindow("sliding", sliding, *shape, window_size=size))
    return tuple(groups)


def group_of_layer(groups: Iterable[FullAttention], layer: int) -> FullAttention:
    """The group that serves `layer`."""
    return next(group for group in groups if layer in group.layers)

"""How many tokens a step may draft: what the scheduler knows of speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence


class DraftPolicy:
    """Decides k, the drafts of each decode row, step by step. Host only.

    most: K, the largest k; 0 without a drafter. most_ahead: tokens that a row's upper counts may be ahead of what it turns out to have.
    """

    def __init__(self, most: int = 0, *, depth: int = 1, off_above_rows: int | None = None, groups: Sequence[str] = ()) -> None:
        """depth: steps in flight. off_above_rows: decode rows above which nothing is drafted. groups: those in whose pages the drafter
        writes."""
        self.most = most
        self.most_ahead = depth * (1 + most)
        self._off_above = off_above_rows
        self._groups = frozenset(groups)

    def ahead(self, group: str) -> int:
        """Tokens beyond those of a step that a cache group needs pages for: a drafter's own passes."""
        return self.most if group in self._groups else 0

    def drafts_in(self, num_decode: int, max_tokens: int) -> int:
        """k of a step of so many decode rows, which computes at most max_tokens."""
        if self._off_above is not None and num_decode > self._off_above:
            return 0
        return self.most if num_decode * (1 + self.most) <= max_tokens else 0


NO_DRAFTS = DraftPolicy()

"""How many tokens a step may draft: what the scheduler knows of speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

PROBE, PERIOD = 4, 256  # of so many steps the first few draft as much as they may, so that what is not used is still measured
MEMORY = 0.98  # what a step leaves of the weight of those before it
LEAST_EARLY_STEPS, EARLY_STEPS = 2, 4  # that a row gets a page before it may need it
GUESS = 0.7  # share of drafts kept, before anything is known,
GUESSED = 20.0  # with the weight of so many drafts
DRAFT_COST = 0.03  # what a draft adds to a step that has tokens to spare, as a share of the step


class DraftPolicy:
    """Decides k, the drafts of each decode row, step by step. Host only.

    most: K, the largest k; 0 without a drafter. most_ahead: tokens that a row's upper counts may be ahead of what it turns out to have.
    choices: every k that a step may have, from the largest on.
    """

    def __init__(
        self,
        most: int = 0,
        *,
        depth: int = 1,
        off_above_rows: int | None = None,
        spare_tokens: int | None = None,
        groups: Sequence[str] = (),
    ) -> None:
        """depth: steps in flight. off_above_rows: decode rows above which nothing is drafted. spare_tokens: choose k by what is kept: query
        tokens up to which a step takes about as long as one of few; None always takes K. groups: whose pages the drafter writes in."""
        self.most = most
        self.most_ahead = depth * (1 + most)
        self._off_above = off_above_rows
        self._spare = spare_tokens
        self._groups = frozenset(groups)
        fewer = {0} if off_above_rows is not None else set()
        fewer |= set() if spare_tokens is None else {(most + 1) // 2, 1, 0}
        self.choices = tuple(sorted({most} | fewer, reverse=True))
        self.varies = spare_tokens is not None  # also between steps of the same rows
        self._kept = [GUESS * GUESSED] * most  # by place: drafts kept, and drafts checked whose forerunners were kept
        self._seen = [GUESSED] * most
        self._best: dict[int, int] = {}  # by number of decode rows, since something was learned

    def ahead(self, group: str) -> int:
        """Tokens beyond those of a step that a cache group needs pages for: a drafter's own passes."""
        return self.most if group in self._groups else 0

    def early(self, tokens_per_page: int, ahead: int) -> int:
        """Tokens before which a row may get a page that holds so many: those of some steps. Up to EARLY_STEPS if that is not more than is
        left of the pages that it may hold anyway for drafts that turn out not to be kept. ahead: as `ahead` says of the group."""
        if not self.most:
            return 0
        slots, left = 1 + self.most, -(ahead + self.most_ahead) % tokens_per_page
        wanted = min(max(left, LEAST_EARLY_STEPS * slots), EARLY_STEPS * slots)
        return max(min(wanted, tokens_per_page - slots), 0)  # with more, one page would not always be enough

    def drafts_in(self, num_decode: int, max_tokens: int, step: int) -> int:
        """k of a step of so many decode rows, which computes at most max_tokens. step: its number."""
        if not self.most or (self._off_above is not None and num_decode > self._off_above):
            return 0
        wanted = self.most
        if self._spare is not None and step % PERIOD >= PROBE:
            if num_decode not in self._best:
                self._best[num_decode] = max(self.choices, key=lambda k: self._speed(k, num_decode))
            wanted = self._best[num_decode]
        return next((k for k in self.choices if k <= wanted and num_decode * (1 + k) <= max_tokens), 0)

    def possible(self, fewest: int, most: int, max_tokens: int) -> tuple[int, ...]:
        """Every k that a step may have whose decode rows are from `fewest` to `most`, from the largest on. max_tokens: of any step."""
        off_above = most if self._off_above is None else self._off_above

        def fits(k: int, rows: int) -> bool:
            return rows <= off_above and rows * (1 + k) <= max_tokens

        found = [k for k in self.choices if k and fits(k, fewest)]
        least = min((k for k in self.choices if k), default=0)
        return (*found, 0) if 0 in self.choices or not fits(least, most) else tuple(found)

    def learn(self, drafted: npt.NDArray[np.integer], accepted: npt.NDArray[np.integer]) -> None:
        """Drafts of rows were checked, and kept: arrays of one shape; of one step or several."""
        if self._spare is None:
            return
        for place in range(self.most):
            seen = (drafted > place) & (accepted >= place)
            if count := int(seen.sum()):
                fade = MEMORY**count if count < 200 else 0.0
                self._seen[place] = fade * self._seen[place] + count
                self._kept[place] = fade * self._kept[place] + int((seen & (accepted > place)).sum())
        self._best.clear()

    def expected(self, k: int) -> float:
        """Tokens that a row gets in a step of k drafts."""
        tokens, chance = 1.0, 1.0
        for kept, seen in zip(self._kept[:k], self._seen[:k], strict=True):
            chance *= kept / seen
            tokens += chance
        return tokens

    def _speed(self, k: int, num_decode: int) -> float:
        """Tokens of a row by time, that of a step of few tokens being 1."""
        assert self._spare is not None, "k is always the same"
        return self.expected(k) / (max(num_decode * (1 + k) / self._spare, 1.0) + DRAFT_COST * k)


NO_DRAFTS = DraftPolicy()

"""How many tokens a step may compute: a long prompt must not hold up the rows that decode beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelrunner.model_state import FullAttention
from modelrunner.page_pool import GroupLayout

CROWD = 16  # decoding rows for each pending prompt, from which on a step is kept short
USUAL_ROWS = 64  # decoding rows,
READS = 6  # and times the weights' bytes that decoding rows may read of the cache before prompts beside them get more tokens


@dataclass(frozen=True)
class TokenBudget:
    """most: tokens of any step. mixed: of a step in which at least CROWD rows decode for each pending prompt; None: the same. usual: cached
    tokens of the decoding rows up to which mixed is meant as it is; None: any number.

    A step lasts about as long as its tokens are many, and everybody in it waits for its end. Where many prompts are pending beside few
    decoding rows, the prompts' wait counts for more, so they get the whole step. Many decoding rows that read much of the cache take their
    time anyway, and prompts may make their step longer in proportion: so the last prompts of a large batch take few steps.
    """

    most: int
    mixed: int | None = None
    usual: int | None = None

    def tokens(self, num_decode: int, num_prompts: int, cached: int = 0, slots: int = 1) -> int:
        """Most query tokens, those of the decoding rows included, of a step with num_decode of these, which have so many cached tokens in
        all and so many query slots each, and num_prompts pending prompts.

        Prompts get half of `mixed` in any case, so that they go on beside many rows.
        """
        if self.mixed is None or not 0 < num_prompts * CROWD <= num_decode:
            return self.most
        scale = 1.0 if self.usual is None else max(min(num_decode / USUAL_ROWS, cached / self.usual), 1.0)
        mixed = int(self.mixed * scale)
        return min(self.most, max(mixed, num_decode * slots + -(-self.mixed // 2)))


def usual_context(weight_bytes: int, layouts: Sequence[GroupLayout], page_bytes: int) -> int | None:
    """`TokenBudget.usual` of a model. None if nothing is read of all earlier tokens."""
    whole = [layout for layout in layouts if isinstance(layout.group, FullAttention) and layout.group.window is None]
    token_bytes = sum(page_bytes // layout.tokens_per_page for layout in whole)
    return max(READS * weight_bytes // token_bytes, 1) if token_bytes else None

"""How many tokens a step may compute: a long prompt must not hold up the rows that decode beside it."""

from __future__ import annotations

from dataclasses import dataclass

CROWD = 4  # decoding rows for each pending prompt, from which on a step is kept short
USUAL = 64  # decoding rows up to which `mixed` is meant as it is


@dataclass(frozen=True)
class TokenBudget:
    """most: tokens of any step. mixed: of a step in which at least CROWD rows decode for each pending prompt; None: the same.

    A step lasts about as long as its tokens are many, and everybody in it waits for its end. Where many prompts are pending beside few
    decoding rows, the prompts' wait counts for more, so they get the whole step. More than USUAL decoding rows take longer by themselves,
    and prompts may make their step longer in proportion: so the last prompts of a large batch take few steps.
    """

    most: int
    mixed: int | None = None

    def tokens(self, num_decode: int, num_prompts: int) -> int:
        """Most query tokens, those of the decoding rows included, of a step with num_decode of these and num_prompts pending prompts.

        Prompts get half of `mixed` in any case, so that they go on beside many rows.
        """
        if self.mixed is None or not 0 < num_prompts * CROWD <= num_decode:
            return self.most
        return min(self.most, max(self.mixed * max(num_decode, USUAL) // USUAL, num_decode + -(-self.mixed // 2)))

"""Whether two tokenizers mean the same by their ids: a drafter from another family would be wrong all the time, without a word."""

from __future__ import annotations

from collections.abc import Sequence

from modelrunner.text import Tokenizer


def pieces(tokenizer: Tokenizer, count: int) -> Sequence[object]:
    """What each of the first `count` ids stands for: its bytes where the tokenizer says so, else its text."""
    spell = getattr(tokenizer, "token_bytes", None)
    known: Sequence[object] = spell() if spell is not None else ()
    return [*known[:count], *(tokenizer.decode([token], skip_special_tokens=False) for token in range(min(len(known), count), count))]


def require_same_ids(target: Tokenizer, drafter: Tokenizer, target_name: str, drafter_name: str) -> None:
    """Raise ValueError, with the first id that differs, unless the tokenizers agree on the ids that both have."""
    both = min(target.vocab_size, drafter.vocab_size)
    of_target, of_drafter = pieces(target, both), pieces(drafter, both)
    differ = next((token for token in range(both) if of_target[token] != of_drafter[token]), None)
    if differ is not None:
        raise ValueError(
            f"target {target_name} and drafter {drafter_name} do not share a vocabulary (of {target.vocab_size} and "
            f"{drafter.vocab_size} ids): "
            f"id {differ} is {of_target[differ]!r} in the target's tokenizer and {of_drafter[differ]!r} in the drafter's"
        )

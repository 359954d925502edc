"""Whether two tokenizers mean the same by their ids: a drafter from another family would be wrong all the time, without a word."""

from __future__ import annotations

from collections.abc import Sequence

from modelrunner.text import Tokenizer


def pieces(tokenizer: Tokenizer, count: int, spelled: bool) -> Sequence[object]:
    """What each of the first `count` ids stands for: its bytes, or its text. spelled: whether the tokenizer says the bytes."""
    if spelled:
        known: Sequence[object] = getattr(tokenizer, "token_bytes")()  # noqa: B009 (not in the protocol: see `Tokenizer`)
        return [*known[:count], *[b""] * (count - len(known))]
    return [tokenizer.decode([token], skip_special_tokens=False) for token in range(count)]


def require_same_ids(target: Tokenizer, drafter: Tokenizer, target_name: str, drafter_name: str) -> None:
    """Raise ValueError, with the first id that differs, unless the tokenizers agree on the ids that both have."""
    both = min(target.vocab_size, drafter.vocab_size)
    spelled = all(hasattr(tokenizer, "token_bytes") for tokenizer in (target, drafter))
    of_target, of_drafter = pieces(target, both, spelled), pieces(drafter, both, spelled)
    differ = next((token for token in range(both) if of_target[token] != of_drafter[token]), None)
    if differ is not None:
        raise ValueError(
            f"target {target_name} and drafter {drafter_name} do not share a vocabulary (of {target.vocab_size} and "
            f"{drafter.vocab_size} ids): "
            f"id {differ} is {of_target[differ]!r} in the target's tokenizer and {of_drafter[differ]!r} in the drafter's"
        )

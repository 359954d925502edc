"""Where the media of a prompt go: placeholders become the tokens of their items."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from modelrunner.media import Expanded, MediaItem, MediaRun, runs_of

if TYPE_CHECKING:
    from modelrunner.media import MediaProcessor


def expand(processor: MediaProcessor, token_ids: Sequence[int], items: Sequence[MediaItem]) -> Expanded:
    """See `MediaProcessor.expand`. The places of a kind go to its items in their order; kinds may stand mixed."""
    ids = tuple(token_ids)
    waiting: dict[str, deque[int]] = {}
    for number, each in enumerate(items):
        waiting.setdefault(each.kind, deque()).append(number)
    given = {kind: len(numbers) for kind, numbers in waiting.items()}
    marks = {kind: tuple(processor.placeholder(kind)) for kind in waiting}
    plain = {kind for kind, mark in marks.items() if _count(mark, ids) == given[kind]}
    out, runs, at = list[int](), list[MediaRun](), 0
    found = dict.fromkeys(waiting, 0)
    while at < len(ids):
        for kind, mark in marks.items():
            item = items[waiting[kind][0]] if waiting[kind] else None
            length = _length(item, mark, ids, at, kind in plain)
            if not length:
                continue
            found[kind] += 1
            if item is not None:
                runs += runs_of(item.embedded, len(out), waiting[kind].popleft())
                out += item.tokens
            break
        else:
            length = 1
            out.append(ids[at])
        at += length
    for kind, count in given.items():
        if found[kind] != count:
            raise ValueError(
                f"the prompt has {found[kind]} places for an item of kind {kind!r} (token ids {list(marks[kind])}), and {count} are given; "
                "as many places as items are needed"
            )
    return Expanded(out, tuple(runs))


def _length(item: MediaItem | None, mark: tuple[int, ...], ids: tuple[int, ...], at: int, plain: bool) -> int:
    """Tokens from `at` on that are a place of `item`, or of one too many (None); 0 if there is none.

    plain: there are as many placeholders as items, so a row of them is not one item that is expanded already.
    """
    if item is not None and not (plain and set(item.tokens) == set(mark)) and _stands(item.tokens, ids, at):
        return len(item.tokens)
    return len(mark) if _stands(mark, ids, at) else 0


def _stands(tokens: tuple[int, ...], ids: tuple[int, ...], at: int) -> bool:
    return ids[at] == tokens[0] and ids[at : at + len(tokens)] == tokens


def _count(mark: tuple[int, ...], ids: tuple[int, ...]) -> int:
    """How often `mark` stands in `ids`, not overlapping."""
    count = at = 0
    while at < len(ids):
        stands = _stands(mark, ids, at)
        count += stands
        at += len(mark) if stands else 1
    return count

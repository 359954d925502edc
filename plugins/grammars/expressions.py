"""What XGrammar passes over in regular expressions, found before it does: anchors in the middle, looking ahead or behind, and escapes that
it takes for letters."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module

PART = re.compile(
    r"""(?P<look>\(\?(?:=|!|<=|<!)) | (?P<open>\((?:\?(?::|P?<\w+>))?) | (?P<close>\)) | (?P<either>\|) | (?P<start>\^) | (?P<end>\$)
        | (?P<again>[*+]|\{) | (?P<maybe>\?) | (?P<letter>\\. | \[\^?\]?(?:\\.|[^\]\\])*\] | .)""",
    re.VERBOSE | re.DOTALL,
)
ESCAPE = re.compile(r"\\(.)", re.DOTALL)
KNOWN_ESCAPES = frozenset("dDwWsSnrtfvxu")  # those with a letter or a digit


@dataclass
class _Group:
    """A group that is open. begun: something stands before this place in its branch. ended: a `$` does. starts, ends: a branch has one of
    these anchors."""

    outer: bool  # something stands before the group
    begun: bool = False
    ended: bool = False
    starts: bool = False
    ends: bool = False


def not_understood(expression: str) -> str:
    """Why XGrammar would not take the expression for what it means; empty if it would. An expression stands for whole texts, so `^` at the
    beginning of one of its branches and `$` at the end of one say nothing."""
    groups = [_Group(outer=False)]
    closed: _Group | None = None  # the group that was closed just now
    for found in PART.finditer(expression):
        kind, place, group = str(found.lastgroup), found.start(), groups[-1]
        if kind == "look":
            return f"looking ahead or behind (at character {place}) is not understood"
        if kind == "again" and closed is not None and (closed.starts or closed.ends):
            return f"an anchor in a repeated group (before character {place}) is not understood"
        if kind == "start":
            if group.begun or group.outer:
                return f"the anchor '^' stands in the middle (at character {place}), where nothing matches; accepted: at the beginning"
            group.starts = True
        elif kind == "end":
            group.ended = True
        elif kind == "either":
            group.begun, group.ended, group.ends = False, False, group.ends or group.ended
        elif kind == "close" and len(groups) > 1:
            closed = groups.pop()
            closed.ends |= closed.ended
            groups[-1].begun, groups[-1].ended = True, groups[-1].ended or closed.ends
            groups[-1].starts |= closed.starts
            continue
        elif kind in ("open", "letter"):
            if kind == "letter" and (escape := _unknown_escape(found[0])):
                return f"the escape '{escape}' (at character {place}) is not understood"
            if group.ended:
                return f"the anchor '$' stands in the middle (before character {place}), where nothing matches; accepted: at the end"
            if kind == "open":
                groups.append(_Group(outer=group.begun or group.outer))
            group.begun = True
        closed = None
    return ""


def _unknown_escape(letter: str) -> str:
    """The first escape in a letter or class of letters that XGrammar would take for another letter, or empty."""
    each = [letter] if letter[0] == "\\" else [found[0] for found in ESCAPE.finditer(letter)] if letter[0] == "[" else []
    return next((escape for escape in each if escape[1:].isalnum() and escape[1:] not in KNOWN_ESCAPES), "")


def width(expression: str) -> tuple[int, int] | None:
    """The least and the most characters of a text that the whole expression matches, or None where Python does not understand it."""
    try:
        least, most = import_module("re._parser").parse(expression).getwidth()
    except (re.error, RecursionError, OverflowError):
        return None
    return int(least), int(most)


def prefix(expression: str) -> str:
    """The plain letters that every text begins with, of an expression that begins with `^` and has no branches."""
    if not expression.startswith("^") or "|" in expression:
        return ""
    found = re.match(r"[\w \-:/@#]*", expression[1:])
    letters, rest = ("", "") if found is None else (found[0], expression[1 + found.end() :])
    return letters[:-1] if rest[:1] in ("*", "?", "{", "+") else letters

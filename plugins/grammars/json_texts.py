"""Regular expressions for the inside of JSON texts, as rules.

Of an expression in a schema XGrammar 0.2.9 makes one symbol, `Regex("...", json_string=true)`, whose matchers also take texts that are none
of its own: `"cd"` for `(bc+)?d`. Of an expression alone it makes rules, which mean what it means. So these stand in for the symbol, without
the letters that JSON would have escaped.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from modelrunner.plugins.grammars.ebnf import Part, letters_of, read_rules

SYMBOL = re.compile(r'Regex\("((?:[^"\\]|\\.)*)", json_string=true\)', re.DOTALL)
PLAIN = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF)]  # letters that stand for themselves in a JSON text


def without_expressions(printed: str, rules_of: Callable[[str], str]) -> str:
    """A printed grammar with rules for the expressions in it. rules_of: prints the grammar of an expression. Raises ValueError for one that
    matches no text without letters that JSON escapes, or that is not known here."""
    names: dict[str, str] = {}
    lines: list[str] = []

    def named(symbol: re.Match[str]) -> str:
        expression = "".join(map(chr, letters_of(symbol[1])))
        if expression not in names:
            names[expression] = f"expression_{len(names)}_"
            lines.extend(_rules(expression, names[expression], rules_of(expression)))
        return names[expression] + "root"

    replaced = SYMBOL.sub(named, printed)
    return "\n".join([replaced.rstrip("\n"), *lines, ""]) if lines else replaced


def _rules(expression: str, prefix: str, printed: str) -> list[str]:
    """The lines of a printed expression, its names with a prefix."""
    rules = dict(read_rules(printed))
    while True:
        bodies = {name: _written(body, prefix, rules) for name, body in rules.items()}
        if None not in bodies.values():
            return [f"{prefix}{name} ::= {body}" for name, body in bodies.items()]
        rules = {name: rules[name] for name, body in bodies.items() if body is not None}
        if "root" not in rules:
            raise ValueError(f"the expression {expression!r} matches no text without letters that JSON escapes")


def _written(part: Part, prefix: str, rules: dict[str, Part]) -> str | None:
    """A part of a rule; None if it matches nothing."""
    kind, what = part
    inner: list[str | None]
    match kind, what:
        case "text", bytes():
            text = what.decode("utf-8", "surrogatepass")
            return None if any(not _plain([(ord(letter),) * 2]) for letter in text) else f'"{"".join(map(_escaped, map(ord, text)))}"'
        case "letter", list():
            ranges = _plain(what)
            return f"[{''.join(f'{_escaped(first)}-{_escaped(last)}' for first, last in ranges)}]" if ranges else None
        case "rule", str():
            return prefix + what if what in rules else None
        case "either", list():
            inner = [branch for each in what if (branch := _written(each, prefix, rules)) is not None]
            return f"({' | '.join(map(str, inner))})" if inner else None
        case "chain", list():
            inner = [_written(each, prefix, rules) for each in what]
            return None if None in inner else f"({' '.join(map(str, inner))})" if inner else '""'
        case "times", (tuple() as each, int() as least, int() as most):
            text_of_one = _written(each, prefix, rules)
            if text_of_one is None:
                return None if least else '""'
            return f"({text_of_one}){{{least}, {most}}}"
    raise ValueError(f"{what!r} is not known in an expression")


def _plain(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What of these ranges JSON does not escape."""
    return [(max(a, c), min(b, d)) for a, b in ranges for c, d in PLAIN if max(a, c) <= min(b, d)]


def _escaped(letter: int) -> str:
    return f"\\U{letter:08x}"

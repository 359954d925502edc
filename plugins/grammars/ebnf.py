"""From the EBNF that XGrammar prints of a grammar to a byte automaton, where the language is regular and small.

So an automaton means what the library means: of a schema, an expression or a grammar it has made rules of characters by then, and these
leave no room for doubt. A rule that calls itself at its end is a loop; one that calls itself elsewhere is not regular.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from modelrunner.automaton import LETTERS, Automaton, Builder

TOKEN = re.compile(
    r"""\s*(?: (?P<define>::=) | (?P<ahead>\(=) | (?P<regex>Regex\() | (?P<json>,\s*json_string=true\)) | (?P<call>[A-Za-z_]\w*\()
        | (?P<name>[A-Za-z_][\w.\-]*) | (?P<string>"(?:[^"\\]|\\.)*") | (?P<letters>\[(?:[^\]\\]|\\.)*\])
        | (?P<times>\{\s*\d+\s*,\s*-?\d+\s*\}) | (?P<sign>[()|*]) )""",
    re.VERBOSE | re.DOTALL,
)
ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
NAMED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0", "a": "\a", "b": "\b", "e": "\x1b"}
PUNCTUATION = frozenset("\"'\\?-]^[/.")
FOREVER = -1
PLAIN = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7F)]  # letters that stand for themselves in a JSON text, of one byte each
DEPTH = 200  # of rules and parentheses within each other

# ("either", parts), ("chain", parts), ("text", bytes), ("letter", ranges), ("rule", name), ("regex", text), ("times", (part, least, most))
Part = tuple[str, object]


class NotRegular(ValueError):
    """The grammar's language is not regular, or it has a part that is not known here."""


def automaton_of(text: str, max_states: int, printed: Callable[[str], str] | None = None) -> Automaton:
    """The automaton of a printed grammar, whose start symbol is `root`. Raises NotRegular, or TooLarge beyond `max_states`.

    printed: gives the printed grammar of a regular expression; without it, a grammar that has one in it is refused.
    """
    rules = dict(read_rules(text))
    builder = Builder(max_states)
    return builder.automaton(_Maker(builder, rules, printed).rule("root", builder.end))


class _Maker:
    """Puts the rules together. in_json: they are of an expression for the inside of a JSON text."""

    def __init__(self, builder: Builder, rules: dict[str, Part], printed: Callable[[str], str] | None, in_json: bool = False) -> None:
        self._builder, self._rules, self._printed, self._in_json = builder, rules, printed, in_json
        self._made: dict[tuple[str, int], int] = {}
        self._open: dict[str, int] = {}  # rules that are being made, and what follows them
        self._depth = 0

    def rule(self, name: str, then: int) -> int:
        """The state in which the rule begins, if `then` follows."""
        if (name, then) in self._made:
            return self._made[name, then]
        if name not in self._rules:
            raise NotRegular(f"the rule {name!r} is none that is known here")
        if name in self._open:
            raise NotRegular(f"the rule {name!r} calls itself before its end")
        state = self._made[name, then] = self._builder.state()
        self._open[name] = then
        self._builder.join(state, self.part(self._rules[name], then))
        del self._open[name]
        return state

    def part(self, part: Part, then: int) -> int:
        """The state in which a part begins, if `then` follows."""
        self._depth += 1
        if self._depth > DEPTH:
            raise NotRegular(f"its rules lie more than {DEPTH} deep in each other")
        kind, what = part
        start = getattr(self, f"_{kind}")(what, then)
        self._depth -= 1
        return int(start)

    def _either(self, parts: list[Part], then: int) -> int:
        return self._builder.either([self.part(each, then) for each in parts])

    def _chain(self, parts: list[Part], then: int) -> int:
        for each in reversed(parts):
            then = self.part(each, then)
        return then

    def _text(self, text: bytes, then: int) -> int:
        if self._in_json and not all(any(first <= byte <= last for first, last in PLAIN) for byte in text):
            raise NotRegular("its pattern has letters that JSON escapes, or such of several bytes")
        return self._builder.text(text, then)

    def _letter(self, ranges: list[tuple[int, int]], then: int) -> int:
        if self._in_json:
            if any(last > PLAIN[-1][1] for _, last in ranges):  # the library is not strict about their bytes
                raise NotRegular("its pattern has letters of several bytes")
            ranges = [(max(a, c), min(b, d)) for a, b in ranges for c, d in PLAIN if max(a, c) <= min(b, d)]
        return self._builder.letter(ranges, then)

    def _regex(self, text: str, then: int) -> int:
        if self._printed is None:
            raise NotRegular("the pattern in it is not known here")
        return _Maker(self._builder, dict(read_rules(self._printed(text))), None, in_json=True).rule("root", then)

    def _rule(self, name: str, then: int) -> int:
        return self.rule(name, then)

    def _times(self, what: tuple[Part, int, int], then: int) -> int:
        part, least, most = what
        if most == FOREVER:
            again = self._builder.state()
            self._builder.join(again, self.part(part, again))
            self._builder.join(again, then)
            start = again
        else:
            start = then
            for _ in range(most - least):
                start = self._builder.either([self.part(part, start), then])
        for _ in range(least):
            if (before := self.part(part, start)) == start:
                break  # the part is empty
            start = before
        return start


# ---- reading -----------------------------------------------------------------------------------------------------------------


def read_rules(text: str) -> Iterator[tuple[str, Part]]:
    """Name and body of each rule. What a rule says of what follows it is a help for the library and changes no language."""
    for line in filter(None, text.split("\n")):
        reader = _Reader(line)
        name = reader.take("name")
        reader.take("define")
        body = reader.either()
        if reader.kind == "ahead":
            reader.position = len(reader.tokens)
        if reader.kind:
            raise NotRegular(f"{reader.value!r} is not known here")
        yield name, body


class _Reader:
    """The tokens of a line, and what they make up."""

    def __init__(self, line: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        self.position = 0
        place = 0
        line = line.rstrip()
        while place < len(line):
            found = TOKEN.match(line, place)
            if found is None:
                raise NotRegular(f"{line[place : place + 20]!r} is not known here")
            kind = str(found.lastgroup)
            self.tokens.append((kind, found[kind]))
            place = found.end()

    @property
    def kind(self) -> str:
        """Of the next token; empty at the end."""
        return self.tokens[self.position][0] if self.position < len(self.tokens) else ""

    @property
    def value(self) -> str:
        return self.tokens[self.position][1] if self.position < len(self.tokens) else ""

    def take(self, kind: str, value: str | None = None) -> str:
        """The next token, which must be such a one."""
        if self.kind != kind or value not in (None, self.value):
            raise NotRegular(f"{self.value!r} is not known here")
        self.position += 1
        return self.tokens[self.position - 1][1]

    def either(self) -> Part:
        parts = [self.chain()]
        while self.value == "|" and self.kind == "sign":
            self.position += 1
            parts.append(self.chain())
        return parts[0] if len(parts) == 1 else ("either", parts)

    def chain(self) -> Part:
        parts = []
        while self.kind in ("name", "string", "letters", "regex") or (self.kind, self.value) == ("sign", "("):
            parts.append(self.repeated(self.single()))
        return parts[0] if len(parts) == 1 else ("chain", parts)

    def single(self) -> Part:
        if self.kind == "name":
            return "rule", self.take("name")
        if self.kind == "string":
            return "text", "".join(map(chr, letters_of(self.take("string")[1:-1]))).encode("utf-8", "surrogatepass")
        if self.kind == "regex":
            self.take("regex")
            text = "".join(map(chr, letters_of(self.take("string")[1:-1])))
            self.take("json")
            return "regex", text
        if self.kind == "letters":
            return "letter", _ranges(self.take("letters")[1:-1])
        self.take("sign", "(")
        part = self.either()
        self.take("sign", ")")
        return part

    def repeated(self, part: Part) -> Part:
        if (self.kind, self.value) == ("sign", "*"):
            self.position += 1
            return "times", (part, 0, FOREVER)
        if self.kind == "times":
            least, most = map(int, self.take("times")[1:-1].split(","))
            return "times", (part, least, most)
        return part


def letters_of(text: str) -> list[int]:
    """Code points of a text with escapes."""
    return [letter for letter, _ in _escaped(text)]


def _escaped(text: str) -> Iterator[tuple[int, bool]]:
    """Code points of a text with escapes, and whether each was written with one."""
    for two, four, eight, sign, plain in ESCAPE.findall(text):
        digits = two or four or eight
        if digits:
            yield int(digits, 16), True
        elif plain:
            yield ord(plain), False
        elif sign in NAMED:
            yield ord(NAMED[sign]), True
        elif sign in PUNCTUATION:
            yield ord(sign), True
        else:
            raise NotRegular(f"the escape \\{sign} is not known here")


def _ranges(text: str) -> list[tuple[int, int]]:
    """Ranges of code points, first and last, of a class of characters."""
    negative = text.startswith("^")
    letters = list(_escaped(text[negative:]))
    ranges, place = [], 0
    while place < len(letters):
        first = last = letters[place][0]
        if place + 2 < len(letters) and letters[place + 1] == (ord("-"), False):
            last = letters[place + 2][0]
            place += 2
        if first <= last:
            ranges.append((first, last))
        place += 1
    return complement(ranges) if negative else ranges


def complement(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The code points that are in none of `ranges`."""
    rest, start = [], LETTERS[0]
    for first, last in sorted(ranges):
        if first > start:
            rest.append((start, first - 1))
        start = max(start, last + 1)
    return rest + ([(start, LETTERS[1])] if start <= LETTERS[1] else [])

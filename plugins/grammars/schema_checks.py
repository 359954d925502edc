"""Which JSON schemas XGrammar makes grammars of whose documents satisfy them, keyword by keyword.

The idea: of a schema the library looks at one thing, the first of `$ref`, `const`, `enum`, `anyOf`, `oneOf`, `allOf` and the type, and
passes over all that stands beside it and that it does not know, without an error. So every schema that is reached from the root is walked
the way the library walks it, and what would be passed over is refused, unless it holds anyway: a bound that a constant meets, `minLength`
beside a pattern of three letters, `uniqueItems` of at most one item. What XGrammar 0.2.9 does was found from its source and by experiment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import ceil, floor, inf
from typing import Any, NamedTuple

from modelrunner.plugins.grammars.expressions import not_understood, width
from modelrunner.plugins.grammars.schema_facts import (
    APPLIES,
    EVERYTHING,
    MODES,
    NOT_ELSEWHERE,
    NOWHERE,
    STRING,
    asserts,
    could_both_match,
    holds,
    inner,
    overlapping,
    own_keys,
    pointer_of,
    types_of,
)

Schema = Mapping[str, Any]
MOST_FAULTS = 4  # that an error names
UNESCAPED_FORMATS = frozenset({"json-pointer", "relative-json-pointer"})  # whose texts the library would write as JSON does not
MOST_MULTIPLE, MOST_WIDTH = 1024, 10000  # that the library counts out
DIGITS = 10**6  # after the point, of a number with bounds
DEEPEST_NEST = 500  # of schemas within schemas: the library follows them, also by references, on its stack, which some thousands overflow


class Fault(NamedTuple):
    """A keyword that is not honoured. where: JSON pointer to its schema. elsewhere: llguidance honours it."""

    keyword: str
    where: str
    why: str
    elsewhere: bool = False


class Pattern(NamedTuple):
    """A regular expression. keyword, where: as of a fault."""

    keyword: str
    where: str
    expression: str


class Checked(NamedTuple):
    """text: the schema to make a grammar of. patterns: its expressions."""

    text: str
    patterns: list[Pattern]


def checked(text: str) -> Checked:
    """A JSON schema, with `anyOf` for `oneOf`, and without formats that would displace what must hold, and lengths that hold anyway.
    Raises ValueError naming the keywords that are not honoured."""
    walk = _Walk(json.loads(text))
    try:
        walk.run()
    except (TypeError, AttributeError) as error:
        raise ValueError(f"a keyword of the schema has a value of a wrong type: {error}") from None
    if walk.faults:
        raise ValueError(refusal(walk.faults))
    for each, keyword in walk.needless:
        del each[keyword]
    exclusive = [] if "/oneOf/" in text else walk.exclusive  # which a reference may pass through
    for each in exclusive:
        each["anyOf"] = each.pop("oneOf")  # which the library makes of it too, with a warning
    return Checked(json.dumps(walk.root, ensure_ascii=False) if walk.needless or exclusive else text, walk.patterns)


def refusal(faults: list[Fault]) -> str:
    """What is wrong and what else can be done."""
    told = "; ".join(f"{each.keyword} (#{each.where}/{pointer_of(each.keyword)}): {each.why}" for each in faults[:MOST_FAULTS])
    more = f"; and {len(faults) - MOST_FAULTS} more" if len(faults) > MOST_FAULTS else ""
    if all(each.elsewhere for each in faults):
        how = "pip install 'modelrunner[llguidance]', setting pin.grammar_backend=llguidance"
        advice = f"The backend llguidance does ({how}); or say it another way"
    else:
        advice = "Say it another way, or leave it out and check the document"
    return f"XGrammar does not honour all of the schema, so documents could violate it: {told}{more}. {advice}"


class _Walk:
    """faults: what was found. needless: schemas, and keywords to take out: a `format` that the library would take in place of a pattern or
    lengths, lengths that it would warn of. exclusive: schemas with `oneOf`. patterns: its expressions."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self.faults: list[Fault] = []
        self.needless: list[tuple[dict[str, Any], str]] = []
        self.exclusive: list[dict[str, Any]] = []
        self.patterns: list[Pattern] = []
        self._lone_refs = any(f"draft-0{n}" in str(root.get("$schema")) for n in (3, 4, 5, 6, 7))  # beside which nothing counts

    def run(self) -> None:
        todo: list[tuple[Any, str, str, int]] = [(self.root, "", "", 1)]
        seen: set[int] = set()
        while todo:
            schema, where, implied, depth = todo.pop()
            if isinstance(schema, dict) and id(schema) not in seen:
                seen.add(id(schema))
                if depth > DEEPEST_NEST:
                    raise ValueError(f"XGrammar takes schemas within schemas, also by $ref, down to {DEEPEST_NEST}; #{where} is deeper")
                todo.extend((*each, depth + 1) for each in reversed(list(self._one(schema, where, implied))))

    def _fault(self, keyword: str, where: str, why: str, elsewhere: bool = False) -> None:
        self.faults.append(Fault(keyword, where, why, elsewhere))

    def _one(self, schema: dict[str, Any], where: str, implied: str) -> Iterator[tuple[Any, str, str]]:
        """Look at one schema. implied: the type of a schema that names none. Gives those inside that the library looks at."""
        mode = next((name for name in MODES if name in schema), "")
        types = types_of(schema, self.root, implied)
        for keyword in () if mode == "$ref" and self._lone_refs else NOWHERE:
            if asserts(keyword, schema) and APPLIES.get(keyword, EVERYTHING) & types:
                self._fault(keyword, where, "it is not understood")
        if mode:
            yield from self._combined(schema, where, mode, types)
        else:
            yield from self._typed(schema, where, types, implied)

    # ---- one of the keywords that displace all others ----------------------------------------------------------------

    def _combined(self, schema: dict[str, Any], where: str, mode: str, types: frozenset[str]) -> Iterator[tuple[Any, str, str]]:
        argument = schema[mode]
        if not (mode == "$ref" and self._lone_refs):
            values = [argument] if mode == "const" else argument if mode == "enum" and isinstance(argument, list) else None
            self._beside(schema, where, mode, types, values)
        if mode == "$ref":
            if not isinstance(argument, str) or not (argument == "#" or argument.startswith("#/")):
                self._fault(mode, where, f"{argument!r} is not followed; accepted: '#', and '#/...' into the schema itself")
            else:
                yield inner(self.root, argument), argument[1:], ""
        elif mode in ("anyOf", "oneOf", "allOf") and isinstance(argument, list):
            if mode == "allOf" and len(argument) > 1 and any(own_keys(each) or each is False for each in argument):
                self._fault(mode, where, "several schemas at once are not understood", elsewhere=True)
                return
            if mode != "allOf" and not argument:
                self._fault(mode, where, "it has no branches")
            if mode == "oneOf":
                self.exclusive.append(schema)
                if pair := could_both_match(argument, self.root):
                    self._fault(mode, where, f"it is taken as anyOf, and its branches {pair[0]} and {pair[1]} match the same documents")
            for number, each in enumerate(argument):
                yield each, f"{where}/{mode}/{number}", ""

    def _beside(self, schema: Schema, where: str, mode: str, types: frozenset[str], values: list[Any] | None) -> None:
        """What stands beside a keyword that displaces it, and does not hold anyway. values: the only ones that are written."""
        for keyword in own_keys(schema):
            if keyword == mode or keyword in NOWHERE or not APPLIES.get(keyword, EVERYTHING) & types:
                continue
            if keyword == "type" and types <= types_of({"type": schema["type"]}, self.root):
                continue
            elsewhere = keyword not in NOT_ELSEWHERE
            if values is None:
                self._fault(keyword, where, f"it is passed over beside {mode!r}", elsewhere)
            elif wrong := [value for value in values if not holds(keyword, schema[keyword], value)]:
                why = f"it is passed over beside {mode!r}, whose {json.dumps(wrong[0])} it excludes or may exclude"
                self._fault(keyword, where, why, elsewhere)
        for value in values or ():
            if isinstance(value, int) and abs(value) >= 2**63 and int(float(value)) != value:
                self._fault(mode, where, f"{value} is written as {float(value)!r}")

    # ---- types -------------------------------------------------------------------------------------------------------

    def _typed(self, schema: dict[str, Any], where: str, types: frozenset[str], implied: str) -> Iterator[tuple[Any, str, str]]:
        if types == EVERYTHING and "type" not in schema and not implied:
            for keyword in own_keys(schema):
                if keyword not in NOWHERE:
                    self._fault(keyword, where, "it is passed over without a 'type' beside it", keyword not in NOT_ELSEWHERE)
            return
        if "string" in types:
            self._string(schema, where)
        self._numbers(schema, where, types)
        if "array" in types:
            yield from self._array(schema, where)
        if "object" in types:
            yield from self._object(schema, where)

    def _string(self, schema: dict[str, Any], where: str) -> None:
        pattern, least, most = schema.get("pattern"), schema.get("minLength", 0), schema.get("maxLength", inf)
        bounded = asserts("minLength", schema) or asserts("maxLength", schema)
        if "format" in schema and (isinstance(pattern, str) or bounded or schema["format"] in UNESCAPED_FORMATS):
            self.needless.append((schema, "format"))
        if not isinstance(pattern, str):
            return
        self._pattern(Pattern("pattern", where, pattern))
        found = width(pattern) if bounded else None
        if bounded and found is not None and found[0] >= least and found[1] <= most:
            self.needless += [(schema, name) for name in ("minLength", "maxLength") if name in schema]
        elif bounded:
            name = "minLength" if asserts("minLength", schema) and (found is None or found[0] < least) else "maxLength"
            why = "it is passed over beside 'pattern', whose texts may be shorter or longer: let the pattern say it, as in '{2,5}'"
            self._fault(name, where, why, elsewhere=True)

    def _pattern(self, pattern: Pattern) -> None:
        if problem := not_understood(pattern.expression):
            self._fault(pattern.keyword, pattern.where, problem)
        else:
            self.patterns.append(pattern)

    def _numbers(self, schema: dict[str, Any], where: str, types: frozenset[str]) -> None:
        if not types & {"integer", "number"}:
            return
        bounds = [schema.get(name) for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")]
        if any(bound is not None and (isinstance(bound, bool) or not isinstance(bound, (int, float))) for bound in bounds):
            return  # which the library refuses
        low, above, high, below = (sign * inf if bound is None else bound for sign, bound in zip((-1, -1, 1, 1), bounds, strict=True))
        least, most = max(low, above), min(high, below)
        multiple = schema.get("multipleOf")
        if multiple == 1 and "number" not in types:
            self.needless.append((schema, "multipleOf"))
        elif multiple is not None and "number" in types:
            self._fault("multipleOf", where, "it is not understood of numbers, only of whole ones (type 'integer')", elsewhere=True)
        elif isinstance(multiple, (int, float)):
            narrow = (least, most) == (-inf, inf) or most - least < MOST_WIDTH
            if multiple > MOST_MULTIPLE or multiple != int(multiple) or not narrow:
                why = f"accepted: a whole number of at most {MOST_MULTIPLE}, without bounds or with two that are at most {MOST_WIDTH} apart"
                self._fault("multipleOf", where, why, elsewhere=True)
        if "number" in types and -inf < least <= most < inf and most - least < 1:
            first, last = ceil(least * DIGITS) + (least == above), floor(most * DIGITS) - (most == below)
            if first > last:
                why = "numbers with bounds have at most six digits after the point, and none of these lies between"
                self._fault("minimum" if low > above else "exclusiveMinimum", where, why)

    def _array(self, schema: Schema, where: str) -> Iterator[tuple[Any, str, str]]:
        name = "items" if "items" in schema else "unevaluatedItems"
        rest, first = schema.get(name, False), schema.get("prefixItems", [])
        first = first if isinstance(first, list) else []
        longest = min(len(first) if rest is False else inf, schema.get("maxItems", inf))
        if asserts("uniqueItems", schema) and longest > 1:
            self._fault("uniqueItems", where, "it is not understood")
        if asserts("contains", schema):
            self._fault("contains", where, "it is not understood")
        for number, each in enumerate(first):
            yield each, f"{where}/prefixItems/{number}", ""
        yield rest, f"{where}/{name}", ""

    def _object(self, schema: Schema, where: str) -> Iterator[tuple[Any, str, str]]:
        named = schema.get("properties", {})
        patterns = schema.get("patternProperties", {})
        if not isinstance(named, dict) or not isinstance(patterns, dict):
            return  # which the library refuses
        name = "additionalProperties" if "additionalProperties" in schema else "unevaluatedProperties"
        others = schema.get(name, False)
        required = [key for key in schema.get("required", []) if key not in named]
        if required:
            why = f"it names {required[0]!r}, which is not one of the properties: name it there"
            self._fault("required", where, why, elsewhere=True)
        self._keys(schema, where, named, patterns, others is not False)
        open_ended = others is not False or patterns or "propertyNames" in schema
        if open_ended and schema.get("minProperties", 0) > max(1, len(schema.get("required", []))):
            self._fault("minProperties", where, "keys that the schema does not name may repeat, so there may be fewer than are written")
        for key, each in named.items():
            yield each, f"{where}/properties/{pointer_of(key)}", ""
        for key, each in patterns.items():
            self._pattern(Pattern(key, f"{where}/patternProperties", key))
            yield each, f"{where}/patternProperties/{pointer_of(key)}", ""
        yield others, f"{where}/{name}", ""
        yield schema.get("propertyNames"), f"{where}/propertyNames", "string"

    def _keys(self, schema: Schema, where: str, named: Schema, patterns: Schema, others: bool) -> None:
        """What says which keys there may be, beside others that do."""
        names = schema.get("propertyNames", {})
        if types_of(names, self.root, "string") != STRING:
            self._fault("propertyNames", where, "it must be a schema of texts: give it, or what it refers to, the type 'string'")
        keywords = [keyword for keyword in own_keys(names) if keyword != "type"]
        if patterns:
            if keywords:
                self._fault("propertyNames", where, "it is passed over beside 'patternProperties'")
            self._key_patterns(where, named, patterns, others)
        elif named and keywords and (others or not all(holds(each, names[each], key) for each in keywords for key in named)):
            self._fault("propertyNames", where, "it is passed over beside 'properties'")
        elif not named and keywords and schema.get("additionalProperties") is False:
            self._fault("propertyNames", where, "it lets keys in, and 'additionalProperties' none")

    def _key_patterns(self, where: str, named: Schema, patterns: Schema, others: bool) -> None:
        if named and others:
            self._fault("patternProperties", where, "keys that it matches may have any of the additional values too", elsewhere=True)
        for pattern, schema in patterns.items():
            if both := [key for key in named if not holds("pattern-not", pattern, key)]:
                self._fault("patternProperties", where, f"{pattern!r} may match {both[0]!r}, which 'properties' names", elsewhere=True)
            if any(overlapping(pattern, other) and schema != patterns[other] for other in patterns if other != pattern):
                why = "several of its expressions may match one key; accepted: such as begin with '^' and letters that part them"
                self._fault("patternProperties", where, why)
                break

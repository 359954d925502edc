"""JSON schemas that XGrammar would pass over in part are refused; documents of all others satisfy them."""

from __future__ import annotations

import json
import random
import re
from itertools import product
from typing import Any

import numpy as np
import pytest

from modelrunner.automaton import Automaton
from modelrunner.grammar import GrammarBackend, Vocabulary
from modelrunner.plugins import grammars
from modelrunner.plugins.grammars.expressions import not_understood
from modelrunner.plugins.grammars.schema_checks import checked
from modelrunner.settings import load_settings
from modelrunner.structured_outputs import StructuredOutputsParams
from modelrunner.testing.byte_tokenizer import EOS, ByteTokenizer

jsonschema = pytest.importorskip("jsonschema")
VOCABULARY = Vocabulary(ByteTokenizer(331).token_bytes(), (EOS,))
INTEGER, OBJECT = {"type": "integer"}, {"type": "object"}
ALL_OF = {
    "allOf": [{**OBJECT, "properties": {"a": INTEGER}, "required": ["a"]}, {**OBJECT, "properties": {"b": INTEGER}, "required": ["b"]}]
}
BRANCHES = {**OBJECT, "properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}
NESTED = {**OBJECT, "properties": {"a/b": {"type": "array", "items": {"$ref": "#/$defs/u"}}}, "$defs": {"u": {"not": {"const": 1}}}}
NAMES = {**OBJECT, "propertyNames": {"pattern": "^a+$"}, "additionalProperties": INTEGER}
# What is refused: the schema, the place it is told of, and whether another backend is named.
REFUSED: list[tuple[dict[str, Any], str, bool]] = [
    (ALL_OF, "#/allOf", True),
    ({"allOf": [INTEGER, {"minimum": 100}]}, "#/allOf", True),
    ({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "minItems": 2, "maxItems": 2}, "#/uniqueItems", False),
    ({"type": "string", "pattern": "^a+$", "minLength": 3, "maxLength": 5}, "#/minLength", True),
    ({"type": "array", "items": INTEGER, "contains": {"const": 7}, "maxItems": 2}, "#/contains", False),
    ({"type": "string", "maxLength": 3, "not": {"type": "string"}}, "#/not", False),
    ({"type": "number", "multipleOf": 0.5}, "#/multipleOf", True),
    ({**INTEGER, "multipleOf": 5, "minimum": 0}, "#/multipleOf", True),
    ({**NAMES, "minProperties": 2}, "#/minProperties", False),
    ({**NAMES, "properties": {"b": {}}}, "#/propertyNames", False),
    ({**NAMES, "additionalProperties": False}, "#/propertyNames", False),
    ({**OBJECT, "propertyNames": {"$ref": "#/$defs/k"}, "$defs": {"k": {"pattern": "^x$"}}}, "#/$defs/k/pattern", False),
    (BRANCHES, "#/properties", True),
    (NESTED, "#/$defs/u/not", False),
    ({**OBJECT, "properties": {"a/b": {"type": "string", "if": {}, "then": {}}}}, "#/properties/a~1b/if", False),
    ({"minimum": 3}, "#/minimum", True),
    ({**OBJECT, "required": ["a"]}, "#/required", True),
    ({"type": "string", "enum": ["a", 1]}, "#/type", True),
    ({"const": 5, "minimum": 7}, "#/minimum", True),
    ({"const": 12345678901234567890}, "#/const", False),
    ({"$ref": "#/$defs/a", "maxLength": 2, "$defs": {"a": {"type": "string"}}}, "#/maxLength", True),
    ({"$ref": "other.json"}, "#/$ref", False),
    ({"oneOf": [INTEGER, {"type": "number"}]}, "#/oneOf", False),
    ({"oneOf": [{"const": 1}, {"enum": [1.0, 2]}]}, "#/oneOf", False),
    ({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": INTEGER, "b": {"type": "number"}}}, "#/oneOf", False),
    ({"type": "string", "pattern": r"^[a-z]+\Z"}, "#/pattern", False),
    ({"oneOf": [{"title": "anything"}, INTEGER]}, "#/oneOf", False),
    ({**OBJECT, "dependentRequired": {"a": ["b"]}}, "#/dependentRequired", False),
    ({**OBJECT, "patternProperties": {"^a": INTEGER, "b$": {"type": "string"}}}, "#/patternProperties", False),
    ({**OBJECT, "properties": {"ax": {}}, "patternProperties": {"^a": INTEGER}}, "#/patternProperties", True),
    ({"type": "string", "pattern": "a^b"}, "#/pattern", False),
    ({"type": "string", "pattern": "a(?=b)c"}, "#/pattern", False),
    ({"type": "number", "minimum": 0.1234567, "maximum": 0.1234569}, "#/minimum", False),
]
ACCEPTED: list[dict[str, Any]] = [
    {},
    {"title": "T", "description": "any", "format": "x", "x-own": {"not": 1}, "default": 3, "then": {}, "$comment": "c"},
    {"allOf": [{**INTEGER, "minimum": 100}], "title": "x"},
    {"type": "array", "items": INTEGER, "uniqueItems": True, "maxItems": 1},
    {"type": "array", "items": INTEGER, "uniqueItems": False},
    {"type": "string", "pattern": "^a{3,5}$", "minLength": 3, "maxLength": 5},
    {**INTEGER, "multipleOf": 5, "minimum": 0, "maximum": 20},
    {**INTEGER, "multipleOf": 1, "minimum": 0},
    {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
    {"type": "string", "enum": ["a", "b"], "maxLength": 1},
    {"anyOf": [{"type": "string"}, {"type": "null"}], "type": ["string", "null"], "default": None},
    {"oneOf": [{**OBJECT, "properties": {"a": INTEGER}}, {**OBJECT, "properties": {"b": INTEGER}}]},
    {**INTEGER, "pattern": "a^b", "maxItems": 1, "required": ["x"]},
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$ref": "#/definitions/a",
        "maxLength": 2,
        "definitions": {"a": {"type": "string"}},
    },
    {**OBJECT, "properties": {"n": {"$ref": "#"}}, "$defs": {"unused": {"not": {}}}},
    {**OBJECT, "patternProperties": {"^a": INTEGER, "^b": {"type": "string"}}},
    {**NAMES, "maxProperties": 2, "minProperties": 1},
]


@pytest.mark.parametrize(("schema", "place", "elsewhere"), REFUSED, ids=lambda value: value if isinstance(value, str) else None)
def test_what_would_be_passed_over_is_refused(schema: dict[str, Any], place: str, elsewhere: bool) -> None:
    with pytest.raises(ValueError, match="XGrammar does not honour all of the schema") as told:
        checked(json.dumps(schema))
    assert f"({place}): " in str(told.value)
    assert ("The backend llguidance does" in str(told.value)) == elsewhere


@pytest.mark.parametrize("schema", ACCEPTED, ids=json.dumps)
def test_what_holds_or_says_nothing_passes(schema: dict[str, Any]) -> None:
    checked(json.dumps(schema))


def test_what_displaces_other_keywords_is_taken_out() -> None:
    """A format is an annotation; what stands beside it must hold."""
    assert json.loads(checked('{"type": "string", "format": "uri", "maxLength": 20}').text) == {"type": "string", "maxLength": 20}
    assert checked('{"type": "string", "format": "uri"}').text == '{"type": "string", "format": "uri"}'


def test_schemas_that_would_overflow_the_librarys_stack() -> None:
    def chain(length: int) -> str:
        links = {f"d{i}": {**OBJECT, "properties": {"a": {"$ref": f"#/d{i + 1}"}}} for i in range(length)}
        return json.dumps({"$ref": "#/d0", **links, f"d{length}": INTEGER})

    checked(chain(200))
    with pytest.raises(ValueError, match=r"also by \$ref, down to 500; #/d\d+/properties/a is deeper"):
        checked(chain(4000))


def test_a_keyword_of_a_wrong_type_is_said() -> None:
    with pytest.raises(ValueError, match="a keyword of the schema has a value of a wrong type"):
        checked('{"type": 5}')


@pytest.mark.parametrize(
    "expression", ["a^b", "a$b", "(a$)b", "x(^a)", "(^a)*", "(a|b$)c", "a(?=b)", "(?<!a)b", r"\Aa", r"a\Z", r"a\0", r"[a\b]", r"\ba"]
)
def test_expressions_that_mean_something_else(expression: str) -> None:
    assert not_understood(expression)


@pytest.mark.parametrize(
    "expression",
    ["^ab$", "(^a|b)c", "^a|b$|^c$", "[^a$]b", r"\^a\$b", r"\\Z[\d\-\]]\x41\u0041", "^(ab|c)?$", "(?:^ab)$", "[]$]a", "a{2}$", "(a$)?"],
)
def test_expressions_whose_anchors_stand_at_their_ends(expression: str) -> None:
    assert not not_understood(expression)


# ---- with the library ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def backend() -> GrammarBackend:
    pytest.importorskip("xgrammar")
    return grammars.LOADERS["xgrammar"]()(VOCABULARY, load_settings({"grammar.max_whitespace": 0}, environ={}))


@pytest.mark.parametrize("what", [{"json": ALL_OF}, {"regex": "a^b"}, {"json": {"type": "string", "pattern": '^"a"$'}}])
def test_both_ways_refuse_without_a_word_on_stderr(
    backend: GrammarBackend, what: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    params = StructuredOutputsParams(**what)
    with pytest.raises(ValueError, match=r"not honour|anchor"):
        backend.compile(params)
    with pytest.raises(ValueError, match=r"not honour|anchor"):
        backend.automaton(params, 1000)
    assert capfd.readouterr().err == ""


def test_what_is_accepted_warns_of_nothing(backend: GrammarBackend, capfd: pytest.CaptureFixture[str]) -> None:
    for schema in ACCEPTED:
        backend.compile(StructuredOutputsParams(json=schema))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("most", [1, 3])
def test_texts_of_limited_length_hold_nothing_that_json_escapes(backend: GrammarBackend, most: int) -> None:
    params = StructuredOutputsParams(json={"type": "string", "maxLength": most})
    matcher, mask = backend.compile(params).matcher(), np.zeros(VOCABULARY.words, np.int32)
    assert matcher.accept(VOCABULARY.tokens.index(b'"'))
    matcher.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    allowed = {VOCABULARY.tokens[item][:1] for item in np.flatnonzero(bits)}
    assert b"a" in allowed
    assert not allowed & {b"\\", *(bytes([code]) for code in range(32))}
    automaton = backend.automaton(params, 100)
    assert automaton.walk(0, '"😀"'.encode()) >= 0
    assert automaton.walk(0, b'"\t"') == -1
    constant = {
        "const": r'[^"\
]'
    }  # written as the class is
    assert backend.automaton(StructuredOutputsParams(json=constant), 100).walk(0, json.dumps(constant["const"]).encode()) >= 0


def expression_of(rng: random.Random, letters: list[str], depth: int = 0) -> str:
    parts = []
    for _ in range(rng.randint(1, 3)):
        inside = depth < 2 and rng.random() < 0.5
        part = f"({expression_of(rng, letters, depth + 1)})" if inside else rng.choice(letters)
        parts.append(part + rng.choice(["", "", "?", "+", "*", "{1,2}", "{0,1}"]))
    return "".join(parts) if rng.random() < 0.8 else f"{parts[0]}|{''.join(parts[1:])}"


@pytest.mark.parametrize("wide", [False, True])
def test_texts_of_random_expressions_are_theirs(backend: GrammarBackend, wide: bool) -> None:
    """All of up to four letters, by matchers, and by automata too unless there are wide classes. None has what JSON escapes."""
    rng, ids = random.Random(1), {letter: VOCABULARY.tokens.index(letter.encode()) for letter in 'abc"'}
    for _ in range(150):
        expression = expression_of(rng, ["a", "b", "[ab]", *([".", "[^a]", r"\S"] if wide else ["c", "[ac]"])])
        params = StructuredOutputsParams(json={"type": "string", "pattern": f"^({expression})$"})
        grammar = backend.compile(params)
        automaton = None if wide else backend.automaton(params, 1000)
        for length in range(5):
            for letters in product("abc", repeat=length):
                text = f'"{"".join(letters)}"'
                wanted, matcher = re.fullmatch(expression, text[1:-1]) is not None, grammar.matcher()
                assert all(matcher.accept(ids[letter]) for letter in text) == wanted, (expression, text)
                if automaton is not None:
                    state = automaton.walk(0, text.encode())
                    assert (state >= 0 and bool(automaton.accepting[state])) == wanted, (expression, text)


def test_expressions_in_json_write_nothing_that_is_not_a_letter_of_a_text(backend: GrammarBackend) -> None:
    """Neither escapes nor bytes that are no UTF-8, which the library's own symbol for them lets in."""
    grammar = backend.compile(StructuredOutputsParams(json={"type": "string", "pattern": '^(.|a"|b){1,2}$'}))

    def taken(text: bytes) -> bool:
        matcher = grammar.matcher()
        return all(matcher.accept(VOCABULARY.tokens.index(bytes([byte]))) for byte in text)

    assert taken('"é😀"'.encode())
    for bad in (b'"a""', b'"\\"', b'"\t"', b'"\xf0\x87\xbf\xb6"'):
        assert not taken(bad)


PIECES: dict[str, list[Any]] = {
    "type": ["string", "integer", "number", "object", "array", "null", ["string", "null"], ["integer", "array"]],
    "minLength": [0, 2], "maxLength": [0, 1, 3], "pattern": ["^[a-c]{2}$", "x+", "^$"], "format": ["date", "uri"],
    "minimum": [-3, 0.5, 7], "maximum": [9, 12.25], "exclusiveMinimum": [1], "exclusiveMaximum": [10], "multipleOf": [2, 0.5],
    "minItems": [1], "maxItems": [1, 3], "uniqueItems": [True], "contains": [{"const": 1}], "prefixItems": [[{"type": "null"}]],
    "required": [["a"], ["b"], ["a", "b"]], "minProperties": [1, 2], "maxProperties": [1, 2], "additionalProperties": [True, False],
    "propertyNames": [{"maxLength": 1}, {"enum": ["a", "c"]}], "enum": [["ab", 2, None], [1, 3]], "const": [2, "xx", {"a": 1}],
    "dependentRequired": [{"a": ["b"]}], "if": [{}], "not": [{"type": "null"}, False], "title": ["t"],
}  # fmt: skip
INNER = ("items", "unevaluatedItems", "additionalProperties", "unevaluatedProperties", "not")


def schema_of(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of any keywords beside each other."""
    schema = {name: rng.choice(PIECES[name]) for name in rng.sample(list(PIECES), rng.randint(0, 3))}
    if rng.random() < 0.9:
        schema["type"] = rng.choice(PIECES["type"])
    if depth < 2:
        inner = lambda: schema_of(rng, depth + 1)  # noqa: E731
        if rng.random() < 0.4:
            schema["properties"] = {name: inner() for name in rng.sample("abc", rng.randint(1, 2))}
        if rng.random() < 0.1:
            schema["patternProperties"] = {rng.choice(["^a$", "^[xy]$"]): inner()}
        if rng.random() < 0.3:
            schema[rng.choice(INNER)] = inner()
        if rng.random() < 0.15:
            schema[rng.choice(["anyOf", "allOf", "oneOf"])] = [inner() for _ in range(rng.randint(1, 2))]
    return schema


def document_of(automaton: Automaton, rng: random.Random) -> bytes | None:
    """A random text of the automaton; None if it does not end soon."""
    state, text = 0, b""
    for _ in range(200):
        following = np.flatnonzero(automaton.edges[state] >= 0)
        if automaton.accepting[state] and (not following.size or rng.random() < 0.3):
            return text
        byte = int(rng.choice(following))
        state, text = int(automaton.edges[state, byte]), text + bytes([byte])
    return None


def test_documents_of_random_schemas_satisfy_them(backend: GrammarBackend) -> None:
    rng, accepted, validator = random.Random(5), 0, jsonschema.Draft202012Validator
    for _ in range(1500):
        schema = schema_of(rng)
        try:
            automaton = backend.automaton(StructuredOutputsParams(json=schema), 1000)
        except (ValueError, RuntimeError):  # the latter is the library's
            continue
        accepted += 1
        for _ in range(8):
            text = document_of(automaton, rng)
            if text is not None:
                assert validator(schema).is_valid(json.loads(text)) or '"oneOf"' in json.dumps(schema), (schema, text)
    assert accepted > 200

"""Automata of XGrammar's rules: what they take against Python's expressions, and their masks against the library's and brute force."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from grammar_world import TableGrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schemas import schema_of

from modelrunner.automaton import TooLarge
from modelrunner.grammar import GrammarBackend, Vocabulary
from modelrunner.kernels.automata import reference
from modelrunner.plugins import grammars
from modelrunner.plugins.grammars.ebnf import NotRegular, automaton_of
from modelrunner.settings import load_settings
from modelrunner.structured_outputs import StructuredOutputsParams
from modelrunner.testing.byte_tokenizer import EOS, ByteTokenizer

pytest.importorskip("xgrammar")
MERGED = (b"ab", b"aab", b"bc", b'{"', b'":', b'", "', b"null", b"true,", b"12", b"\xc3\xa9a", b"\xa9x", b"  ", b"\n  ", b"Oslo")
TOKENS = ByteTokenizer(331, MERGED).token_bytes()
WORDS = Vocabulary([*TOKENS, *[b""] * 9], (EOS,))


def made(name: str = "xgrammar") -> GrammarBackend:
    pytest.importorskip(name)
    return grammars.LOADERS[name]()(WORDS, load_settings({"grammar.max_whitespace": 2}, environ={}))


BACKEND = made()
LETTER = st.sampled_from(["a", "b", "c", "é", "[ab]", "[^a]", ".", r"\d", "[a-cé]", r"\."])


def repeated(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    signs = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "{0,2}"])
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, signs).map(lambda pair: f"({pair[0]}){pair[1]}"),
    )


@settings(max_examples=150, deadline=None)
@given(st.recursive(LETTER, repeated, max_leaves=6), st.lists(st.text("abcé1.\n", max_size=6), min_size=5, max_size=30))
def test_expressions_take_what_they_take_in_python(pattern: str, texts: list[str]) -> None:
    automaton = BACKEND.automaton(StructuredOutputsParams(regex=pattern), 2048)
    for text in texts:
        state = automaton.walk(0, text.encode())
        taken = state >= 0 and bool(automaton.accepting[state])
        assert taken == (re.fullmatch(pattern, text, re.DOTALL) is not None), (pattern, text)


def allowed(mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Whether each id of the vocabulary is; what a library sets beyond it means nothing."""
    return np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(WORDS.tokens)]


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}, "cold": {"type": "boolean"}}, "required": ["city", "cold"]},
    {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 3},
            "b": {"enum": ["x", 1, None]},
            "c": {"type": "string", "maxLength": 5},
            "d": {"type": "number"},
            "e": {"type": "string"},
        },
        "required": ["a", "b"],
    },
    {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    {"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "string"}}, "n": {"const": 'say "hi"'}}},
    {"type": "object", "properties": {"id": {"type": "string", "pattern": r"^[A-Z]{2,5}(-|/)\d+( ?x)*$"}}, "required": ["id"]},
    {"type": "string", "pattern": "[!-~]{1,4}"},
    {"anyOf": [{"type": "integer", "maximum": 20, "minimum": -3}, {"type": "string", "format": "date"}]},
]
ASKED = [
    *({"json": schema} for schema in SCHEMAS),
    *({"regex": text} for text in (r"[a-d]{4,9}(x|yy)", r"(ab|a+c)*é?", r"\s*\w+\W", r"^[^a-z]{2,4}$", r"(\d{1,3}\.){3}\d{1,3}")),
    {"choice": ["plain", 'with "quotes" and \\', "zwei\nZeilen", "äöü€😀", "a" * 60]},
    {"grammar": 'root ::= "a" b | "no"\nb ::= [a-c]* "12"'},
]


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: str(next(iter(asked.values())))[:40])
@pytest.mark.parametrize("seed", range(3))
def test_masks_are_those_of_the_library(asked: dict[str, Any], seed: int) -> None:
    """Along random texts; the library allows the same ids at each place."""
    params, rng = StructuredOutputsParams(**asked), np.random.default_rng(seed)
    automaton = BACKEND.automaton(params, 2048)
    ours, theirs = TableGrammar(automaton, WORDS).matcher(), BACKEND.compile(params).matcher()
    mine, want = np.zeros((2, WORDS.words), np.int32)
    for place in range(80):
        ours.fill(mine)
        theirs.fill(want)
        assert (allowed(mine) == allowed(want)).all(), place
        ids = [item for item in np.flatnonzero(allowed(mine)).tolist() if item != EOS]
        if not ids:
            return
        token = int(rng.choice(ids))
        assert ours.accept(token)
        assert theirs.accept(token)


def test_random_schemas_become_automata_that_allow_the_same() -> None:
    """Nested ones too, with patterns; along random documents, which satisfy them."""
    jsonschema = pytest.importorskip("jsonschema")
    rng = np.random.default_rng(1)
    for schema in (schema_of(random.Random(i)) for i in range(100)):
        params = StructuredOutputsParams(json=schema)
        ours, theirs = TableGrammar(BACKEND.automaton(params, 2048), WORDS).matcher(), BACKEND.compile(params).matcher()
        (mine, want), said = np.zeros((2, WORDS.words), np.int32), b""
        while True:
            ours.fill(mine)
            theirs.fill(want)
            assert (allowed(mine) == allowed(want)).all(), (schema, said)
            ids = np.flatnonzero(allowed(mine)).tolist()
            if ids == [EOS] or (EOS in ids and rng.random() < 0.5):
                break
            token = int(rng.choice([item for item in ids if item != EOS]))
            assert ours.accept(token)
            assert theirs.accept(token)
            said += WORDS.tokens[token]
        jsonschema.validate(json.loads(said, strict=False), schema)  # the library lets control characters into short texts


@pytest.mark.parametrize("asked", ASKED[:3] + ASKED[-2:], ids=lambda asked: str(next(iter(asked.values())))[:40])
def test_masks_are_those_of_walking_every_token(asked: dict[str, Any]) -> None:
    automaton = BACKEND.automaton(StructuredOutputsParams(**asked), 2048)
    text, states = WORDS.packed, automaton.num_states
    masks, closed = torch.full((states + 1, WORDS.words), -7, dtype=torch.int32), torch.full((states,), 9, dtype=torch.uint8)
    tables = (torch.from_numpy(automaton.edges), torch.from_numpy(automaton.accepting.astype(np.uint8)))
    tokens = (torch.from_numpy(text.start), torch.from_numpy(text.text.copy()), text.longest, torch.from_numpy(text.stops))
    reference.mask_states(0, states, *tables, *tokens, masks, closed)
    for state in range(states):
        leads = [bool(token) and automaton.walk(state, token) >= 0 for token in WORDS.tokens]
        assert bool(closed[state]) == (bool(automaton.accepting[state]) and not any(leads))
        leads[EOS] = bool(automaton.accepting[state])
        bits = np.unpackbits(masks[state].numpy().view(np.uint8), bitorder="little")
        assert bits.tolist() == leads + [0] * (bits.size - len(leads))
    assert (masks[states] == -7).all()


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"json_object": True}, "as deep as it likes"),
        ({"json": {"type": "object"}}, "calls itself before its end"),
        ({"json": {"type": "object", "properties": {"a": {"$ref": "#"}}}}, "calls itself before its end"),
        ({"grammar": 'root ::= "(" root ")" | "z"'}, "calls itself before its end"),
        ({"json": {"type": "string", "pattern": r"^\S+$"}}, "letters of several bytes"),
        ({"regex": "(a|b)*a(a|b){14}"}, "more than 2048 states"),
        ({"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9, "maxItems": 10**9}}, "more than 2048 states"),
    ],
)
def test_what_is_no_small_automaton_is_said(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        BACKEND.automaton(StructuredOutputsParams(**asked), 2048)


def test_rules_that_are_not_known_are_refused() -> None:
    unknown = ('TagDispatch("a", b)', 'Regex("a", json_string=true)', 'Regex("a")', '("a" ? )', r'"\q"', "missing")
    for text in (*(f"root ::= {body}" for body in unknown), "other ::= [a]"):
        with pytest.raises(NotRegular, match="known here"):
            automaton_of(text, 100)
    with pytest.raises(TooLarge):
        automaton_of('root ::= ("abcdef"{20, 20})', 100)
    assert automaton_of('root ::= (""{1000000000000, 1000000000000} "a")', 100).num_states == 2


def test_llguidance_makes_automata_of_choices() -> None:
    backend = made("llguidance")
    params = StructuredOutputsParams(choice=["abc", "ab", "é"])
    automaton = backend.automaton(params, 100)
    mine, want = np.zeros((2, WORDS.words), np.int32)
    for start in (b"", b"a", b"ab", b"abc", b"\xc3"):
        theirs = backend.compile(params).matcher()
        assert all(theirs.accept(TOKENS.index(bytes([byte]))) for byte in start)
        ours = TableGrammar(automaton, WORDS).matcher()
        assert all(ours.accept(TOKENS.index(bytes([byte]))) for byte in start)
        ours.fill(mine)
        theirs.fill(want)
        assert (allowed(mine) == allowed(want)).all(), start
    with pytest.raises(ValueError, match="of choices only"):
        backend.automaton(StructuredOutputsParams(regex="a"), 100)


def test_texts_of_a_schema_parse() -> None:
    rng = np.random.default_rng(0)
    for schema in SCHEMAS:
        automaton = BACKEND.automaton(StructuredOutputsParams(json=schema), 2048)
        for _ in range(20):
            state, text = 0, b""
            while not (automaton.accepting[state] and (rng.random() < 0.5 or not (automaton.edges[state] >= 0).any())):
                byte = int(rng.choice(np.flatnonzero(automaton.edges[state] >= 0)))
                state, text = int(automaton.edges[state, byte]), text + bytes([byte])
            json.loads(text)

"""The built-in grammar backends: every kind of grammar, walked at random along the masks, and what they refuse."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from modelrunner.grammar import GrammarBackend, Vocabulary
from modelrunner.plugin_manager import PluginManager
from modelrunner.plugins import grammars
from modelrunner.settings import load_settings
from modelrunner.structured_outputs import StructuredOutputsParams
from modelrunner.testing.byte_tokenizer import EOS, ByteTokenizer

jsonschema = pytest.importorskip("jsonschema")
TOKENS = ByteTokenizer(331).token_bytes()
PADDED = Vocabulary([*TOKENS, *[b""] * 9], (EOS,))  # a model may have more logits than its tokenizer ids
LETTERS = {"type": "array", "items": {"enum": ["a", "bé", "😀"]}, "maxItems": 3}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": -5, "maximum": 500}, "t": LETTERS},
    "required": ["n", "t"],
    "additionalProperties": False,
}


@pytest.fixture(params=["xgrammar", "llguidance"])
def backend(request: pytest.FixtureRequest) -> GrammarBackend:
    pytest.importorskip(request.param)
    return grammars.LOADERS[request.param]()(PADDED, load_settings({"grammar.max_whitespace": 1}, environ={}))


def allowed(mask: np.ndarray[Any, Any]) -> list[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(item) for item in np.flatnonzero(bits)]


def walk(backend: GrammarBackend, params: StructuredOutputsParams, seed: int) -> str:
    """A random text of the grammar, every token of it allowed by the mask before."""
    rng = np.random.default_rng(seed)
    matcher = backend.compile(params).matcher()
    mask = np.full(PADDED.words, -1, np.int32)
    text = b""
    for _ in range(400):
        matcher.fill(mask)
        ids = allowed(mask)
        assert ids, "a dead end"
        assert all(PADDED.tokens[item] or item == EOS for item in ids), "an id without text is allowed"
        if EOS in ids and (len(ids) == 1 or rng.random() < 0.5):
            return text.decode()
        token = int(rng.choice([item for item in ids if item != EOS]))
        assert matcher.accept(token)
        text += PADDED.tokens[token]
    raise AssertionError(f"no end: {text!r}")


@pytest.mark.parametrize("seed", range(6))
def test_masks_lead_to_texts_of_the_grammar(backend: GrammarBackend, seed: int) -> None:
    jsonschema.validate(json.loads(walk(backend, StructuredOutputsParams(json=SCHEMA), seed)), SCHEMA)
    assert re.fullmatch("[a-c]{2,5}(x|yé)?", walk(backend, StructuredOutputsParams(regex="[a-c]{2,5}(x|yé)?"), seed))
    choices = ["plain", 'with "quotes" and \\', "zwei\nZeilen", "äöü€😀", "a" * 60]
    assert walk(backend, StructuredOutputsParams(choice=choices), seed) in choices
    assert re.fullmatch(r"\(*z\)*", walk(backend, StructuredOutputsParams(grammar='root ::= "(" root ")" | "z"'), seed))


@pytest.mark.parametrize("seed", range(3))
def test_any_object(backend: GrammarBackend, seed: int) -> None:
    """A random walk through any object hardly ever ends; closing it as soon as that is possible does."""
    matcher = backend.compile(StructuredOutputsParams(json_object=True)).matcher()
    mask = np.zeros(PADDED.words, np.int32)
    rng, text = np.random.default_rng(seed), b""
    for step in range(300):
        matcher.fill(mask)
        ids = allowed(mask)
        if EOS in ids:
            break
        closing = [item for item in ids if PADDED.tokens[item] in (b"}", b"]", b'"', b":", b"1", b"e", b"l", b"u")]
        token = int(rng.choice(closing if step > 12 and closing else ids))
        assert matcher.accept(token)
        text += PADDED.tokens[token]
    assert isinstance(json.loads(text), dict)


def test_a_token_outside_the_grammar_is_not_taken(backend: GrammarBackend) -> None:
    matcher = backend.compile(StructuredOutputsParams(choice=["abc"])).matcher()
    matcher.fill(np.zeros(PADDED.words, np.int32))
    assert not matcher.accept(TOKENS.index(b"z"))


def test_matchers_of_one_grammar_do_not_share_their_places(backend: GrammarBackend) -> None:
    grammar = backend.compile(StructuredOutputsParams(choice=["abc"]))
    first, mask = grammar.matcher(), np.zeros(PADDED.words, np.int32)
    assert first.accept(TOKENS.index(b"a"))
    second = grammar.matcher()
    for matcher, letter in ((first, b"b"), (second, b"a")):
        matcher.fill(mask)
        assert TOKENS.index(letter) in allowed(mask)


@pytest.mark.parametrize(
    "params", [{"json": {"type": "wrong"}}, {"regex": "(a"}, {"grammar": "root ::= missing"}, {"json": {"$ref": "#/nowhere"}}]
)
def test_what_is_not_understood_is_said(backend: GrammarBackend, params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        backend.compile(StructuredOutputsParams(**params))


def test_offers_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "find_spec", lambda name: None)
    answers = [asked.answers for asked in PluginManager.load([]).ask("grammar_backend", settings=load_settings({}, environ={}))]
    reasons = [getattr(answer, "reason", "") for each in answers for answer in each]
    assert reasons == [
        "xgrammar is not installed: pip install 'modelrunner[grammar]'",
        "llguidance is not installed: pip install 'modelrunner[llguidance]'",
    ]

"""Grammars by llguidance (github.com/guidance-ai/llguidance): Earley's algorithm over derivatives of regular expressions, in Rust."""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from

from modelrunner.automaton import Automaton, of_choice
from modelrunner.grammar import Grammar, GrammarBackend, Mask, Matcher, Vocabulary
from modelrunner.settings import RunnerSettings
from modelrunner.structured_outputs import StructuredOutputsParams

OBJECT = '{"type": "object"}'


class LLGuidance(GrammarBackend):
    """JSON schemas as they are: properties that a schema does not name may be generated, unless it forbids them."""

    def __init__(self, vocabulary: Vocabulary, settings: RunnerSettings) -> None:
        super().__init__(vocabulary, settings)
        if not vocabulary.stop_ids:
            raise ValueError("llguidance needs an end-of-sequence id, and the model names none")
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(vocabulary)), eos_token=list(vocabulary.stop_ids))
        most = settings.grammar.max_whitespace
        self._json: Any = {"whitespace_pattern": rf"[ \n\r\t]{{0,{most}}}"} if most else {"whitespace_flexible": False}

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        matcher = LLMatcher(self._tokenizer, self._source(params), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return LLGuidanceGrammar(matcher)

    def automaton(self, params: StructuredOutputsParams, max_states: int) -> Automaton:
        """Of choices alone: the library does not show what it makes of the rest."""
        if params.choice is None:
            raise ValueError("llguidance gives automata of choices only")
        return of_choice(params.choice, max_states)

    def _source(self, params: StructuredOutputsParams) -> str:
        """The grammar in the library's own form."""
        if params.regex is not None:
            return grammar_from("regex", params.regex)
        if params.grammar is not None:
            return grammar_from("ebnf", params.grammar)
        if params.choice is not None:
            return grammar_from("choice", json.dumps(params.choice))
        return str(LLMatcher.grammar_from_json_schema(OBJECT if params.json is None else str(params.json), overrides=self._json))


class _Tokens:
    """A vocabulary as the library asks for it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = list(vocabulary.tokens)
        self.eos_token_id = vocabulary.stop_ids[0]
        self.bos_token_id = None
        self.special_token_ids = [item for item, text in enumerate(self.tokens) if not text]
        self._ids: dict[bytes, int] = {}
        for item, text in enumerate(self.tokens):
            self._ids.setdefault(text, item)
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes) -> list[int]:
        """Some tokens of `text`, the longest first; the library wants them for what it would write by itself, and masks need none."""
        ids, place = [], 0
        while place < len(text):
            pieces = (text[place : place + size] for size in range(self._longest, 0, -1))
            piece = next((piece for piece in pieces if piece in self._ids), text[place : place + 1])
            ids += [self._ids[piece]] if piece in self._ids else []
            place += len(piece)
        return ids


class LLGuidanceGrammar(Grammar):
    """A compiled grammar: a matcher that has seen nothing."""

    def __init__(self, matcher: Any) -> None:
        self._start = matcher

    def matcher(self) -> Matcher:
        return LLGuidanceMatcher(self._start.deep_copy())


class LLGuidanceMatcher(Matcher):
    """One output."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.consume_token(token_id))

    def fill(self, mask: Mask) -> None:
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise RuntimeError(self._matcher.get_error())

"""Grammars by XGrammar (Dong et al. 2024, arXiv:2411.15100)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

from modelrunner.automaton import Automaton, of_choice
from modelrunner.grammar import Grammar, GrammarBackend, Mask, Matcher, Vocabulary
from modelrunner.plugins.grammars.ebnf import automaton_of
from modelrunner.settings import GrammarSettings, RunnerSettings
from modelrunner.structured_outputs import StructuredOutputsParams

OBJECT = '{"type": "object"}'
PLACE = re.compile(r"^\[[\d:]+\] \S+?:\d+: ")  # of the library's source, before its messages


class XGrammar(GrammarBackend):
    """JSON schemas in strict mode: properties and items that a schema does not name are not generated."""

    def __init__(self, vocabulary: Vocabulary, settings: RunnerSettings) -> None:
        super().__init__(vocabulary, settings)
        own, xgrammar = settings.grammar, import_module("xgrammar")  # it imports torch, and takes its time
        self._new_matcher, self._grammar = xgrammar.GrammarMatcher, xgrammar.Grammar
        info = xgrammar.TokenizerInfo(
            list(vocabulary.tokens),
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=len(vocabulary.tokens),
            stop_token_ids=list(vocabulary.stop_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._whitespace = whitespace(own)

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        try:
            return XGrammarGrammar(self._compiled(params), self._new_matcher)
        except RuntimeError as error:
            raise ValueError(PLACE.sub("", str(error)).strip()) from error

    def _compiled(self, params: StructuredOutputsParams) -> Any:
        compiler = self._compiler
        if params.regex is not None:
            return compiler.compile_regex(params.regex)
        if params.grammar is not None:
            return compiler.compile_grammar(params.grammar)
        if params.choice is not None:
            return compiler.compile_grammar("root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice))
        if params.json is not None:
            return compiler.compile_json_schema(str(params.json), **self._whitespace)
        return compiler.compile_json_schema(OBJECT, strict_mode=False, **self._whitespace)

    def automaton(self, params: StructuredOutputsParams, max_states: int) -> Automaton:
        """From the rules that the library makes of what is asked for, so that both ways allow the same."""
        if params.choice is not None:
            return of_choice(params.choice, max_states)
        if params.regex is not None:
            rules = self._grammar.from_regex(params.regex)
        elif params.grammar is not None:
            rules = self._grammar.from_ebnf(params.grammar)
        elif params.json is not None:
            rules = self._grammar.from_json_schema(str(params.json), **self._whitespace)
        else:
            raise ValueError("any JSON object nests as deep as it likes")
        return automaton_of(str(rules), max_states, lambda pattern: str(self._grammar.from_regex(pattern)))


def whitespace(settings: GrammarSettings) -> dict[str, Any]:
    """What JSON may have between its parts."""
    return {"any_whitespace": settings.max_whitespace > 0, "max_whitespace_cnt": settings.max_whitespace or None}


class XGrammarGrammar(Grammar):
    """A compiled grammar."""

    def __init__(self, compiled: Any, new_matcher: Callable[[Any], Any]) -> None:
        self._compiled, self._new_matcher = compiled, new_matcher

    def matcher(self) -> Matcher:
        return XGrammarMatcher(self._new_matcher(self._compiled))


class XGrammarMatcher(Matcher):
    """One output."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def fill(self, mask: Mask) -> None:
        self._matcher.fill_next_token_bitmask(mask[None])

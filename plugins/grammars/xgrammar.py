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
from modelrunner.plugins.grammars.expressions import not_understood
from modelrunner.plugins.grammars.json_texts import without_expressions
from modelrunner.plugins.grammars.schema_checks import Fault, checked, refusal
from modelrunner.settings import GrammarSettings, RunnerSettings
from modelrunner.structured_outputs import StructuredOutputsParams

OBJECT = '{"type": "object"}'
SYMBOL = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]')  # of printed rules: a text, or a class of letters
BOUNDED = r"[^\"\\\r\n]"  # letters of a text of limited length
PRINTABLE = r"[^\0-\x1f\"\\\r\n]"  # without all that JSON escapes
AS_A_TEXT = "::= Regex("  # an expression that the library keeps from writing what JSON escapes
ESCAPED = [*range(0x20), ord('"'), ord("\\")]  # bytes
CHECKED_STATES = 4096  # of an expression that is looked through for them
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
            return compiler.compile_regex(whole(params.regex))
        if params.grammar is not None:
            return compiler.compile_grammar(params.grammar)
        if params.choice is not None:
            return compiler.compile_grammar("root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice))
        if params.json is not None:
            return compiler.compile_grammar(self._without_expressions(self._rules(str(params.json))))
        return compiler.compile_json_schema(OBJECT, strict_mode=False, **self._whitespace)

    def automaton(self, params: StructuredOutputsParams, max_states: int) -> Automaton:
        """From the rules that the library makes of what is asked for, so that both ways allow the same."""
        if params.choice is not None:
            return of_choice(params.choice, max_states)
        if params.regex is not None:
            rules = self._grammar.from_regex(whole(params.regex))
        elif params.grammar is not None:
            rules = self._grammar.from_ebnf(params.grammar)
        elif params.json is not None:
            rules = self._rules(str(params.json))
        else:
            raise ValueError("any JSON object nests as deep as it likes")
        return automaton_of(str(rules), max_states, lambda pattern: str(self._grammar.from_regex(pattern)))

    def _rules(self, schema: str) -> Any:
        """The grammar of a JSON schema, whose texts of limited length have no letters that JSON escapes: the library lets these in.
        Raises ValueError for what it would not honour."""
        text, patterns = checked(schema)
        faults = [Fault(each.keyword, each.where, why) for each in patterns if (why := self._spoils_json(each.expression))]
        if faults:
            raise ValueError(refusal(faults))
        rules = self._grammar.from_json_schema(text, **self._whitespace)
        printed = str(rules)
        mended = SYMBOL.sub(lambda symbol: PRINTABLE if symbol[0] == BOUNDED else symbol[0], printed)
        return rules if mended == printed else self._grammar.from_ebnf(mended)

    def _without_expressions(self, rules: Any) -> Any:
        """The same grammar, whose expressions are rules where it has some."""
        printed = str(rules)
        plain = without_expressions(printed, lambda expression: str(self._grammar.from_regex(expression)))
        return rules if plain == printed else self._grammar.from_ebnf(plain)

    def _spoils_json(self, pattern: str) -> str:
        """Why texts of an expression would not be JSON; empty if they would. The library writes those of some expressions as they are."""
        if AS_A_TEXT in str(self._grammar.from_json_schema(json.dumps({"type": "string", "pattern": pattern}))):
            return ""
        try:
            edges = automaton_of(str(self._grammar.from_regex(pattern)), CHECKED_STATES).edges
        except ValueError as error:
            return f"whether its texts have letters that JSON escapes is not clear: {error}"
        spoils = (edges[:, ESCAPED] >= 0).any()
        return "its texts may have letters that JSON escapes: a quote, a backslash, or control characters" if spoils else ""


def whole(expression: str) -> str:
    """A regular expression for whole texts. Raises ValueError for what the library would pass over with a warning."""
    if problem := not_understood(expression):
        raise ValueError(problem)
    return expression


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

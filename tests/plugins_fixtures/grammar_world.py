"""Structured output in tests: what an output wrote, and a grammar backend of a few lines that can be slow, fail and be counted.

Importable by name from an engine process, as plugin objects must be.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from modelrunner import Offer, hookimpl
from modelrunner.automaton import MAX_STATES, Automaton, of_choice
from modelrunner.grammar import BITS, Grammar, GrammarBackend, Mask, Matcher, Vocabulary
from modelrunner.kernels.automata.cpu import mask_states
from modelrunner.plugins.grammars.ebnf import automaton_of
from modelrunner.structured_outputs import StructuredOutputsParams
from modelrunner.testing.byte_tokenizer import ByteTokenizer

TOKENS = ByteTokenizer(331).token_bytes()
COST = 0.05  # seconds that each mask takes after a tilde


def written(token_ids: Sequence[int]) -> str:
    """What the ids write by themselves; end-of-sequence ids write nothing."""
    return b"".join(TOKENS[item] for item in token_ids).decode(errors="replace")


class Choices(Grammar):
    """The output is one of some texts, and `log` counts what is asked of its matchers."""

    def __init__(self, backend: ChoiceBackend, texts: Sequence[bytes]) -> None:
        self.backend, self.texts = backend, texts

    def matcher(self) -> Matcher:
        self.backend.log["matchers"] += 1
        return ChoiceMatcher(self.backend, self.texts)


class ChoiceMatcher(Matcher):
    """Masks after an exclamation mark fail, those after a tilde are costly."""

    def __init__(self, backend: ChoiceBackend, texts: Sequence[bytes]) -> None:
        self.backend, self.texts, self.said = backend, texts, b""

    def accept(self, token_id: int) -> bool:
        self.backend.log["accepted"] += 1
        self.said += self.backend.vocabulary.tokens[token_id]
        return any(text.startswith(self.said) for text in self.texts)

    def fill(self, mask: Mask) -> None:
        self.backend.log["filled"] += 1
        if b"!" in self.said:
            raise RuntimeError("planted: an exclamation mark")
        began = time.thread_time()
        while b"~" in self.said and time.thread_time() < began + COST:
            pass
        mask[:] = 0
        rests = [text[len(self.said) :] for text in self.texts if text.startswith(self.said)]
        words = mask.view("uint32")
        for item, text in enumerate(self.backend.vocabulary.tokens):
            ends = item in self.backend.vocabulary.stop_ids and b"" in rests
            if ends or (text and any(rest.startswith(text) for rest in rests)):
                words[item // BITS] |= 1 << item % BITS


class ChoiceBackend(GrammarBackend):
    """Knows only choices. One that begins with `hold:` is compiled once the file that it names is there; `boom` is a broken library."""

    log: ClassVar[Counter[str]] = Counter()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        self.log["compiled"] += 1
        if params.choice is None:
            raise ValueError("only choices")
        first = params.choice[0]
        if first == "boom":
            raise KeyError("planted")
        if first.startswith("hold:"):
            while not Path(first.removeprefix("hold:")).exists():
                time.sleep(0.005)
        return Choices(self, [text.encode() for text in params.choice if not text.startswith("hold:")])


class ChoicePlugin:
    """Offers `ChoiceBackend` beside what is installed, and wins."""

    MODELRUNNER_API = ">=1,<2"

    @hookimpl
    def grammar_backend(self) -> Any:
        return Offer("choices", lambda: ChoiceBackend, "exact", replaces=frozenset({"xgrammar"}))


class TableGrammar(Grammar):
    """An automaton followed on the host, with the masks of all states made beforehand: as cheap as matchers can be."""

    def __init__(self, automaton: Automaton, vocabulary: Vocabulary) -> None:
        self.automaton, self.vocabulary = automaton, vocabulary
        text, states = vocabulary.packed, automaton.num_states
        masks = torch.zeros(states + 1, max(2, vocabulary.words), dtype=torch.int32)
        given = (torch.from_numpy(automaton.edges), torch.from_numpy(automaton.accepting.astype(np.uint8)))
        tokens = (torch.from_numpy(text.start), torch.from_numpy(text.text.copy()), text.longest, torch.from_numpy(text.stops))
        mask_states(0, states, *given, *tokens, masks, torch.zeros(states, dtype=torch.uint8))
        self.masks = masks.numpy()[:, : vocabulary.words]

    def matcher(self) -> Matcher:
        return TableMatcher(self)


class TableMatcher(Matcher):
    def __init__(self, grammar: TableGrammar) -> None:
        self.grammar, self.state = grammar, 0

    def accept(self, token_id: int) -> bool:
        self.state = self.grammar.automaton.walk(self.state, self.grammar.vocabulary.tokens[token_id])
        return self.state >= 0

    def fill(self, mask: Mask) -> None:
        mask[:] = self.grammar.masks[self.state]


class TableBackend(GrammarBackend):
    """Knows choices, and as `grammar` the EBNF that XGrammar prints, without that library."""

    def automaton(self, params: StructuredOutputsParams, max_states: int) -> Automaton:
        if params.choice is not None:
            return of_choice(params.choice, max_states)
        if params.grammar is not None:
            return automaton_of(params.grammar, max_states)
        raise ValueError("only choices and rules")

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        return TableGrammar(self.automaton(params, MAX_STATES), self.vocabulary)


class TablePlugin:
    """Offers `TableBackend` beside what is installed, and wins."""

    MODELRUNNER_API = ">=1,<2"

    @hookimpl
    def grammar_backend(self) -> Any:
        return Offer("tables", lambda: TableBackend, "exact", replaces=frozenset({"xgrammar"}))

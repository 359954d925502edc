"""Grammar backends for structured output: xgrammar (`pip install 'modelrunner[grammar]'`), or llguidance (`'modelrunner[llguidance]'`)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Fit, Offer

if TYPE_CHECKING:
    from modelrunner.grammar import GrammarBackend

MODELRUNNER_API = ">=1,<2"


def _xgrammar() -> type[GrammarBackend]:
    from modelrunner.plugins.grammars.xgrammar import XGrammar

    return XGrammar


def _llguidance() -> type[GrammarBackend]:
    from modelrunner.plugins.grammars.llguidance import LLGuidance

    return LLGuidance


BACKENDS: tuple[tuple[str, str, Fit], ...] = (("xgrammar", "grammar", "exact"), ("llguidance", "llguidance", "family"))
LOADERS = {"xgrammar": _xgrammar, "llguidance": _llguidance}


@hookimpl
def grammar_backend() -> list[Offer[type[GrammarBackend]] | Decline]:
    answers: list[Offer[type[GrammarBackend]] | Decline] = []
    for name, extra, fit in BACKENDS:
        if find_spec(name) is None:
            answers.append(Decline(f"{name} is not installed: pip install 'modelrunner[{extra}]'"))
        else:
            answers.append(Offer(name, LOADERS[name], fit, f"the installed package {name}"))
    return answers

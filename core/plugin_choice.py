"""Choosing between offers: the pinned one, else the best fit; a tie is an error, and a fallback never wins while a plugin is broken."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher, get_close_matches
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from modelrunner.errors import ModelRunnerError, PluginError
from modelrunner.offers import RANK, Decline, Offer
from modelrunner.plugin_contract import component_problem
from modelrunner.plugin_records import Candidate, PluginFailure, describe_error

if TYPE_CHECKING:
    from modelrunner.settings import RunnerSettings

T = TypeVar("T")
SUFFIX = "forcausallm"
RESEMBLES = 0.75  # of two names without "ForCausalLM": a hint may be wrong, but not noise
LOOKS_ALIKE = 0.88  # of two architectures without "ForCausalLM": "Lama" does look like "Llama", "Mixtral" not like "Mistral"


@dataclass(frozen=True)
class Asked:
    """One plugin's answers to one hook: offers and declines, none at all (not its business), or the failure that came instead."""

    candidate: Candidate
    answers: tuple[Offer[Any] | Decline, ...] = ()
    failure: PluginFailure | None = None

    @property
    def plugin(self) -> str:
        return self.candidate.name


@dataclass(frozen=True)
class Choice(Generic[T]):
    """The offer that was taken.

    plugin: `distribution:entry point` that made it. answers: what every plugin said. hook, subject: what was asked for.
    """

    offer: Offer[T]
    plugin: str
    answers: tuple[Asked, ...]
    candidate: Candidate
    hook: str
    subject: str

    def load(self) -> T:
        """Load the component and check it against its interface. Raises PluginError naming the plugin, its distribution and the cause;
        modelrunner's own errors (a missing file, a bad setting) pass through unchanged."""
        made_by = f"{self.hook} {self.offer.name!r} of plugin {self.plugin!r} ({self.candidate.origin})"
        try:
            value = self.offer.load()
        except ModelRunnerError as error:
            error.add_note(f"raised while loading {made_by}")
            raise
        except (Exception, SystemExit) as error:
            raise PluginError(f"{made_by}, chosen for {self.subject}, could not be loaded: {describe_error(error)}") from error
        problem = component_problem(self.hook, value)
        if problem:
            raise PluginError(f"{made_by}, chosen for {self.subject}, does not fit this modelrunner: {problem}")
        return value


@dataclass(frozen=True)
class Question:
    """What is asked for, and everything that was heard.

    pin: name that the setting `pinned_by` asks for (empty: `pin.<hook>`).
    failures: plugins that could not be loaded. unused: plugins that are installed and disabled, with the reason. num_loaded: those that
    are loaded, with this hook or without.
    """

    hook: str
    subject: str
    pin: str | None
    answers: tuple[Asked, ...]
    failures: tuple[PluginFailure, ...] = ()
    unused: Mapping[str, str] = field(default_factory=dict)
    num_loaded: int = 0
    wanted: tuple[str, ...] = ()
    pinned_by: str = ""

    @property
    def broken(self) -> tuple[PluginFailure, ...]:
        """Plugins that might have offered something better: those that failed to load, and those that failed to answer."""
        return (*self.failures, *(a.failure for a in self.answers if a.failure is not None))

    @property
    def offers(self) -> list[tuple[Asked, Offer[Any]]]:
        return [(asked, answer) for asked in self.answers for answer in asked.answers if isinstance(answer, Offer)]


def pin_of(settings: RunnerSettings, hook: str, setting: str = "") -> tuple[str | None, str]:
    """The name that the settings ask for, and the setting that does: `pin.<hook>`, else `setting` (a dotted name) unless it is `auto`."""
    pinned = settings.pin.of(hook)
    if pinned is not None:
        return pinned, f"pin.{hook}"
    value = attrgetter(setting)(settings) if setting else "auto"
    return (None, "") if value == "auto" else (value, setting)


def choose(question: Question) -> Choice[Any]:
    """The winning offer. Raises PluginError, saying what was heard and what to change, when there is none or several."""
    offers = question.offers
    if question.pin is not None:
        offers = [(asked, offer) for asked, offer in offers if question.pin in (offer.name, asked.plugin)]
        if not offers:
            raise PluginError(_pin_unknown(question))
    if not offers:
        raise PluginError(nothing_fits(question))
    best = min(RANK[offer.fit] for _, offer in offers)
    first = [(asked, offer) for asked, offer in offers if RANK[offer.fit] == best]
    first = [(a, o) for a, o in first if not any(o.name in other.replaces for _, other in first if other is not o)] or first
    if len(first) > 1:
        raise PluginError(_tie(question, first))
    asked, offer = first[0]
    if offer.fit == "fallback" and question.broken and question.pin is None:
        raise PluginError(_fallback_refused(question, offer))
    return Choice(offer, asked.plugin, question.answers, asked.candidate, question.hook, question.subject)


def _pin_unknown(question: Question) -> str:
    names = sorted({offer.name for _, offer in question.offers})
    offered = f"Offered: {', '.join(names) or 'nothing'}."
    setting = question.pinned_by or f"pin.{question.hook}"
    named = [asked for asked in question.answers if question.pin in (asked.plugin, asked.candidate.entry_point)]
    reasons = [_reason(answer) for asked in named for answer in asked.answers if isinstance(answer, Decline)]
    if reasons:  # the name is right, what it is asked for is not: what others say is beside the point
        lines = [f"{setting} = {question.pin!r}, which declined {question.subject}: {'; '.join(reasons)}. {offered}", *_near_line(question)]
        return "\n".join([*lines, f"{_where_all_are(question)}."])
    lines = [f"{setting} = {question.pin!r}, but no plugin offers that for {question.subject}. {offered}"]
    near = near_names([question.pin or ""], names, n=1)
    if near:
        lines.append(f"Did you mean {near[0]!r}?")
    pinned_failures = [f for f in question.broken if question.pin is not None and f.matches(question.pin)]
    lines += [f"The pinned {failure}" for failure in pinned_failures]
    return "\n".join([*lines, *heard(question, skip=pinned_failures), f"{_where_all_are(question)}."])


def _tie(question: Question, first: Sequence[tuple[Asked, Offer[Any]]]) -> str:
    rivals = " and ".join(f"{offer.name!r} of plugin {asked.plugin!r}" for asked, offer in first)
    by_plugin = len({offer.name for _, offer in first}) < len(first)
    pins = " or ".join(f"pin.{question.hook}={asked.plugin if by_plugin else offer.name}" for asked, offer in first)
    return f"Equally good offers ({first[0][1].fit}) for {question.subject}: {rivals}. Choose one with {pins}, or disable the other plugin."


def _fallback_refused(question: Question, offer: Offer[Any]) -> str:
    lines = [
        f"Only the fallback {offer.name!r} fits {question.subject}, but a plugin that might fit better is broken:",
        *(f"  {failure}" for failure in question.broken),
        *(f"Repair {failure.plugin}, or {failure.remedy};" for failure in question.broken),
        f"or accept the fallback with pin.{question.hook}={offer.name}.",
    ]
    return "\n".join(lines)


def nothing_fits(question: Question) -> str:
    """The error text for a question that got no offer: who declined and why, who is broken or disabled, what is installed, near names."""
    lines = [f"No plugin offers a {question.hook} for {question.subject}."]
    lines += _near_line(question)
    lines += heard(question)
    lines.append(f"Install a plugin for it, or pass one as LLM(plugins=[...]) or -p MODULE; {_where_all_are(question)}.")
    if question.hook == "model_state" and len(question.wanted) > 1 and question.wanted[0].isidentifier():
        lines.append(f"`modelrunner new-plugin NAME --kind model-state --architecture {question.wanted[0]}` writes one to start from.")
    return "\n".join(lines)


def near_names(wanted: Iterable[str], known: Iterable[str], n: int = 3) -> list[str]:
    """Those of `known` that resemble a name of `wanted`, whatever the case of either: up to `n` for each, the nearest first.

    The ending that all architectures share makes none of them alike.
    """
    spelt: dict[str, list[str]] = {}
    for name in sorted(set(known)):
        spelt.setdefault(_stem(name), []).append(name)
    near = [name for want in wanted for match in get_close_matches(_stem(want), spelt, n=n, cutoff=RESEMBLES) for name in spelt[match]]
    return list(dict.fromkeys(near))


def _stem(name: str) -> str:
    return name.casefold().removesuffix(SUFFIX)


def _near_line(question: Question) -> list[str]:
    """A line with the names in declines' `accepts` that resemble what is wanted; none when nothing does, or what is wanted is there."""
    known = {name for asked in question.answers for a in asked.answers if isinstance(a, Decline) for name in a.accepts}
    near = [name for name in near_names(question.wanted, known) if name not in question.wanted]
    return [f"Near names: {', '.join(near)}."] if near else []


def near_miss(question: Question, offer: Offer[Any]) -> str:
    """One line when the fallback `offer` wins, unpinned, while a plugin that declined accepts a name spelt nearly as what is wanted.

    Empty otherwise. Stricter than `near_names`: another version (`Orchid2ForCausalLM`) is no misspelling.
    """
    if offer.fit != "fallback" or question.pin is not None:
        return ""
    declines = [(asked.plugin, name) for asked in question.answers for a in asked.answers if isinstance(a, Decline) for name in a.accepts]
    for wanted in question.wanted:
        for plugin, name in declines:
            if name not in question.wanted and _look_alike(wanted, name):
                return (
                    f"the fallback {offer.name!r} runs {question.subject}, because {plugin} declined; it accepts {name!r}, which is nearly "
                    f"{wanted!r}: names must be equal, upper and lower case too"
                )
    return ""


def passed_over(choice: Choice[Any]) -> list[str]:
    """For errors of a fallback: why plugins declined that may know what it was taken for, since they name nothing else that they accept."""
    if choice.offer.fit != "fallback":
        return []
    declines = [(asked.plugin, answer) for asked in choice.answers for answer in asked.answers if isinstance(answer, Decline)]
    return [f"{plugin} declined: {answer.reason}" for plugin, answer in declines if not answer.accepts]


def _look_alike(one: str, other: str) -> bool:
    """Whether one architecture may be a misspelling of the other."""
    if re.findall(r"\d+", one) != re.findall(r"\d+", other):
        return False
    first, second = one.casefold(), other.casefold()
    if first.endswith(SUFFIX) != second.endswith(SUFFIX):
        return False  # a model_type is no misspelt architecture
    return SequenceMatcher(None, _stem(one), _stem(other)).ratio() >= LOOKS_ALIKE


def heard(question: Question, skip: Sequence[PluginFailure] = ()) -> list[str]:
    """What every plugin said, one line each. Those that were not asked are counted, not listed: they would bury the rest."""
    lines = []
    for asked in question.answers:
        lines += [f"  {asked.plugin} declined: {_reason(answer)}" for answer in asked.answers if isinstance(answer, Decline)]
    silent = [asked.plugin for asked in question.answers if not asked.answers and asked.failure is None]
    if silent:
        lines.append(f"  not their business: {', '.join(silent)}")
    lines += [f"  {failure}" for failure in question.broken if failure not in skip]
    lines += [f"  {name} is disabled: {reason}" for name, reason in question.unused.items()]
    return lines


def _where_all_are(question: Question) -> str:
    return f"`modelrunner plugins` lists the {question.num_loaded} that are loaded, {len(question.answers)} of them with this hook"


def _reason(answer: Decline) -> str:
    return answer.reason + (f" (accepts {', '.join(answer.accepts)})" if answer.accepts else "")


def describe_subject(hook: str, arguments: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """What is asked for in words, and the names in it that a user may have misspelt."""
    card, group, path = arguments.get("card"), arguments.get("group"), arguments.get("path")
    if hook in ("model_state", "model_config") and card is not None:
        names = tuple(getattr(card, "architectures", ()))
        model_type = getattr(card, "model_type", "")
        return f"architectures {list(names)} (model_type {model_type!r}) of {_model(card)}", (*names, model_type)
    if group is not None:
        device = getattr(arguments.get("device"), "name", "?")
        return f"cache group {getattr(group, 'name', group)!r} ({type(group).__name__}) on device {device!r}", ()
    if card is not None:
        return f"{_model(card)} ({getattr(card, 'format', '?')})", ()
    if path is not None:
        return f"checkpoint {str(path)!r}", ()
    if "name" in arguments:
        return f"model name {arguments['name']!r}" if arguments["name"] else "the default model", (str(arguments["name"]),)
    return "this engine", ()


def _model(card: Any) -> str:
    """The model as it was named; without a name, the file that stood in."""
    name = getattr(card, "name", "")
    return f"model {name!r}" if name else f"the default model ({getattr(getattr(card, 'path', None), 'name', '?')})"

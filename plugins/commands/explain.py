"""`modelrunner explain MODEL`: who was asked for each component, what each answered and why, and which answer wins.

Asks in the order of an engine start, with the same settings, and loads no more than the next question needs: the model's files and card,
and the device. No weight is read.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from modelrunner.cli import Command
from modelrunner.errors import ModelRunnerError, SettingsError
from modelrunner.offers import Decline
from modelrunner.plugin_choice import Asked, Choice, choose, near_miss, pin_of
from modelrunner.plugin_manager import PluginManager

if TYPE_CHECKING:
    from modelrunner.checkpoint import ModelCard
    from modelrunner.model_state import ModelState, Needs
    from modelrunner.settings import RunnerSettings


def command() -> Command:
    about = "show which plugin supplies each component for a model, who else was asked, and what they answered"
    return Command("explain", about, add_arguments, run, takes_settings=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", default="", help="hub id, folder or file; none for the built-in demo model")


def run(args: argparse.Namespace, manager: PluginManager) -> int:
    """0 when every question has a winner, 1 when an engine could not start."""
    from modelrunner.settings import load_settings, merge_sections

    given = {**args.settings, "model.name": args.model} if args.model else args.settings
    settings = load_settings(given, sections=merge_sections(manager.collect("settings_sections")))
    for failure in manager.failures:
        print(f"not asked: {failure}\n")
    for notice in manager.notices:
        print(f"warning: {notice}\n")
    report = Report(manager, settings)
    try:
        for line in report.lines():
            print(line)
    except ModelRunnerError as error:
        print(f"  stops here: {error}")
        return 1
    return 1 if report.unanswered else 0


@dataclass
class Report:
    """Puts the questions of an engine start, one after the other. unanswered: hooks for which no offer wins."""

    manager: PluginManager
    settings: RunnerSettings
    unanswered: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """The report, line by line. Raises ModelRunnerError where the next question cannot be put."""
        settings = self.settings
        source, text = self.ask("model_source", name=settings.model.name, settings=settings)
        yield from text
        if source is None:
            return
        path = source.load()
        yield f"  -> {path}"
        reader, text = self.ask("checkpoint_readers", setting="model.load_format", path=path)
        yield from text
        if reader is None:
            return
        from modelrunner.choosing import blaming

        with blaming(f"checkpoint reader {reader.offer.name} ({reader.plugin})"):
            card: ModelCard = reader.load()(path, settings.model.name).card()
        yield f"  -> {card.format}, architectures {', '.join(card.architectures) or 'none'}, model_type {card.model_type!r}"
        config, text = self.ask("model_config", card=card)
        yield from text
        if config is not None:
            yield from self.about_model(replace(card, config=config.load()))

    def about_model(self, card: ModelCard) -> Iterator[str]:
        """The questions that need the card, then those that need the device."""
        from modelrunner.assemble import declared
        from modelrunner.choosing import blaming

        settings = self.settings
        if not settings.model.skip_tokenizer_init:
            yield from self.ask("tokenizer", card=card, settings=settings)[1]
        state, text = self.ask("model_state", card=card, settings=settings)
        yield from text
        chosen, text = self.ask("device", setting="device.name", settings=settings)
        yield from text
        if chosen is None:
            return
        with blaming(f"device {chosen.offer.name} ({chosen.plugin})"):
            device = chosen.load()(settings)
        linear = self.ask("linear_scheme", setting="linear.scheme", card=card, device=device, settings=settings)[1]
        if state is None:
            yield from linear
            return
        try:
            with blaming(f"model_state {state.offer.name} ({state.plugin})"):
                made = state.load()(card, settings)
                needs = declared(made, card, settings)
        except ModelRunnerError as error:
            yield from linear
            self.unanswered.append("attention_backend")
            yield f"attention_backend is not asked for: {error}"
            return
        yield from self.about_drafter(card, made, needs)
        yield from linear
        for group in needs.cache_groups:
            yield from self.ask("attention_backend", group=group, device=device, settings=settings)[1]
        yield from self.optional("grammar_backend", settings=settings)

    def about_drafter(self, card: ModelCard, state: ModelState, needs: Needs) -> Iterator[str]:
        """The question that is put if the settings name a drafter. Its cache groups are not asked about.

        Without one, settings that an engine start would refuse beside none are told.
        """
        from modelrunner.choosing import Chooser
        from modelrunner.drafter_setup import open_draft, refuse_unused, target_model

        if self.settings.speculation.drafter is None:
            try:
                refuse_unused(self.settings)
            except SettingsError as error:
                self.unanswered.append("drafter")
                yield f"drafter is not asked for: {error}"
            return
        choose = Chooser(self.manager, self.settings)
        longest = min(self.settings.model.max_model_len or needs.max_model_len, needs.max_model_len)
        own, _, draft_card = open_draft(choose)
        target = target_model(own, card, state, needs, longest)
        asked = {"card": draft_card, "target": target, "settings": self.settings}
        yield from self.ask("drafter", setting="speculation.drafter", **asked)[1]

    def optional(self, hook: str, **arguments: Any) -> list[str]:
        """Lines about a question that needs no winner, unless one is pinned."""
        choice, lines = self.ask(hook, **arguments)
        if choice is None and self.settings.pin.of(hook) is None:
            self.unanswered.remove(hook)
        return lines

    def ask(self, hook: str, *, setting: str = "", **arguments: Any) -> tuple[Choice[Any] | None, list[str]]:
        """The winner, if any, and lines about the question. setting: one that may name an offer too, as in `assemble.Chooser`."""
        pin, pinned_by = pin_of(self.settings, hook, setting)
        answers = self.manager.ask(hook, **arguments)
        question = self.manager.question(hook, pin, answers, arguments, pinned_by)
        lines = [f"{hook} for {question.subject}" + (f", pinned to {pin!r}" if pin else "")]
        try:
            self.manager.refuse([asked.failure for asked in answers if asked.failure is not None])
            choice: Choice[Any] | None = choose(question)
        except ModelRunnerError as error:
            self.unanswered.append(hook)
            said = str(error).splitlines()  # the answers in it are listed above
            gist = [line.strip() for line in said if not line.startswith("  ") or line.startswith("  plugin ")]
            choice, outcome = None, f"  no winner: {' '.join(gist)}"
        else:
            assert choice is not None
            notice = near_miss(question, choice.offer)
            outcome = f"  winner: {choice.offer.name} of {choice.plugin}" + (f"\n  notice: {notice}" if notice else "")
        return choice, [*lines, *(line for asked in answers for line in _said(asked)), outcome]


def _said(asked: Asked) -> Iterator[str]:
    if asked.failure is not None:
        yield f"  {asked.plugin} failed: {asked.failure.reason}"
    elif not asked.answers:
        yield f"  {asked.plugin} gave no answer"
    for answer in asked.answers:
        if isinstance(answer, Decline):
            accepts = f" (accepts {', '.join(answer.accepts)})" if answer.accepts else ""
            yield f"  {asked.plugin} declined: {answer.reason}{accepts}"
        else:
            beats = f", replaces {', '.join(sorted(answer.replaces))}" if answer.replaces else ""
            yield f"  {asked.plugin} offers {answer.name} ({answer.fit}{beats})" + (f": {answer.reason}" if answer.reason else "")

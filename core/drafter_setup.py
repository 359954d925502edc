"""The drafter at start-up: chosen and declared before weights are read, built and filled right after the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from modelrunner.checkpoint import CheckpointReader, ModelCard
from modelrunner.choosing import Chooser, blaming, build_context, expect, open_checkpoint
from modelrunner.device import Device
from modelrunner.draft_policy import DraftPolicy
from modelrunner.errors import ModelRunnerError, PluginError, SettingsError, SettingsWarning, warn_caller
from modelrunner.model_state import CacheGroup, FullAttention, ModelState, Needs, No, Yes, answer_of, required_features
from modelrunner.ops import Ops
from modelrunner.request_table import Column
from modelrunner.settings import RunnerSettings
from modelrunner.speculation import DraftBuild, Drafter, DrafterNeeds, TargetModel
from modelrunner.tap_set import refuse_twice
from modelrunner.text import Tokenizer
from modelrunner.weights import WeightMap, load_weights

# Settings of `speculation` that mean something only where another one has this value.
NEEDED: dict[str, tuple[str, object]] = {
    "spare_tokens": ("adaptive", True),
    "typical_threshold": ("acceptance", "typical"),
    "typical_factor": ("acceptance", "typical"),
}
COLUMNS = (Column("num_drafts", torch.int32),)  # drafts that lie behind the known tokens of a row


@dataclass(frozen=True)
class DrafterSetup:
    """A drafter that has declared its needs. reader, card: of the checkpoint that `speculation.model` names, None if it names none."""

    choose: Chooser
    name: str
    drafter: Drafter
    needs: DrafterNeeds
    reader: CheckpointReader | None
    card: ModelCard | None

    def policy(self, tables: Sequence[str]) -> DraftPolicy:
        """How many drafts steps have. tables: the groups in whose pages the drafter writes."""
        settings = self.choose.settings
        speculation, depth = settings.speculation, settings.scheduler.pipeline_depth
        spare = speculation.spare_tokens if speculation.adaptive else None
        most, off_above = speculation.num_tokens, speculation.off_above_rows
        return DraftPolicy(most, depth=depth, off_above_rows=off_above, spare_tokens=spare, groups=tables)

    @property
    def columns(self) -> tuple[Column, ...]:
        return (*COLUMNS, *self.needs.columns)

    def join(self, needs: Needs) -> Needs:
        """The target's needs and the drafter's as one: groups, and buffers."""
        own = [("the model state", f"cache group {group.name!r}") for group in needs.cache_groups]
        own += [("the model state", f"buffer {buffer.name!r}") for buffer in needs.buffers]
        mine = [(self.name, f"cache group {group.name!r}") for group in self.needs.cache_groups]
        mine += [(self.name, f"buffer {buffer.name!r}") for buffer in self.needs.buffers]
        refuse_twice(own + mine)
        groups, buffers = (*needs.cache_groups, *self.needs.cache_groups), (*needs.buffers, *self.needs.buffers)
        return replace(needs, cache_groups=groups, buffers=buffers)

    @property
    def shared_map(self) -> WeightMap | None:
        """Where the drafter's tensors go, if they lie in the target's checkpoint."""
        return None if self.reader is not None else self.drafter.weight_map()

    def riders(self, needs: Needs) -> dict[str, list[CacheGroup]]:
        """Which of the drafter's groups lie in the pages of which other: those that see the same tokens as the first of the target's
        that attends. needs: of both.

        A drafter keeps little of a token. In pages of its own, which have as many bytes as the target's, hundreds of tokens would lie in
        one, and only prefixes of as many could be found again.
        """
        own = {group.name for group in self.needs.cache_groups}
        attending = [group for group in needs.cache_groups if isinstance(group, FullAttention)]
        hosts = {group.window: group.name for group in reversed(attending) if group.name not in own}
        found: dict[str, list[CacheGroup]] = {}
        for group in attending:
            if group.name in own and group.window in hosts:
                found.setdefault(hosts[group.window], []).append(group)
        return found

    def build(
        self, target: ModelState, reader: CheckpointReader, card: ModelCard, tokenizer: Tokenizer | None, dtype: torch.dtype,
        device: Device, ops: Ops,
    ) -> None:  # fmt: skip
        """Build the drafter's module and fill it. reader, card: of the target, whose weights are loaded."""
        reader, card = self.reader or reader, self.card or card
        with blaming(f"drafter {self.name}"):
            context = build_context(self.choose, card, dtype, device, ops)
            drafter = self.drafter
            drafter.module = drafter.build(DraftBuild(context, target, reader, tokenizer, self._own_tokenizer))
            weights = drafter.weight_map()
            if weights is None:
                return
            module = expect(nn.Module, drafter.module, drafter, "build").eval()
            try:
                load_weights(module, expect(WeightMap, weights, drafter, "weight_map"), reader, seed=self.choose.settings.model.seed)
            except ModelRunnerError as error:
                error.add_note(f"raised while loading the weights of drafter {self.name}")
                raise

    def _own_tokenizer(self) -> Tokenizer | None:
        """The tokenizer that lies with the drafter's weights."""
        if self.card is None:
            return None
        try:
            found: Tokenizer = self.choose("tokenizer", card=self.card, settings=self.choose.settings)
        except ModelRunnerError:  # a head has none of its own
            return None
        return found


def of_drafter(settings: RunnerSettings) -> RunnerSettings:
    """The settings with the drafter's model in place of the target's."""
    model = settings.model.model_copy(update={"name": settings.speculation.model, "tokenizer": None, "revision": None})
    return settings.model_copy(update={"model": model})


def open_draft(choose: Chooser) -> tuple[Chooser, CheckpointReader | None, ModelCard | None]:
    """What chooses for the drafter's checkpoint, and that checkpoint, if `speculation.model` names one."""
    own, name = Chooser(choose.manager, of_drafter(choose.settings)), choose.settings.speculation.model
    if not name:
        return own, None, None
    try:
        return own, *open_checkpoint(own)
    except ModelRunnerError as error:
        error.add_note(f"asked for by speculation.model = {name!r}")
        raise


def target_model(own: Chooser, card: ModelCard, state: ModelState, needs: Needs, max_model_len: int) -> TargetModel:
    """What a drafter is told of its target. own: chooses for the drafter's checkpoint."""

    def state_for(card: ModelCard) -> type[ModelState]:
        found: type[ModelState] = own("model_state", card=card, settings=own.settings)
        return found

    points = needs.tap_points if isinstance(answer_of(state, "taps"), Yes) else ()
    return TargetModel(card, needs.hidden_size, needs.vocab_size, max_model_len, points, state_for)


def set_up_drafter(choose: Chooser, card: ModelCard, state: ModelState, needs: Needs, max_model_len: int) -> DrafterSetup | None:
    """Choose the drafter that the settings ask for, and let it declare. None if they ask for none. card, state, needs: of the target.

    Raises SettingsError and PluginError for what does not go together, before any weight is read.
    """
    settings = choose.settings
    if settings.speculation.drafter is None:
        refuse_unused(settings)
        return None
    own, reader, draft_card = open_draft(choose)
    target = target_model(own, card, state, needs, max_model_len)
    asked = {"card": draft_card, "target": target, "settings": settings}
    kind: type[Drafter] = choose("drafter", setting="speculation.drafter", **asked)
    name = choose.chosen["drafter"]
    with blaming(f"drafter {name}"):
        drafter = kind(draft_card, target, settings)
        declared = expect(DrafterNeeds, drafter.declare(), drafter, "declare")
    check(settings, name, drafter, declared, target.tap_points)
    return DrafterSetup(own, name, drafter, declared, reader, draft_card)


def refuse_unused(settings: RunnerSettings) -> None:
    """Refuse settings that say what drafts, where nothing does: a user who gave them expects drafts."""
    for name, value in (("speculation.model", settings.speculation.model), ("pin.drafter", settings.pin.drafter)):
        if value:
            raise SettingsError(
                f"{name} is {value!r}, but speculation.drafter is none, so nothing drafts; accepted beside it: the name of a drafter in "
                f"speculation.drafter, or leave {name} out"
            )


def warn_of_unused(settings: RunnerSettings) -> None:
    """Tell of settings that say how much is drafted, where nothing drafts; not of a model, which is refused, and not where
    `speculation.drafter` was given as none: then drafting is turned off on purpose. And where something drafts, of those that another one
    would have to be set for."""
    given = settings.speculation.model_fields_set
    names = [f"speculation.{name}" for name in type(settings.speculation).model_fields if name in given - {"model"}]
    if names and "drafter" not in given:
        warn_caller(
            f"{', '.join(names)}: no effect, since speculation.drafter is none and nothing drafts; accepted beside it: the name of a "
            "drafter in speculation.drafter (ngram needs no weights), or none there, which says that it is meant so",
            SettingsWarning,
        )
    for name, (other, value) in NEEDED.items():
        if name in given and settings.speculation.drafter is not None and getattr(settings.speculation, other) != value:
            warn_caller(
                f"speculation.{name}: no effect, since speculation.{other} is {getattr(settings.speculation, other)}; accepted beside it: "
                f"{value} there",
                SettingsWarning,
            )


def check(settings: RunnerSettings, name: str, drafter: Drafter, needs: DrafterNeeds, points: tuple[str, ...]) -> None:
    """Refuse what the drafter asks for and cannot have, and what the settings ask of it and it cannot do."""
    most, budget = settings.speculation.num_tokens, settings.scheduler.max_batched_tokens
    if needs.max_tokens is not None and most > needs.max_tokens:
        raise SettingsError(f"speculation.num_tokens is {most}; accepted with the drafter {name}: at most {needs.max_tokens}")
    if 1 + most > budget:
        raise SettingsError(
            f"speculation.num_tokens is {most}, so that a row computes {1 + most} tokens in a step, but scheduler.max_batched_tokens is "
            f"{budget}; lower the one or raise the other"
        )
    if seated := [column.name for column in needs.columns if column.seats is not None]:
        raise PluginError(f"drafter {name} declares the seated columns {seated}; a drafter declares plain ones")
    if missing := [point for point in needs.tap_points if point not in points]:
        raise PluginError(f"drafter {name} wants hidden states at {missing}; the model has the tap points {list(points)}")
    refused = {feature: a.reason for feature in required_features(settings) if isinstance(a := answer_of(drafter, feature), No)}
    if refused:
        listing = "; ".join(f"{feature}: {reason}" for feature, reason in refused.items())
        raise PluginError(f"drafter {name} cannot do what the settings turn on: {listing}. Turn it off, or take another drafter")

"""Asking plugins for components at start-up: the chooser, and what stands around a component's first use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

from modelrunner.attention import AttentionBackend
from modelrunner.checkpoint import CheckpointReader, ModelCard
from modelrunner.device import Device
from modelrunner.errors import CapacityError, ModelRunnerError, PluginError, SettingsError
from modelrunner.linear import LinearFactory
from modelrunner.model_state import BuildContext
from modelrunner.ops import Ops
from modelrunner.plugin_choice import Choice, nothing_fits, passed_over, pin_of
from modelrunner.plugin_manager import PluginManager
from modelrunner.settings import RunnerSettings

T = TypeVar("T")


class Chooser:
    """Asks hooks for offers, with the settings' pins, and notes what was chosen, and what was not in favour of a fallback."""

    def __init__(self, manager: PluginManager, settings: RunnerSettings) -> None:
        self.manager = manager
        self.settings = settings
        self.chosen: dict[str, str] = {}
        self.passed_over: dict[str, list[str]] = {}

    def __call__(self, hook: str, *, setting: str = "", **arguments: Any) -> Any:
        """Load the best offer of `hook`. setting: one that may name an offer too, e.g. `device.name`; `pin.<hook>` comes first."""
        pin, pinned_by = pin_of(self.settings, hook, setting)
        choice = self.manager.choose(hook, pin=pin, pinned_by=pinned_by, **arguments)
        self.chosen[hook] = f"{choice.offer.name} ({choice.plugin})"
        self.passed_over[hook] = passed_over(choice)
        return choice.load()

    def later(self, hook: str, **arguments: Any) -> Choice[Any] | str:
        """The best offer of `hook`, to be loaded when it is needed; if there is none, why. Raises PluginError as `__call__` for others."""
        pin, pinned_by = pin_of(self.settings, hook)
        answers = self.manager.ask(hook, **arguments)
        question = self.manager.question(hook, pin, answers, arguments, pinned_by)
        if pin is None and not question.offers:
            return nothing_fits(question)
        choice = self.manager.choose(hook, pin=pin, pinned_by=pinned_by, **arguments)
        self.chosen[hook] = f"{choice.offer.name} ({choice.plugin})"
        return choice


def open_checkpoint(choose: Chooser) -> tuple[CheckpointReader, ModelCard]:
    """Find the model's files, read its card, and settle its configuration."""
    model = choose.settings.model
    path = choose("model_source", name=model.name, settings=choose.settings)
    reader: CheckpointReader = choose("checkpoint_readers", setting="model.load_format", path=path)(path, model.name)
    card = reader.card()
    config = choose("model_config", card=card)
    return reader, card.with_config(config)


def expect(kind: type[T], value: object, owner: object, method: str) -> T:
    """`value` if it is what the method must return. Raises TypeError that names the method."""
    if not isinstance(value, kind):
        raise TypeError(f"{type(owner).__name__}.{method} returned {value!r} ({type(value).__name__}); a {kind.__qualname__} is needed")
    return value


@contextmanager
def blaming(component: str, notes: Iterable[str] = ()) -> Iterator[None]:
    """Name the component in whatever it raises that is not already one of our errors. notes: what else an error may come from."""
    try:
        with _as_ours(component):
            yield
    except ModelRunnerError as error:
        for note in notes:
            error.add_note(note)
        raise


@contextmanager
def _as_ours(component: str) -> Iterator[None]:
    try:
        yield
    except ModelRunnerError:
        raise
    except torch.OutOfMemoryError as error:
        first = str(error).splitlines()[0]
        raise CapacityError(
            f"{component} does not fit into the device's memory: take a model, a model.dtype or a linear.scheme with smaller weights, a "
            f"smaller scheduler.max_rows, or free what other programs hold ({first})"
        ) from error
    except Exception as error:
        raise PluginError(f"{component} failed at start-up: {type(error).__name__}: {error}") from error


class MayBeDeterministic(Protocol):
    """A component that says whether a row's results can be made to depend on no other row."""

    deterministic: bool


def require_deterministic(
    settings: RunnerSettings, component: MayBeDeterministic | type[AttentionBackend], what: str, setting: str
) -> None:
    """Raise SettingsError if the mode is on and the component cannot be so. setting: by which another is taken."""
    if settings.device.deterministic and not component.deterministic:
        raise SettingsError(
            f"device.deterministic is set, but with {what} a request's results depend on what runs beside it; take another ({setting}), "
            "or leave the mode off. Those that can: device cuda, attention backend paged, linear schemes plain and int8"
        )


def build_context(choose: Chooser, card: ModelCard, dtype: torch.dtype, device: Device, ops: Ops) -> BuildContext:
    """What a model, or a drafter, is built from."""
    settings = choose.settings
    scheme_type = choose("linear_scheme", setting="linear.scheme", card=card, device=device, settings=settings)
    require_deterministic(settings, scheme_type, f"linear scheme {scheme_type.name}", "linear.scheme")
    linear = LinearFactory(scheme_type(ops, dtype, device.torch_device))
    place = device.torch_device
    return BuildContext(settings=settings, card=card, ops=ops, linear=linear, dtype=dtype, device=place, give_way=device.give_way)

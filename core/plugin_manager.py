"""The plugins of one engine: which are loaded, what each answers, which offer is taken.

`PluginManager.load()` makes a new manager per engine over discovery and imports that are cached per process. Every plugin is asked on
its own, in a fixed order, so that one broken plugin cannot silence another. Nothing here imports torch.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import pluggy

from modelrunner import plugin_choice, plugin_loader
from modelrunner.errors import PluginError, PluginWarning
from modelrunner.hookspecs import PROJECT, HookSpecs
from modelrunner.plugin_choice import Asked, Choice, Question
from modelrunner.plugin_contract import HOOKS, answer_problem, flatten, hook_arguments, hook_problems, implemented
from modelrunner.plugin_records import ARGUMENT, Candidate, PluginFailure, PluginInfo, describe_error

__all__ = ["Asked", "Choice", "PluginFailure", "PluginInfo", "PluginManager", "Shared"]

_warned: set[str] = set()


@runtime_checkable
class Shared(Protocol):
    """Something that plugins write to one after the other, such as the registry of operations."""

    def for_plugin(self, plugin: str) -> Any:
        """A view whose entries belong to `plugin`."""

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that puts back what is there now."""


class PluginManager:
    """Loaded plugins and the questions put to them."""

    def __init__(self, *, trace: bool = False, strict: bool = False) -> None:
        self._pluggy = pluggy.PluginManager(PROJECT)
        self._pluggy.add_hookspecs(HookSpecs)
        self._plugins: dict[str, tuple[Candidate, object, str]] = {}
        self._unused: dict[str, tuple[Candidate, str]] = {}
        self._failures: list[PluginFailure] = []
        self._asking_failures: list[PluginFailure] = []
        self._notices: list[str] = []
        self._chosen: set[str] = set()
        self._trace = trace
        self._strict = strict

    @classmethod
    def load(
        cls, plugins: Iterable[object] = (), environ: Mapping[str, str] = os.environ, *, discover: bool = True, strict: bool | None = None
    ) -> PluginManager:
        """A manager of the installed plugins (unless `discover` is false), then those in `plugins`: objects, or names of modules to
        import (a single name may stand alone).

        A broken installed plugin is kept in `failures`; a broken one in `plugins` was asked for by name and raises PluginError. `strict`
        makes every failure raise; None takes MODELRUNNER_STRICT_PLUGINS.
        """
        strict = plugin_loader.read_flag(environ, plugin_loader.STRICT) if strict is None else strict
        manager = cls(trace=plugin_loader.read_flag(environ, plugin_loader.TRACE), strict=strict)
        if discover:
            manager._load_installed(environ)
        for plugin in [plugins] if isinstance(plugins, str) else plugins:
            manager.register(plugin)
        manager._raise_if_strict([*map(str, manager._failures), *manager._notices])
        return manager

    # Registering

    def _load_installed(self, environ: Mapping[str, str]) -> None:
        found = plugin_loader.discover()
        filters = plugin_loader.read_filters(environ)
        self._failures += found.problems
        self._notices += plugin_loader.unknown_names(filters, found.candidates)
        for candidate in found.candidates:
            if candidate.shadowed_by:
                self._unused[f"{candidate.name} {candidate.version}"] = (candidate, f"{candidate.shadowed_by} is used instead")
            elif reason := filters.reason(candidate):
                self._unused[candidate.name] = (candidate, reason)
            else:
                self._add_candidate(candidate)
        stale = sorted({f"{c.distribution} {c.version} in {c.location}: {why}" for c, why in self._unused.values() if c.shadowed_by})
        self._notices += [f"stale metadata of plugin distribution {line}. Remove the older folder" for line in stale]

    def _add_candidate(self, candidate: Candidate) -> None:
        plugin = plugin_loader.import_candidate(candidate)
        failure = plugin if isinstance(plugin, PluginFailure) else self._add(candidate, plugin)
        if failure is not None:
            self._failures.append(failure)

    def register(self, plugin: object) -> str:
        """Add a plugin that is not installed: an object, a module, or the name of a module to import. Returns its name.

        A plugin that is registered already is left as it is. A module must declare MODELRUNNER_API; an object may. Raises PluginError.
        """
        target = plugin if isinstance(plugin, str) else (plugin.__name__ if inspect.ismodule(plugin) else type(plugin).__module__)
        label = target if isinstance(plugin, str) or inspect.ismodule(plugin) else type(plugin).__qualname__
        candidate = Candidate(ARGUMENT, "-", label, target, "", by_name=isinstance(plugin, str))
        if isinstance(plugin, str):
            try:
                plugin = import_module(plugin)
            except (Exception, SystemExit) as error:
                raise PluginError(f"plugin module {target!r}, asked for by name, could not be imported: {describe_error(error)}") from error
        for name, (_, known, _) in self._plugins.items():
            if known is plugin:
                return name
        if isinstance(plugin, type):
            raise PluginError(f"plugin {plugin.__qualname__} is a class; pass an instance of it or a module")
        count = 1
        while candidate.name in self._plugins:
            count += 1
            candidate = replace(candidate, entry_point=f"{label}#{count}")
        failure = self._add(candidate, plugin, api_required=inspect.ismodule(plugin))
        if failure is not None:
            raise PluginError(str(failure)) from failure.error
        return candidate.name

    def _add(self, candidate: Candidate, plugin: object, *, api_required: bool = True) -> PluginFailure | None:
        """Check and register one imported plugin; on any failure nothing of it stays registered."""
        if any(known is plugin for _, known, _ in self._plugins.values()):
            self._unused[candidate.name] = (candidate, "the same object is already registered under another name")
            return None
        try:
            problems = hook_problems(self._pluggy, plugin)
            api, refusal = plugin_loader.check_api(plugin, candidate.module, required=api_required)
            if refusal:
                return PluginFailure(candidate, "version", refusal)
            if problems:
                return PluginFailure(candidate, "registration", "\n  ".join(problems))
            self._pluggy.register(plugin, candidate.name)
            self._pluggy.check_pending()
        except Exception as error:
            if self._pluggy.has_plugin(candidate.name):
                self._pluggy.unregister(name=candidate.name)
            return PluginFailure(candidate, "registration", describe_error(error), error)
        self._plugins[candidate.name] = (candidate, plugin, api)
        return None

    # Asking

    def ask(self, hook: str, **arguments: Any) -> tuple[Asked, ...]:
        """Ask every plugin that implements `hook`, in loading order, each in its own try. Failures are part of the answers."""
        asked = []
        for candidate, function in self._implementations(hook):
            try:
                raw = self._invoke(hook, candidate, function, arguments)
            except (Exception, SystemExit) as error:
                asked.append(Asked(candidate, failure=PluginFailure(candidate, hook, describe_error(error), error)))
                continue
            problem = answer_problem(hook, raw)
            failure = PluginFailure(candidate, hook, problem) if problem else None
            asked.append(Asked(candidate, () if problem else flatten(raw), failure))
        self._keep(a.failure for a in asked if a.failure is not None)
        return tuple(asked)

    def choose(self, hook: str, *, pin: str | None = None, pinned_by: str = "", **arguments: Any) -> Choice[Any]:
        """The best offer for `hook`, or the one that `pin` names (an offer's name, or a plugin's). pinned_by: the setting it comes from.

        Warns of plugins that failed, and of a fallback that won although a plugin accepts a nearly equal name; once per process. Raises
        PluginError when nothing fits, offers tie, only a fallback is left while a plugin is broken, or a plugin passed by name failed.
        """
        answers = self.ask(hook, **arguments)
        question = self.question(hook, pin, answers, arguments, pinned_by)
        choice = plugin_choice.choose(question)
        self.refuse([a.failure for a in answers if a.failure is not None])
        self.warn_failures()
        if notice := plugin_choice.near_miss(question, choice.offer):
            warn_once(notice)
        self._chosen.add(choice.plugin)
        return choice

    def question(
        self, hook: str, pin: str | None, answers: tuple[Asked, ...], arguments: Mapping[str, Any], pinned_by: str = ""
    ) -> Question:
        """The question put to `plugin_choice.choose`, with all that its error messages need."""
        subject, wanted = plugin_choice.describe_subject(hook, arguments)
        unused = {name: reason for name, (candidate, reason) in self._unused.items() if not candidate.shadowed_by}
        return Question(hook, subject, pin, answers, tuple(self._failures), unused, len(self._plugins), wanted, pinned_by)

    def collect(self, hook: str, **arguments: Any) -> list[tuple[str, Any]]:
        """(plugin name, answer) of every plugin that answers `hook` with something. A failing plugin is left out and kept in `failures`.

        Raises PluginError when that was passed by name.
        """
        collected: list[tuple[str, Any]] = []
        failed: list[PluginFailure] = []
        for candidate, function in self._implementations(hook):
            try:
                answer = self._invoke(hook, candidate, function, arguments)
                problem = answer_problem(hook, answer)
                if problem:
                    failed.append(PluginFailure(candidate, hook, problem))
                elif answer is not None:
                    collected.append((candidate.name, answer))
            except (Exception, SystemExit) as error:
                failed.append(PluginFailure(candidate, hook, describe_error(error), error))
        self._keep(failed)
        self.refuse(failed)
        return collected

    def call(self, hook: str, **arguments: Any) -> None:
        """Call `hook` in every plugin for its effect on `arguments`.

        An argument that is `Shared` is handed over as each plugin's own view of it, and what a failing plugin has half done to it is
        undone; that plugin is then left out with a warning, unless it is built in, passed by name, or one of its offers was chosen.
        Otherwise a failure raises PluginError.
        """
        shared = {name: value for name, value in arguments.items() if isinstance(value, Shared)}
        for candidate, function in self._implementations(hook):
            undo = [value.snapshot() for value in shared.values()]
            own = {name: value.for_plugin(candidate.name) for name, value in shared.items()}
            error: BaseException | None = None
            try:
                problem = answer_problem(hook, self._invoke(hook, candidate, function, {**arguments, **own}))
            except (Exception, SystemExit) as raised:
                error, problem = raised, describe_error(raised)
            if not problem:
                continue
            failure = PluginFailure(candidate, hook, problem, error)
            self.refuse([failure])
            if not undo or candidate.built_in or candidate.name in self._chosen:
                raise PluginError(str(failure)) from error
            for restore in undo:
                restore()
            self._keep([failure])
        self.warn_failures()

    def _implementations(self, hook: str) -> list[tuple[Candidate, Callable[..., Any]]]:
        if hook not in HOOKS:
            raise ValueError(f"no hook {hook!r}; the hooks are {', '.join(HOOKS)}")
        by_plugin = {impl.plugin_name: impl.function for impl in getattr(self._pluggy.hook, hook).get_hookimpls()}
        return [(candidate, by_plugin[name]) for name, (candidate, _, _) in self._plugins.items() if name in by_plugin]

    def _invoke(self, hook: str, candidate: Candidate, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Call one implementation with the arguments it takes (pluggy would leave those that have a default at it)."""
        assert set(arguments) == set(hook_arguments(hook)), f"{hook} takes {hook_arguments(hook)}, got {sorted(arguments)}"
        taken = {name: arguments[name] for name in inspect.signature(function).parameters}
        answer = None
        try:
            answer = function(**taken)
            return answer
        except BaseException as error:
            answer = describe_error(error)
            raise
        finally:
            if self._trace:
                print(f"modelrunner: hook {hook}({', '.join(taken)}) of {candidate.name} -> {answer!r}", file=sys.stderr)

    # Reporting

    @property
    def failures(self) -> tuple[PluginFailure, ...]:
        """Plugins that failed to load, then those that failed to answer."""
        return (*self._failures, *self._asking_failures)

    @property
    def notices(self) -> tuple[str, ...]:
        """What is odd without being a failure: unknown names in the environment's lists, stale metadata."""
        return tuple(self._notices)

    def warn_failures(self) -> None:
        """Warn (PluginWarning) of every failure and notice, once per process each."""
        messages = [*self._notices, *(f"{failure}. Repair it, or {failure.remedy}" for failure in self.failures)]
        for message in messages:
            warn_once(message)

    def describe(self) -> list[PluginInfo]:
        """Every plugin found, in loading order, then those that are left out."""
        asking = {failure.plugin: failure.reason for failure in self._asking_failures}
        lines = [
            _info(c, "loaded", api=api, hooks=tuple(h for h in HOOKS if h in implemented(self._pluggy, plugin)), error=asking.get(name, ""))
            for name, (c, plugin, api) in self._plugins.items()
        ]
        lines += [_info(f.candidate, "failed", error=f"{f.stage}: {f.reason}") for f in self._failures]
        lines += [_info(c, "shadowed" if c.shadowed_by else "disabled", error=reason) for c, reason in self._unused.values()]
        return lines

    def _keep(self, failures: Iterable[PluginFailure]) -> None:
        known = {(f.plugin, f.stage, f.reason) for f in self._asking_failures}
        self._asking_failures += [f for f in failures if (f.plugin, f.stage, f.reason) not in known]

    def refuse(self, failures: list[PluginFailure]) -> None:
        """Raise PluginError for a plugin that was asked for by name, and in strict mode for every other."""
        for failure in failures:
            if failure.candidate.by_name:
                raise PluginError(f"{failure}. Repair it, or {failure.remedy}") from failure.error
        self._raise_if_strict(list(map(str, failures)))

    def _raise_if_strict(self, complaints: list[str]) -> None:
        if self._strict and complaints:
            raise PluginError("\n".join([f"{plugin_loader.STRICT} is set and not all plugins work:", *(f"  {c}" for c in complaints)]))


def _info(candidate: Candidate, state: Any, *, hooks: tuple[str, ...] = (), api: str = "", error: str = "") -> PluginInfo:
    return PluginInfo(
        candidate.name,
        candidate.distribution,
        candidate.version,
        candidate.entry_point,
        candidate.module,
        hooks,
        api,
        state,
        error,
        candidate.location,
    )


def warn_once(message: str) -> None:
    """Warn (PluginWarning) of `message`, once per process."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, PluginWarning, stacklevel=3)


def forget() -> None:
    """Forget what this process found, imported and warned of. For tests, and after installing a plugin from a running program."""
    plugin_loader.forget()
    _warned.clear()

"""Named operations: a reference for each, overrides by device type, and optional fusions.

The reference is the specification: plain torch, in `modelrunner.kernels.<area>.reference`. A plugin registers operations, overrides and
fusions through the `kernels` hook; at engine start `Registry.resolve` settles each name once, and layers call `ops.<name>(...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from modelrunner.errors import PluginError

Function = Callable[..., Any]


@dataclass(frozen=True)
class Tolerance:
    """How far an override may be from the reference, per dtype: {dtype: (relative, absolute)}; a dtype not named must match bit for bit."""

    by_dtype: Mapping[torch.dtype, tuple[float, float]] = field(default_factory=dict)


EXACT = Tolerance()
CLOSE = Tolerance({torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.6e-2, 1.6e-2)})


class Register(Protocol):
    """What the `kernels` hook is handed. A second owner of a name is refused, naming both."""

    def op(self, name: str, reference: Function, *, area: str, tolerance: Tolerance = EXACT) -> None:
        """Register a new operation. Its signature is that of `reference`."""

    def override(self, name: str, function: Function, *, device_type: str, supports: Callable[[], str | None] | None = None) -> None:
        """Replace `name` on a device type. `supports()` returns None, or the reason why the reference must run instead."""

    def fusion(
        self, name: str, of: tuple[str, ...], chain: Callable[..., Function], fused: Function | None = None, *, device_type: str = ""
    ) -> None:
        """Register a fused form of the operations `of`. `chain(ops)` returns the plain function built from them; `fused` runs only on
        `device_type`, and only while none of `of` is overridden by somebody else."""


class Ops:
    """Resolved operations, as attributes. `explain()` tells which implementation each name got, and why."""

    def __init__(self, functions: Mapping[str, Function], reasons: Mapping[str, str]) -> None:
        self.__dict__.update(functions)
        self._reasons = dict(reasons)

    def explain(self) -> dict[str, str]:
        return dict(self._reasons)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no operation {name!r}; registered are {sorted(self._reasons)}")


@dataclass(frozen=True)
class _Entry:
    """A registered operation or fusion. of, chain: set for a fusion."""

    name: str
    plugin: str
    area: str
    tolerance: Tolerance
    reference: Function | None = None
    of: tuple[str, ...] = ()
    chain: Callable[[Ops], Function] | None = None


@dataclass(frozen=True)
class _Override:
    """A replacement on one device type: of an operation, or of a fusion's plain chain."""

    name: str
    plugin: str
    function: Function
    device_type: str
    supports: Callable[[], str | None] | None = None


class Registry:
    """Collects operations and settles them for a device. It is a `Register` itself; `for_plugin(name)` is one that speaks for a plugin.

    Order of registration does not matter: overrides and fusions may come before what they name.
    """

    def __init__(self, plugin: str = "this process") -> None:
        self.plugin = plugin
        self._entries: dict[str, _Entry] = {}
        self._overrides: dict[tuple[str, str], _Override] = {}

    def for_plugin(self, plugin: str) -> Register:
        """A view of this registry whose registrations belong to `plugin`."""
        view = Registry(plugin)
        view._entries, view._overrides = self._entries, self._overrides
        return view

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that puts back what is registered now."""
        entries, overrides = dict(self._entries), dict(self._overrides)

        def restore() -> None:
            for mine, saved in ((self._entries, entries), (self._overrides, overrides)):
                mine.clear()
                mine.update(saved)  # type: ignore[arg-type]

        return restore

    def op(self, name: str, reference: Function, *, area: str, tolerance: Tolerance = EXACT) -> None:
        self._add(_Entry(name, self.plugin, area, tolerance, reference))

    def override(self, name: str, function: Function, *, device_type: str, supports: Callable[[], str | None] | None = None) -> None:
        self._add_override(_Override(name, self.plugin, function, device_type, supports))

    def fusion(
        self, name: str, of: tuple[str, ...], chain: Callable[..., Function], fused: Function | None = None, *, device_type: str = ""
    ) -> None:
        if (fused is None) != (device_type == ""):
            raise PluginError(
                f"plugin {self.plugin!r} registers fusion {name!r} with fused={fused!r} and device_type={device_type!r}; "
                "give both, or neither for the plain chain alone"
            )
        self._add(_Entry(name, self.plugin, "fusion", CLOSE, of=tuple(of), chain=chain))
        if fused is not None:
            self._add_override(_Override(name, self.plugin, fused, device_type))

    def _add(self, entry: _Entry) -> None:
        if not entry.name.isidentifier() or entry.name.startswith("_") or hasattr(Ops, entry.name):
            raise PluginError(
                f"plugin {self.plugin!r} registers operation {entry.name!r}; "
                "a name must be a Python identifier without leading underscore and none of the Ops class's own"
            )
        other = self._entries.get(entry.name)
        if other is not None:
            raise PluginError(
                f"plugin {self.plugin!r} registers operation {entry.name!r}, which plugin {other.plugin!r} has registered already; "
                "use another name, or register.override to replace it on a device type"
            )
        self._entries[entry.name] = entry

    def _add_override(self, override: _Override) -> None:
        other = self._overrides.get((override.name, override.device_type))
        if other is not None:
            raise PluginError(
                f"plugin {self.plugin!r} overrides operation {override.name!r} on {override.device_type!r}, "
                f"which plugin {other.plugin!r} overrides already; "
                f"disable one of them (MODELRUNNER_DISABLE_PLUGINS={self.plugin} or {other.plugin})"
            )
        self._overrides[override.name, override.device_type] = override

    def tolerances(self) -> dict[str, Tolerance]:
        """How far an override of each operation may be from its reference."""
        return {name: entry.tolerance for name, entry in self._entries.items()}

    def resolve(self, device_type: str) -> Ops:
        """Settle every name for a device type. Raises PluginError for an override or a fusion of something that nobody registered."""
        self._check_names()
        functions: dict[str, Function] = {}
        reasons: dict[str, str] = {}
        owners: dict[str, str] = {}  # of the active overrides
        refused: dict[str, str] = {}
        for name, entry in self._entries.items():
            if entry.chain is not None:
                continue
            assert entry.reference is not None
            override = self._overrides.get((name, device_type))
            problem = _problem(override)
            functions[name], reasons[name] = entry.reference, f"reference of {entry.plugin}"
            if override is not None and problem is None:
                functions[name], owners[name] = override.function, override.plugin
                reasons[name] = f"override of {override.plugin} for {device_type}"
            elif override is not None:
                refused[name] = f"{override.plugin}'s override does not support it: {problem}"
                reasons[name] += f" ({refused[name]})"
        plain = Ops(functions, reasons)
        for name, entry in self._entries.items():
            if entry.chain is not None:
                functions[name], reasons[name] = self._fusion(entry, device_type, plain, owners, refused)
        return Ops(functions, reasons)

    def _fusion(
        self, entry: _Entry, device_type: str, plain: Ops, owners: Mapping[str, str], refused: Mapping[str, str]
    ) -> tuple[Function, str]:
        """The fused function if nothing speaks against it, else the plain chain; and why."""
        assert entry.chain is not None
        fused = self._overrides.get((entry.name, device_type))
        against = "" if fused is not None else f"no fused form for {device_type}"
        if fused is not None:
            strange = [f"{name} is overridden by {owners[name]}" for name in entry.of if owners.get(name, fused.plugin) != fused.plugin]
            unsupported = [f"{name}: {refused[name]}" for name in entry.of if name in refused]
            problem = _problem(fused)
            own = [f"{fused.plugin} does not support it: {problem}"] if problem is not None else []
            against = "; ".join(strange + unsupported + own)
            if not against:
                return fused.function, f"fused by {fused.plugin} for {device_type}: {' + '.join(entry.of)}"
        return entry.chain(plain), f"plain chain of {' + '.join(entry.of)} ({against})"

    def _check_names(self) -> None:
        plain = [name for name, entry in self._entries.items() if entry.chain is None]
        problems = [
            f"plugin {o.plugin!r} overrides operation {o.name!r} on {o.device_type!r}, which is not registered"
            for o in self._overrides.values()
            if o.name not in self._entries
        ]
        problems += [
            f"plugin {entry.plugin!r} registers fusion {entry.name!r} of {name!r}, which is not a registered operation"
            for entry in self._entries.values()
            for name in entry.of
            if name not in plain
        ]
        if problems:
            raise PluginError("; ".join(problems) + f"; registered are {', '.join(sorted(self._entries))}")


def _problem(override: _Override | None) -> str | None:
    """Why an override cannot run; None if it can, or if there is none."""
    if override is None or override.supports is None:
        return None
    try:
        return override.supports()
    except Exception as error:
        raise PluginError(
            f"plugin {override.plugin!r} cannot tell whether its override of operation {override.name!r} runs on "
            f"{override.device_type!r}: {type(error).__name__}: {error}"
        ) from error

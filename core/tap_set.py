"""All taps of an engine: who asks for which, calling them inside a step, and the way of their results to the requests.

A tap owns one bit of `Plan.features`, set when some row of the step asks for it. Results are packed into one byte record per row, which
leaves through a ring like the step's own records do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from modelrunner.batch import Feature, Finish, Outcome, Record
from modelrunner.errors import ModelRunnerError, PluginError, RequestError
from modelrunner.model_state import StaticBuffer
from modelrunner.request_table import NUMPY_DTYPES, Column
from modelrunner.start_checks import fits, told
from modelrunner.taps import Result, Tap, digest

if TYPE_CHECKING:
    from modelrunner.batch import Batch
    from modelrunner.model_state import ModelState, Needs
    from modelrunner.request import Request
    from modelrunner.rows import HostRows
    from modelrunner.settings import RunnerSettings

FIRST_BIT = 8  # of Feature: the bits below belong to the sampler
MAX_TAPS = 22
STATE_OUTPUTS = "model_outputs"  # the key of extra_args by which a request asks for what the ModelState reports
NUMPY_RESULTS = {**NUMPY_DTYPES, torch.float16: np.float16, torch.uint8: np.uint8}

TapFunction = Callable[[str, torch.Tensor], torch.Tensor]


class StateOutputs(Tap):
    """What a ModelState reports, in the form of a tap without points."""

    name = STATE_OUTPUTS
    edits = False

    def __init__(self, state: ModelState, results: Sequence[Result]) -> None:
        self.state = state
        self.results = tuple(results)

    def outputs(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        return self.state.outputs(batch)


def label(tap: Tap) -> str:
    """Whose results they are, for messages."""
    return f"{type(tap.state).__name__}.outputs" if isinstance(tap, StateOutputs) else f"tap {tap.name!r}"


@dataclass(frozen=True)
class Field:
    """Where a result lies in a row's byte record."""

    result: Result
    start: int

    @property
    def bytes(self) -> slice:
        size = int(np.prod(self.result.shape, dtype=np.int64)) * self.result.dtype.itemsize
        return slice(self.start, self.start + size)


def applied(tap: Tap, point: str, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
    """What `tap.apply` gives. Raises PluginError that names the tap for what it raises, and for what is no [T, H] or, of a tap that does
    not edit, other than it was given: its requests share cached prefixes with all others."""
    try:
        given = tap.apply(point, hidden, batch)
    except (ModelRunnerError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise PluginError(f"tap {tap.name!r} failed at {point!r}: {type(error).__name__}: {error}") from error
    if given is hidden:
        return given
    if not tap.edits:
        raise PluginError(
            f"tap {tap.name!r}, which has edits = False, returned something else than the hidden states that it was given at {point!r}; "
            "return these, or set edits = True: then its requests share no cached prefix with others"
        )
    if not isinstance(given, torch.Tensor) or given.shape != hidden.shape or given.dtype != hidden.dtype:
        got = f"{list(given.shape)} {given.dtype}" if isinstance(given, torch.Tensor) else repr(given)
        raise PluginError(f"tap {tap.name!r} returned {got} at {point!r}; {list(hidden.shape)} {hidden.dtype} is needed")
    return given


def given_by(tap: Tap, batch: Batch) -> Mapping[str, torch.Tensor]:
    """What `tap.outputs` gives. Raises PluginError that names the tap for what it raises, and for anything but tensors by the names that
    it declares."""
    try:
        given: object = tap.outputs(batch)
    except (ModelRunnerError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise PluginError(f"{label(tap)} failed to give its outputs: {type(error).__name__}: {error}") from error
    declared = [result.name for result in tap.results]
    if not isinstance(given, Mapping):
        raise PluginError(f"{label(tap)} gave {given!r} for its outputs; a mapping of {declared} to tensors is needed")
    if set(given) != set(declared):
        raise PluginError(f"{label(tap)} gave the outputs {sorted(map(str, given))}; it declares {declared}")
    return given


class ActiveTaps:
    """The taps that some row of a step asks for. points: tap point -> the taps to call there, in loading order."""

    def __init__(self, taps: Sequence[Tap], fields: Mapping[str, Sequence[Field]]) -> None:
        self.points: dict[str, list[Tap]] = {}
        for tap in taps:
            for point in tap.points:
                self.points.setdefault(point, []).append(tap)
        self._reporting = [(tap, fields[tap.name]) for tap in taps if tap.results]

    @property
    def reports(self) -> bool:
        """Whether there are results to send."""
        return bool(self._reporting)

    def bind(self, batch: Batch) -> TapFunction:
        """The `tap` argument of `ModelState.forward`."""

        def call(point: str, hidden: torch.Tensor) -> torch.Tensor:
            for tap in self.points.get(point, ()):
                hidden = applied(tap, point, hidden, batch)
            return hidden

        return call

    def write(self, batch: Batch, packed: torch.Tensor) -> None:
        """D. Put the step's results into `packed` [N, record bytes] uint8. Raises PluginError for a result that is not as declared."""
        for tap, fields in self._reporting:
            given = given_by(tap, batch)
            for field in fields:
                value, want = given[field.result.name], (batch.num_rows, *field.result.shape)
                if not fits(value, want, field.result.dtype):
                    raise PluginError(
                        f"{label(tap)} gave output {field.result.name!r} as {told(value)}; it declares {list(want)} {field.result.dtype} "
                        "(one entry per row of the step)"
                    )
                packed[:, field.bytes].copy_(value.reshape(batch.num_rows, -1).contiguous().view(torch.uint8))


class TapSet:
    """Every tap of an engine, in loading order.

    record_bytes: of a row's results, 0 when no tap reports. all_features: the bits of all taps.
    """

    def __init__(self, taps: Sequence[tuple[str, Tap]], needs: Needs) -> None:
        """taps: (plugin, tap). Raises PluginError for taps that this model or each other rule out."""
        self.taps = [tap for _, tap in taps]
        owners = self._owners = {id(tap): plugin for plugin, tap in taps}
        if len(taps) > MAX_TAPS:
            raise PluginError(f"{len(taps)} taps from plugins {sorted({plugin for plugin, _ in taps})}; an engine holds at most {MAX_TAPS}")
        for tap in self.taps:
            check_points(tap, owners[id(tap)], needs.tap_points)
        named = [(owners[id(tap)], f"tap {tap.name!r}") for tap in self.taps]
        named += [(owners[id(tap)], f"result {result.name!r}") for tap in self.taps for result in tap.results]
        named += [("the model state", f"buffer {buffer.name!r}") for buffer in needs.buffers]
        named += [(owners[id(tap)], f"buffer {buffer.name!r}") for tap in self.taps for buffer in tap.buffers]
        refuse_twice(named)
        self.bits = {tap.name: 1 << (FIRST_BIT + i) for i, tap in enumerate(self.taps)}
        self.mask = sum(self.bits.values())
        self._reporting = sum(self.bits[tap.name] for tap in self.taps if tap.results)  # bits of taps with results
        self.fields: dict[str, list[Field]] = {}
        end = 0
        for tap in self.taps:
            self.fields[tap.name] = []
            for result in tap.results:
                field = Field(result, end)
                self.fields[tap.name].append(field)
                end = field.bytes.stop
        self.record_bytes = end
        self._active: dict[int, ActiveTaps] = {}

    @property
    def all_features(self) -> Feature:
        return Feature(self.mask)

    @property
    def buffers(self) -> tuple[StaticBuffer, ...]:
        return tuple(buffer for tap in self.taps for buffer in tap.buffers)

    def columns(self, settings: RunnerSettings) -> tuple[Column, ...]:
        """H. Request-table columns of all taps. Raises PluginError that names the tap for what its `columns` raises, and for anything but
        columns."""
        own = [Column(f"tap.{tap.name}", torch.int32) for tap in self.taps]
        return (*own, *(column for tap in self.taps for column in self._columns(tap, settings)))

    def _columns(self, tap: Tap, settings: RunnerSettings) -> Sequence[Column]:
        who = f"tap {tap.name!r} of plugin {self._owners[id(tap)]!r}"
        try:
            given: object = tap.columns(settings)
        except ModelRunnerError:
            raise
        except Exception as error:
            raise PluginError(f"{who} failed to give its columns: {type(error).__name__}: {error}") from error
        if not isinstance(given, (list, tuple)) or not all(isinstance(column, Column) for column in given):
            raise PluginError(f"{who} gave the columns {given!r}; a tuple or list of Column is needed, () for none")
        return given

    # ---- requests ------------------------------------------------------------------------------------------------

    def admit(self, request: Request) -> None:
        """H, at submission. Find out what the request asks for: sets its feature bits, its `tap_values` and its `cache_world`.

        Raises RequestError for an argument that no tap takes, or that its tap refuses.
        """
        arguments = request.params.extra_args
        if unknown := [name for name in arguments if name not in self.bits]:
            known = ", ".join(map(repr, self.bits)) or "nothing, since no plugin brings a tap"
            raise RequestError(f"extra_args: no tap is named {unknown[0]!r}; accepted: {known}")
        keys: dict[str, Any] = {}
        for tap in self.taps:
            values = self._values(tap, request)
            if values is None:
                continue
            request.features |= self.bits[tap.name]
            request.tap_values |= {f"tap.{tap.name}": 1, **values}
            if (key := tap.cache_key(request, values)) is not None:
                keys[tap.name] = np.frombuffer(key, np.uint8)
        if keys:
            request.cache_world = digest(keys)

    def _values(self, tap: Tap, request: Request) -> Mapping[str, Any] | None:
        try:
            return tap.row_values(request)
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(f"extra_args[{tap.name!r}]: {error}") from error

    # ---- the step ------------------------------------------------------------------------------------------------

    def active(self, features: Feature) -> ActiveTaps | None:
        """The taps of a step with these features; None when no row asks for one."""
        bits = int(features) & self.mask
        if not bits:
            return None
        if bits not in self._active:
            self._active[bits] = ActiveTaps([tap for tap in self.taps if bits & self.bits[tap.name]], self.fields)
        return self._active[bits]

    # ---- results ---------------------------------------------------------------------------------------------------

    def keep(self, outcome: Outcome, rows: HostRows, request_at: Callable[[int], Request | None]) -> None:
        """H, before an outcome with `extra` is committed. Hand each row's record to its request; costs per row that asks for results and
        samples."""
        assert outcome.extra is not None, "no tap reported in this step"
        plan, records = outcome.plan, outcome.records
        counts = (records[:, Record.NUM_TOKENS] > 0) & (records[:, Record.FINISH] != Finish.ERROR)
        live = rows.active[plan.rows] & (rows.generation[plan.rows] == plan.generations)
        at = np.flatnonzero(counts & live & (rows.features[plan.rows] & self._reporting != 0))
        kept = outcome.extra[at]
        for record, row in zip(kept, plan.rows[at].tolist(), strict=True):
            request = request_at(row)
            assert request is not None, f"row {row} has no request"
            request.results.append(record)

    def arrays(self, request: Request, start: int, stop: int) -> dict[str, npt.NDArray[Any]]:
        """H. What the request asked for, of its output tokens start..stop-1: result name -> [stop - start, *shape]."""
        if not request.features & self._reporting:
            return {}
        records = np.array(request.results[start:stop], np.uint8).reshape(-1, self.record_bytes)
        found: dict[str, npt.NDArray[Any]] = {}
        for tap in self.taps:
            for field in self.fields[tap.name] if request.features & self.bits[tap.name] else ():
                part: npt.NDArray[Any] = np.ascontiguousarray(records[:, field.bytes]).view(NUMPY_RESULTS[field.result.dtype])
                found[field.result.name] = part.reshape(len(records), *field.result.shape)
        return found


def check_points(tap: Tap, plugin: str, known: Sequence[str]) -> None:
    """Raise PluginError unless the tap has a name, its attributes are tuples of what they should hold, and its points are among `known`."""
    if not tap.name:
        raise PluginError(f"plugin {plugin!r} brings a tap without a name ({type(tap).__name__}); requests ask for taps by name")
    for attribute, kind in {"points": str, "results": Result, "buffers": StaticBuffer}.items():
        value = getattr(tap, attribute)
        if not isinstance(value, (list, tuple)) or not all(isinstance(each, kind) for each in value):
            raise PluginError(
                f"tap {tap.name!r} of plugin {plugin!r} has {attribute} = {value!r}; a tuple of {kind.__name__} is needed, also of one, "
                "e.g. (one,)"
            )
    if missing := [point for point in tap.points if point not in known]:
        has = f"this model has {', '.join(known)}" if known else "this model has no tap points"
        raise PluginError(f"tap {tap.name!r} of plugin {plugin!r} wants the tap points {missing}; {has}. Look at model_info.tap_points")


def refuse_twice(named: Sequence[tuple[str, str]]) -> None:
    """Raise PluginError for two things of one name. named: (owner, thing)."""
    owners: dict[str, str] = {}
    for owner, thing in named:
        if thing in owners:
            raise PluginError(f"{owners[thing]} and {owner} both bring {thing}; rename one, or disable one plugin")
        owners[thing] = owner

"""The measurements that need no engine beside ours, in the order: `startup`, `host`, `sampling`, then workloads, which share an engine."""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from modelrunner.errors import SettingsError
from modelrunner.plugins.bench.asked import Asked, Sampling, as_record
from modelrunner.plugins.bench.models import MODELS, STORED, model_folder, write_weights
from modelrunner.plugins.bench.workloads import WORKLOADS, Workload

if TYPE_CHECKING:
    from modelrunner.engine import Engine
    from modelrunner.plugin_manager import PluginManager
    from modelrunner.plugins.bench.suite import Bench, Options, Record

STARTUP, HOST, SAMPLING = "startup", "host", "sampling"
ABOUT = {
    STARTUP: "seconds from nothing to the first token in a process of its own, with an empty and a filled kernel cache",
    HOST: "microseconds of host work in a step of 1, 64, 256 and 1,024 rows, without a device; with a drafter also of steps with drafts",
    SAMPLING: "microseconds to choose tokens for 256 rows of 151,936 ids, by what they ask for, beside torch and FlashInfer",
    **{name: workload.about for name, workload in WORKLOADS.items()},
}
ROOM = {"model.max_model_len": 4096, "scheduler.max_rows": 1024, "scheduler.max_batched_tokens": 16384}
DRY_SCALE = 0.03


def model_settings(model: str | None, given: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Settings that choose the model: one of `MODELS` with made-up weights, or whatever else has that name. given: the command line's.

    Raises SettingsError if these say how to read weights that lie nowhere.
    """
    if model not in MODELS:
        return {"model.name": model} if model else {}
    folder = model_folder(model)
    if model in STORED:
        write_weights(folder)
        return {"model.name": str(folder)}
    for name in {"load_format", "model.load_format"} & set(given):
        if given[name] != "dummy":
            raise SettingsError(
                f"{name} is {given[name]!r}, but {model} is a configuration whose weights are made up as it is loaded; accepted with it: "
                "dummy, which is what it gets when load_format is left out"
            )
        return {"model.name": str(folder)}
    return {"model.name": str(folder), "model.load_format": "dummy"}


def roomy(given: Mapping[str, Any], manager: PluginManager, workloads: Sequence[Workload], scale: float) -> dict[str, Any]:
    """`given` with what the user left open: an engine's usual room, or, for work that is scaled down, as much as the work needs."""
    from modelrunner.settings import merge_sections, setting_origins

    longest = max(workload.longest for workload in workloads)
    ours: dict[str, Any] = {**ROOM, "model.max_model_len": max(longest, ROOM["model.max_model_len"]), "model.skip_tokenizer_init": True}
    if scale != 1:
        ours |= {"model.max_model_len": longest, "scheduler.max_rows": max(workload.most_rows for workload in workloads)}
    decided = setting_origins(given, sections=merge_sections(manager.collect("settings_sections")))
    return {**given, **{name: value for name, value in ours.items() if name not in decided}}


def records(asked: Sequence[Asked], args: argparse.Namespace, manager: PluginManager) -> Iterator[Record]:
    """One record for each scenario, as soon as it is measured; one with `error` for a scenario that failed."""
    settings = {**model_settings(args.model, args.settings), **args.settings}
    names = [one.name for one in asked]
    if STARTUP in names:
        from modelrunner.plugins.bench.startup import measure_startup

        usual = roomy(settings, manager, [scaled("offline", args.scale)], args.scale)
        yield from attempt(STARTUP, lambda: [measure_startup(usual, args.plugins, args.model or "")])
    if HOST in names:
        from modelrunner.plugins.bench.host import measure_host

        yield from attempt(HOST, lambda: measure_host(args.scale, of_speculation(args.settings)))
    if SAMPLING in names:
        from modelrunner.plugins.bench.sampling import measure_sampling

        yield from attempt(SAMPLING, lambda: measure_sampling(manager, args.settings, args.scale))
    work = [
        (scaled(one.name, args.scale), args.sampling if one.sampling is None else one.sampling) for one in asked if one.name in WORKLOADS
    ]
    if work:
        yield from engine_records(work, settings, args, manager)


def of_speculation(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings that are about drafts."""
    return {name: value for name, value in settings.items() if name.partition(".")[0] == "speculation"}


def attempt(name: str, measure: Callable[[], Iterable[Record]]) -> Iterator[Record]:
    """What `measure` gives; a record with `error` when it raises."""
    try:
        yield from measure()
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        yield {"scenario": name, "engine": "modelrunner", "error": brief(error)}


def scaled(name: str, scale: float) -> Workload:
    return WORKLOADS[name] if scale == 1 else WORKLOADS[name].scaled(scale)


def engine_records(
    work: Sequence[tuple[Workload, Sampling]], settings: Mapping[str, Any], args: argparse.Namespace, manager: PluginManager
) -> Iterator[Record]:
    """Run the workloads on one engine; after a failure, the rest on a new one."""
    from modelrunner.plugins.bench.suite import Options

    options = Options(args.repeat, args.statistic, args.seed, args.limit, args.profiled)
    settings = roomy(settings, manager, [workload for workload, _ in work], args.scale)
    bench: Bench | None = None
    try:
        for workload, sampling in work:
            bench = bench or make_bench(settings, args, options)
            try:
                record = bench.measure(workload, sampling)
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                setting = bench.setting
                record = {"scenario": workload.name, "engine": "modelrunner", **as_record(sampling), "error": brief(error), **setting}
            yield record
            if "error" in record:
                close(bench.engine)
                bench = None
    finally:
        if bench is not None:
            close(bench.engine)


def brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def make_bench(settings: Mapping[str, Any], args: argparse.Namespace, options: Options) -> Bench:
    """Start an engine. The device's bandwidth is measured first, while its memory is free."""
    import torch

    from modelrunner.engine import Engine
    from modelrunner.plugins.bench import hardware
    from modelrunner.plugins.bench.suite import Bench

    wanted = str(settings.get("device.name", settings.get("device", "auto")))
    device = "cuda" if torch.cuda.is_available() and wanted in ("auto", "cuda") else "cpu"
    machine = hardware.machine(torch.device(device))
    engine = Engine(settings, plugins=args.plugins)
    return Bench(engine, machine, options, describe(engine, args.model))


def close(engine: Engine) -> None:
    """Give the engine's memory back, whatever state it is in."""
    from modelrunner.plugins.bench import hardware

    with contextlib.suppress(Exception):
        engine.close()
    gc.collect()
    hardware.free(engine.assembly.device.torch_device)


def describe(engine: Engine, model: str | None) -> dict[str, Any]:
    """What a number depends on."""
    import torch

    from modelrunner.plugins.bench import hardware
    from modelrunner.plugins.bench.engines import versions

    assembly = engine.assembly
    return {
        "model": model or engine.card.name or engine.card.path.name,
        "dtype": assembly.resolved.dtype,
        "linear": assembly.resolved.components["linear_scheme"].partition(" ")[0],
        "device": assembly.device.name,
        "device_name": hardware.device_name(assembly.device.torch_device),
        "threads": torch.get_num_threads(),
        "max_model_len": assembly.resolved.max_model_len,
        "max_rows": engine.settings.scheduler.max_rows,
        "max_batched_tokens": engine.settings.scheduler.max_batched_tokens,
        "num_pages": assembly.resolved.num_pages,
        "versions": versions(),
    }

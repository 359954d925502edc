"""`modelrunner bench`: throughput of fixed work, beside transformers if asked, in one process and one run; and where time goes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelrunner.cli import Command
from modelrunner.errors import SettingsError
from modelrunner.plugins import trace
from modelrunner.plugins.bench.asked import GREEDY, Asked, Sampling, read_sampling
from modelrunner.plugins.bench.forms import BASE, FORMS, forms
from modelrunner.plugins.bench.models import MODELS
from modelrunner.plugins.bench.scenarios import SCENARIOS, Scenario
from modelrunner.plugins.bench.session import ABOUT, DRY_SCALE, model_settings
from modelrunner.plugins.bench.workloads import WORKLOADS

if TYPE_CHECKING:
    from modelrunner.llm import LLM
    from modelrunner.plugin_manager import PluginManager
    from modelrunner.plugins.bench.measure import Result
    from modelrunner.plugins.bench.memory import MemoryMeter

COMPARED = ("transformers", BASE)
STATISTICS = ("median", "best")
PLOTS = (".png", ".html", ".svg")
REPEAT = 3
PROFILED = 32  # steps
ABOUTS = {**{name: scenario.about for name, scenario in SCENARIOS.items()}, **ABOUT}


def command() -> Command:
    """The command's description; torch is imported only when it runs."""
    about = "Measure throughput, and compare it with transformers or with what the device allows."
    return Command("bench", about, add_arguments, run, takes_settings=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "; ".join(f"{name}: {text}" for name, text in ABOUTS.items())
    named = f"; {', '.join(MODELS)}: that configuration with made-up weights" if MODELS else ""
    parser.add_argument(
        "scenarios",
        metavar="SCENARIO",
        nargs="+",
        type=scenario,
        help=f"{about}. NAME@0.6 sets a temperature for one, NAME@0.8,top_p=0.95,top_k=50 more fields of SamplingParams",
    )
    parser.add_argument("--model", metavar="NAME", help=f"hub id, folder, or .gguf file{named}; default: the small model of `make demo`")
    parser.add_argument(
        "--compare",
        choices=COMPARED,
        help=f"of cpu1 and cpu32: run transformers on the same weights, in turn with ours; or {BASE}: ours as {', '.join(FORMS)}, in turn",
    )
    parser.add_argument("--repeat", type=count, metavar="N", help=f"runs of each engine, after one to warm up ({REPEAT})")
    parser.add_argument("--limit", type=float, default=120.0, metavar="S", help="repeat no scenario after so many seconds (%(default)s)")
    parser.add_argument("--statistic", choices=STATISTICS, default=STATISTICS[0], help="which of the runs counts (%(default)s)")
    parser.add_argument(
        "--sampling", type=sampling, default=GREEDY, metavar="S", help="how the requests of workloads sample, as behind @ (greedily)"
    )
    parser.add_argument("--temperature", type=sampling, dest="sampling", metavar="T", help="the same, of a temperature alone")
    parser.add_argument("--threads", type=count, metavar="N", help="torch's threads on the CPU; default: torch's own choice")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the requests' lengths and ids (%(default)s)")
    parser.add_argument("--scale", type=share, metavar="F", help="make requests fewer and shorter by this factor; all but cpu1 and cpu32")
    parser.add_argument("--dry", action="store_true", help=f"a trial: model tiny, scale {DRY_SCALE}, one run, as far as not given")
    parser.add_argument("--profile", action="store_true", help=f"tell the device's time by kernel, over {PROFILED} steps of each scenario")
    parser.add_argument(
        "--profile-of", action="append", default=[], choices=list(WORKLOADS), metavar="SCENARIO", help="the same of this one; repeatable"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line, one for each engine in each scenario")
    parser.add_argument("--record", type=Path, metavar="FILE", help="add the JSON objects of all but cpu1 and cpu32 to this file")
    parser.add_argument("--plot", type=plot_file, metavar="FILE", help=f"draw the throughputs; one of {', '.join(PLOTS)}")
    trace.add_option(parser)


def scenario(text: str) -> Asked:
    """NAME or NAME@SAMPLING."""
    name, _, how = text.partition("@")
    if name not in ABOUTS:
        raise argparse.ArgumentTypeError(f"invalid choice: {name!r} (choose from {', '.join(ABOUTS)})")
    if not how:
        return Asked(name)
    if name not in WORKLOADS:
        raise argparse.ArgumentTypeError(f"{text!r}: {name} does not sample")
    return Asked(name, sampling(how))


def sampling(text: str) -> Sampling:
    """See `asked.read_sampling`."""
    try:
        return read_sampling(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def share(text: str) -> float:
    """A number above 0, up to 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1")
    return value


def count(text: str) -> int:
    """A number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def plot_file(name: str) -> Path:
    """Where a plot goes; told before an hour of measuring, not after."""
    path = Path(name).expanduser().absolute()
    if path.suffix not in PLOTS:
        raise argparse.ArgumentTypeError(f"{name!r} ends in none of {', '.join(PLOTS)}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r} to write {name!r} into")
    return path


def run(args: argparse.Namespace, manager: PluginManager) -> int:
    """Measure, print, plot."""
    import torch

    from modelrunner.plugins.bench import report
    from modelrunner.plugins.bench.memory import MemoryMeter

    settle(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    meter = MemoryMeter()
    results = []
    if any(one.name in SCENARIOS for one in args.scenarios):
        for result in measure_all(args, manager, meter):
            results.append(result)
            lines = (json.dumps(line) for line in report.objects(result)) if args.json else report.text(result)
            print("\n".join(lines), flush=True)  # each as soon as it is known: they take minutes
        if not args.json:
            print(report.closing(results[0].setting, meter.process_peak))
    found = measure_alone(args, manager)
    if args.plot:
        from modelrunner.plugins.bench.chart import draw

        draw([*results, *(report.as_result(record) for record in found if "seconds" in record)], args.plot)
    return 1 if any("error" in record for record in found) else 0


def settle(args: argparse.Namespace) -> None:
    """Fill in what `--dry` decides, and refuse what does not go together."""
    if args.dry:
        args.model, args.scale, args.repeat = args.model or "tiny", args.scale or DRY_SCALE, args.repeat or 1
    args.scale, args.repeat = args.scale or 1.0, args.repeat or REPEAT
    args.profiled = dict.fromkeys([*(WORKLOADS if args.profile else ()), *args.profile_of], PROFILED)
    others = [one.name for one in args.scenarios if one.name not in SCENARIOS]
    if args.compare and others:
        raise SettingsError(f"--compare goes with {' and '.join(SCENARIOS)}, not with {', '.join(others)}")


def measure_alone(args: argparse.Namespace, manager: PluginManager) -> list[dict[str, Any]]:
    """The scenarios that run our engine alone: print each as soon as it is measured, and a table of them at the end."""
    from modelrunner.plugins.bench import profiler, table
    from modelrunner.plugins.bench.session import records

    found = []
    for record in records([one for one in args.scenarios if one.name not in SCENARIOS], args, manager):
        found.append(record)
        if args.record:
            with args.record.open("a", encoding="utf-8") as file:
                print(json.dumps(record), file=file)
        lines = [json.dumps(record)] if args.json else [*table.text(record), *profiler.lines(record.get("profile"))]
        print("\n".join(lines), flush=True)
    if len(found) > 1 and not args.json:
        print("\n".join(["", *table.table(found)]))
    return found


def measure_all(args: argparse.Namespace, manager: PluginManager, meter: MemoryMeter) -> Iterator[Result]:
    """Load the engines once and run each scenario, one after the other."""
    from modelrunner.llm import LLM
    from modelrunner.plugins.bench.engines import BenchEngine, OurEngine, TransformersEngine
    from modelrunner.plugins.bench.measure import measure

    scenarios = [SCENARIOS[name] for name in dict.fromkeys(one.name for one in args.scenarios) if name in SCENARIOS]
    given = sized(model_settings(args.model, args.settings) | dict(args.settings), manager, scenarios)
    all_forms = forms(given, origins(args.settings, manager)) if args.compare == BASE else {OurEngine.name: given}
    with ExitStack() as stack:
        engines: list[BenchEngine] = []
        details = {}
        for name, settings in all_forms.items():
            traced = settings if engines else trace.traced(settings, args.trace)  # one file holds one engine's timeline
            with meter.at_work(name):
                llm = stack.enter_context(LLM(plugins=args.plugins, **traced))
            engines.append(OurEngine(llm, name))
            details[name] = describe(llm)
        if args.compare == TransformersEngine.name:
            with meter.at_work(TransformersEngine.name):
                engines.append(TransformersEngine(llm.card, llm.engine.runner.parts.dtype))
        vocab_size = llm.engine.assembly.needs.vocab_size
        for scenario in scenarios:
            result = measure(
                scenario,
                scenario.jobs(vocab_size, args.seed),
                engines,
                meter,
                repeat=args.repeat,
                statistic=args.statistic,
                setting=details[engines[0].name],
            )
            yield replace(result, forms=details) if args.compare == BASE else result


def origins(given: Mapping[str, Any], manager: PluginManager) -> Mapping[str, str]:
    """The settings that are given anywhere, and where."""
    from modelrunner.settings import merge_sections, setting_origins

    return setting_origins(given, sections=merge_sections(manager.collect("settings_sections")))


def sized(given: Mapping[str, Any], manager: PluginManager, scenarios: Sequence[Scenario]) -> dict[str, Any]:
    """`given` with what the user left open: room for the scenarios' requests and no more, and no tokenizer, which nobody needs."""
    ours = {
        "model.max_model_len": max(scenario.longest for scenario in scenarios),
        "scheduler.max_rows": max(scenario.requests for scenario in scenarios),
        "model.skip_tokenizer_init": True,
    }
    decided = origins(given, manager)
    return {**given, **{name: value for name, value in ours.items() if name not in decided}}


def describe(llm: LLM) -> dict[str, Any]:
    """What a number depends on."""
    import torch

    from modelrunner.plugins.bench.engines import versions

    resolved = llm.engine.assembly.resolved
    card = llm.engine.card
    return {
        "model": card.name or card.path.name,
        "dtype": resolved.dtype,
        "linear": resolved.components["linear_scheme"].partition(" ")[0],
        "device": llm.engine.assembly.device.name,
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }

"""`modelrunner bench`: throughput of fixed work, beside transformers if asked, in one process and one run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelrunner.cli import Command
from modelrunner.plugins import trace
from modelrunner.plugins.bench.scenarios import SCENARIOS, Scenario

if TYPE_CHECKING:
    from modelrunner.llm import LLM
    from modelrunner.plugin_manager import PluginManager
    from modelrunner.plugins.bench.measure import Result
    from modelrunner.plugins.bench.memory import MemoryMeter

COMPARED = ("transformers",)
STATISTICS = ("median", "best")
PLOTS = (".png", ".html", ".svg")


def command() -> Command:
    """The command's description; torch is imported only when it runs."""
    return Command("bench", "Measure throughput, and compare it with transformers.", add_arguments, run, takes_settings=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "; ".join(f"{name}: {scenario.about}" for name, scenario in SCENARIOS.items())
    parser.add_argument("scenarios", metavar="SCENARIO", nargs="+", choices=list(SCENARIOS), help=about)
    parser.add_argument("--model", metavar="NAME", help="hub id, folder, or .gguf file; without it, the small model of `make demo`")
    parser.add_argument("--compare", choices=COMPARED, help="run this engine on the same weights too, in turn with ours")
    parser.add_argument("--repeat", type=count, default=3, metavar="N", help="runs of each engine, after one to warm up (%(default)s)")
    parser.add_argument("--statistic", choices=STATISTICS, default=STATISTICS[0], help="which of the runs counts (%(default)s)")
    parser.add_argument("--threads", type=count, metavar="N", help="torch's threads on the CPU; default: torch's own choice")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the requests' lengths and ids (%(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, one for each engine in each scenario")
    parser.add_argument("--plot", type=plot_file, metavar="FILE", help=f"draw the throughputs; one of {', '.join(PLOTS)}")
    trace.add_option(parser)


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

    if args.threads:
        torch.set_num_threads(args.threads)
    meter = MemoryMeter()
    results = []
    for result in measure_all(args, manager, meter):
        results.append(result)
        lines = (json.dumps(line) for line in report.objects(result)) if args.json else report.text(result)
        print("\n".join(lines), flush=True)  # each as soon as it is known: they take minutes
    if not args.json:
        print(report.closing(results[0].setting, meter.process_peak))
    if args.plot:
        from modelrunner.plugins.bench.chart import draw

        draw(results, args.plot)
    return 0


def measure_all(args: argparse.Namespace, manager: PluginManager, meter: MemoryMeter) -> Iterator[Result]:
    """Load the engines once and run each scenario, one after the other."""
    from modelrunner.llm import LLM
    from modelrunner.plugins.bench.engines import BenchEngine, OurEngine, TransformersEngine
    from modelrunner.plugins.bench.measure import measure

    scenarios = [SCENARIOS[name] for name in dict.fromkeys(args.scenarios)]
    settings = sized(trace.traced(args.settings, args.trace), manager, scenarios)
    with meter.at_work(OurEngine.name):
        llm = LLM(args.model or "", plugins=args.plugins, **settings)
    with llm:
        engines: list[BenchEngine] = [OurEngine(llm)]
        if args.compare:
            with meter.at_work(TransformersEngine.name):
                engines.append(TransformersEngine(llm.card, llm.engine.runner.parts.dtype))
        vocab_size, about = llm.engine.assembly.needs.vocab_size, describe(llm)
        options = {"repeat": args.repeat, "statistic": args.statistic, "setting": about}
        for scenario in scenarios:
            yield measure(scenario, scenario.jobs(vocab_size, args.seed), engines, meter, **options)


def sized(given: Mapping[str, Any], manager: PluginManager, scenarios: Sequence[Scenario]) -> dict[str, Any]:
    """`given` with what the user left open: room for the scenarios' requests and no more, and no tokenizer, which nobody needs."""
    from modelrunner.settings import merge_sections, setting_origins

    ours = {
        "model.max_model_len": max(scenario.longest for scenario in scenarios),
        "scheduler.max_rows": max(scenario.requests for scenario in scenarios),
        "model.skip_tokenizer_init": True,
    }
    decided = setting_origins(given, sections=merge_sections(manager.collect("settings_sections")))
    return {**given, **{name: value for name, value in ours.items() if name not in decided}}


def describe(llm: LLM) -> dict[str, Any]:
    """What a number depends on."""
    import torch

    resolved = llm.engine.assembly.resolved
    card = llm.engine.card
    packages = ("modelrunner", "torch", "transformers")
    return {
        "model": card.name or card.path.name,
        "dtype": resolved.dtype,
        "linear": resolved.components["linear_scheme"].partition(" ")[0],
        "device": llm.engine.assembly.device.name,
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in packages},
    }

"""What a benchmark found, as text and as JSON. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from modelrunner.plugins.bench.scenarios import Scenario

if TYPE_CHECKING:
    from modelrunner.plugins.bench.measure import Result, Timing

MIB = 1 << 20


def text(result: Result) -> Iterator[str]:
    """Lines for people."""
    scenario, setting = result.scenario, result.setting
    yield f"{scenario.name}: {scenario.about} ({result.prompt_tokens} + {result.timings[0].output_tokens} tokens)"
    kind = "" if result.forms else f"{setting['dtype']}, linear {setting['linear']}, "
    yield (
        f"  {setting['model']}, {kind}{setting['threads']} threads, load average {result.load[0]:.1f} before and {result.load[1]:.1f} after"
    )
    for timing in result.timings:
        runs = f"{result.statistic} of {len(timing.seconds)} runs, {min(timing.seconds):.2f}-{max(timing.seconds):.2f} s"
        memory = "unknown" if timing.peak_memory is None else f"{timing.peak_memory / MIB:.0f} MiB"
        yield f"  {timing.engine:<14}{timing.tokens_per_second(result.statistic):9.1f} tok/s   ({runs})   peak memory {memory}"
    for timing in result.timings[1:]:
        equal = f"{result.equal_tokens[timing.engine]} of {timing.output_tokens} tokens alike"
        who, ratio = result.comparison(timing)
        yield f"  {who}: {ratio:.2f}x ({equal})"


def closing(setting: Mapping[str, Any], process_peak: int) -> str:
    """The last line: what holds for all scenarios."""
    versions = ", ".join(f"{name} {version}" for name, version in setting["versions"].items())
    return f"whole process: peak memory {process_peak / MIB:.0f} MiB; {versions}"


def objects(result: Result) -> Iterator[dict[str, Any]]:
    """One JSON object for each engine. Sizes in bytes, times in seconds; `ratio` is our throughput over this engine's, or, where all
    engines are forms of ours, this one's over the first's."""
    for index, timing in enumerate(result.timings):
        line = {
            "scenario": result.scenario.name,
            "engine": timing.engine,
            "tokens_per_second": timing.tokens_per_second(result.statistic),
            "statistic": result.statistic,
            "seconds": timing.seconds,
            "requests": result.scenario.requests,
            "prompt_tokens": result.prompt_tokens,
            "output_tokens": timing.output_tokens,
            "peak_memory_bytes": timing.peak_memory,
            "load_average": list(result.load),
            **result.forms.get(timing.engine, result.setting),
        }
        yield line | comparison(result, timing) if index else line


def comparison(result: Result, timing: Timing) -> dict[str, Any]:
    return {"ratio": result.comparison(timing)[1], "equal_tokens": result.equal_tokens[timing.engine]}


def as_result(record: Mapping[str, Any]) -> Result:
    """A record of a workload as a result of one engine, for the chart."""
    from modelrunner.plugins.bench.measure import Result, Timing
    from modelrunner.plugins.bench.table import label
    from modelrunner.plugins.bench.workloads import WORKLOADS

    workload = WORKLOADS[record["scenario"]]
    scenario = Scenario(label(record), workload.about, record["requests"], workload.prompt, workload.output, record["requests"])
    timing = Timing(record["engine"], record[f"{record['counted']}_tokens"], record["seconds"])
    load = (record["load_average"][0], record["load_average"][1])
    return Result(scenario, record["statistic"], [timing], record["prompt_tokens"], {}, load, record)

"""What the device does in some steady steps: a table of its kernels, and how long it waits between them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from modelrunner.plugins.bench.asked import Sampling, params_of
from modelrunner.plugins.bench.drive import abandon, undisturbed
from modelrunner.plugins.bench.parts import Clock, split
from modelrunner.plugins.bench.scenarios import Job

if TYPE_CHECKING:
    from modelrunner.engine import Engine

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of torch's trace
HOST_WORK = ("cpu_op",)  # stands in where there is no GPU
NAME_WIDTH = 96
SETTLING = 8  # steps before the profiled ones


@dataclass(frozen=True)
class Kernel:
    """One kernel over all profiled steps; microseconds."""

    name: str
    count: int
    total: float


@dataclass(frozen=True)
class Profile:
    """kernels: by total time, the longest first. steps: profiled ones. span: microseconds from the first start to the last end. busy: of
    it, with at least one kernel at work. gaps: waits between launches, the longest first. inside: waits between kernels of one launch, a
    graph's, together. host: microseconds that parts of the loop take the host a step, collecting with its wait for the device; measured
    before, without a profiler."""

    kernels: Sequence[Kernel]
    steps: int
    span: float
    busy: float
    gaps: Sequence[float]
    inside: float = 0.0
    host: Mapping[str, float] = field(default_factory=dict)

    @property
    def idle(self) -> float:
        """Share of the span in which nothing ran, between launches."""
        return sum(self.gaps) / self.span if self.span else 0.0

    @property
    def idle_inside(self) -> float:
        """Share of the span in which nothing ran, inside graphs."""
        return self.inside / self.span if self.span else 0.0


def profile_of(events: Iterable[Mapping[str, Any]], steps: int) -> Profile:
    """From the events of a Chrome trace. On the host, nested operators count in their own line and in their caller's."""
    complete = [event for event in events if event.get("ph") == "X"]
    work = [e for e in complete if e.get("cat") in DEVICE_WORK] or [e for e in complete if e.get("cat") in HOST_WORK]
    totals: dict[str, list[float]] = {}
    for event in work:
        entry = totals.setdefault(event["name"], [0, 0.0])
        entry[0] += 1
        entry[1] += float(event["dur"])
    kernels = sorted((Kernel(name, int(count), total) for name, (count, total) in totals.items()), key=lambda k: -k.total)
    spans = sorted((float(event["ts"]), float(event["ts"]) + float(event["dur"]), _launch(event)) for event in work)
    busy, gaps, inside, end, last = 0.0, [], 0.0, spans[0][0] if spans else 0.0, -1
    for start, stop, launch in spans:
        if start > end and launch == last >= 0:
            inside += start - end
        elif start > end:
            gaps.append(start - end)
        busy += max(stop - max(start, end), 0.0)
        if stop > end:
            end, last = stop, launch
    return Profile(kernels, steps, end - spans[0][0] if spans else 0.0, busy, sorted(gaps, reverse=True), inside)


def _launch(event: Mapping[str, Any]) -> int:
    """Number of the launch that an event comes from, which all kernels of a graph share; -1: unknown."""
    return int(event.get("args", {}).get("correlation", -1))


def profile_steps(engine: Engine, jobs: Sequence[Job], sampling: Sampling, steps: int, *, steady: bool) -> Profile:
    """Run some steps of the jobs under torch's profiler, and drop the rest. steady: first wait until every request decodes."""
    from torch.profiler import ProfilerActivity, profile

    with undisturbed(engine):
        for place, job in enumerate(jobs):
            engine.add_request(str(place), {"prompt_token_ids": list(job.prompt)}, params_of(job, sampling))
        host: dict[str, float] = {}
        if steady:
            settle(engine, SETTLING)
            host = host_parts(engine, steps)
        # On a GPU its own activity alone: noting the host's operators would slow the host and so show waits that are not there.
        activity = ProfilerActivity.CUDA if engine.assembly.device.type == "cuda" else ProfilerActivity.CPU
        with profile(activities=[activity]) as recorded:
            done = 0
            while done < steps and engine.has_unfinished():
                engine.step()
                done += 1
            engine.assembly.device.synchronize()
        abandon(engine)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return replace(profile_of(events, max(done, 1)), host=host)


def host_parts(engine: Engine, steps: int) -> dict[str, float]:
    """Microseconds of the loop's parts on the host, a step."""
    with Clock(engine, perf_counter_ns) as clock:
        start, done = perf_counter_ns(), 0
        while done < steps and engine.has_unfinished():
            engine.step()
            done += 1
        return split(clock, perf_counter_ns() - start, max(done, 1))


def settle(engine: Engine, steps: int) -> None:
    """Step until nobody waits and every running request has its first token, then some steps more."""
    scheduler = engine.scheduler
    while scheduler.num_waiting or any(request.first_token_time is None for request in engine.requests.values()):
        engine.step()
    for _ in range(steps):
        if engine.has_unfinished():
            engine.step()


def as_record(profile: Profile) -> dict[str, Any]:
    """The profile as a part of a JSON object; microseconds."""
    return {
        "steps": profile.steps,
        "span_us": profile.span,
        "busy_us": profile.busy,
        "idle_share": profile.idle,
        "idle_inside_share": profile.idle_inside,
        "gaps_us": list(profile.gaps[:20]),
        "host_us": dict(profile.host),
        "kernels": [
            {"name": k.name, "count": k.count, "total_us": k.total, "us_per_step": k.total / profile.steps} for k in profile.kernels
        ],
    }


def lines(profile: Mapping[str, Any] | None, most: int = 24) -> Iterator[str]:
    """The table of a record's profile, for people; nothing for None."""
    if profile is None:
        return
    steps, kernels, gaps = profile["steps"], profile["kernels"], profile["gaps_us"]
    yield (
        f"  profile of {steps} steps: {profile['span_us'] / steps:.1f} us a step, device busy {profile['busy_us'] / steps:.1f} us, "
        f"idle {100 * profile['idle_share']:.1f}% between launches (longest gaps {', '.join(f'{gap:.1f}' for gap in gaps[:5])} us) and "
        f"{100 * profile['idle_inside_share']:.1f}% inside graphs"
    )
    if host := profile["host_us"]:
        yield "  host, us a step: " + ", ".join(f"{part} {micros:.1f}" for part, micros in host.items())
    yield f"  {'us/step':>10} {'share':>6} {'calls/step':>10} {'us/call':>9}  kernel"
    total = sum(kernel["total_us"] for kernel in kernels) or 1.0
    for kernel in kernels[:most]:
        name = kernel["name"] if len(kernel["name"]) <= NAME_WIDTH else f"{kernel['name'][: NAME_WIDTH - 3]}..."
        yield (
            f"  {kernel['us_per_step']:10.2f} {100 * kernel['total_us'] / total:5.1f}% {kernel['count'] / steps:10.2f} "
            f"{kernel['total_us'] / kernel['count']:9.2f}  {name}"
        )
    if rest := kernels[most:]:
        yield f"  {sum(k['us_per_step'] for k in rest):10.2f} {'':6} {sum(k['count'] for k in rest) / steps:10.2f} {'':9}  {len(rest)} more"

"""Where the time of an engine's start goes, and what is built after it: `python3 -P tests/gpu/start_profile.py [WORKLOAD...]`.

Prints the stages of the start with what they contain, every kernel that Triton compiled meanwhile with its seconds, and then, for each of
the workloads (`offline`, `prefill`, `mixed`, `wide`, cut to some output tokens; named twice, it runs twice), the kernels that it was the
first to need, with the steps that asked for them. TRITON_CACHE_DIR says whether the kernels are there already; `--dry`: on the CPU.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

BEGUN = float(os.environ.get("BEGUN", time.time()))
DRY = "--dry" in sys.argv
NAMES = [name for name in sys.argv[1:] if not name.startswith("-")]
WIDE_OUTPUT = 48  # tokens: enough to see every number of rows


@dataclass(frozen=True)
class Built:
    """One kernel that Triton was asked to compile: seconds in all and until it had Triton's own code; hit: it was in the cache."""

    at: float
    seconds: float
    making: float
    hit: bool
    name: str
    what: str
    thread: str
    step: str


@dataclass
class Log:
    """What happened. step: the shape of the last launched one."""

    spans: list[tuple[float, float, int, str]] = field(default_factory=list)
    built: list[Built] = field(default_factory=list)
    depth: int = 0
    step: str = ""


LOG = Log()


def now() -> float:
    return time.time() - BEGUN


def spanned(owner: Any, name: str) -> None:
    """Note when the function begins and ends, and what within which."""
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return plain(*args, **kwargs)
        begun, depth, place = now(), LOG.depth, len(LOG.spans)
        LOG.depth += 1
        LOG.spans.append((begun, 0.0, depth, name))
        try:
            return plain(*args, **kwargs)
        finally:
            LOG.depth = depth
            label = f"{getattr(owner, '__name__', owner)}.{name}".removeprefix("modelrunner.")
            LOG.spans[place] = (begun, now(), depth, label)

    setattr(owner, name, wrapped)


def listen() -> None:
    """Have Triton tell of what it compiles, or takes from its cache."""
    import triton

    def compiled(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        names = src.fn.arg_names
        plain = [f"{name}={kind}" for name, kind in src.signature.items() if kind != "constexpr"]
        constants = [f"{names[path[0]]}={getattr(value, '__name__', value)}" for path, value in src.constants.items()]
        odd = [names[i] for i in range(len(names)) if (i,) in src.attrs]
        what = f"{' '.join(plain)} | {' '.join(constants)} | div {' '.join(odd)} | {metadata['num_warps']}w {metadata['num_stages']}s"
        seconds, making = times.total / 1e6, times.ir_initialization / 1e6
        LOG.built.append(Built(now(), seconds, making, cache_hit, src.name, what, threading.current_thread().name, LOG.step))

    triton.knobs.compilation.listener = compiled


def note_steps() -> None:
    """Keep the shape of the step that is being launched."""
    from modelrunner.runner import Runner

    plain = Runner.launch

    def launch(self: Any, plan: Any) -> Any:
        LOG.step = (
            f"rows {plan.num_rows}, decode {plan.num_decode}, tokens {plan.num_tokens}, longest {plan.max_query}, bound {plan.max_seq_len}"
        )
        return plain(self, plan)

    Runner.launch = launch  # type: ignore[method-assign]


def note_stages() -> None:
    from modelrunner import assemble, cache_setup, graphs, runner
    from modelrunner.devices.cuda import CudaDevice

    for name in ("open_model", "open_checkpoint", "resolve_ops", "build_module", "load_weights", "open_media", "make_table", "make_runner"):
        spanned(assemble, name)
    spanned(assemble.PluginManager, "load")
    for name in ("make_first", "enlarge", "make"):
        spanned(cache_setup.CacheMaker, name)
    for name in ("warm_up", "_build", "run_large", "capture"):
        spanned(runner.Runner, name)
    spanned(graphs.StepGraphs, "capture_all")
    spanned(CudaDevice, "__init__")
    spanned(CudaDevice, "build")
    if not DRY:
        import triton

        spanned(triton.AsyncCompileMode, "__exit__")


def show_stages() -> None:
    for begun, ended, depth, name in LOG.spans:
        print(f"  {begun:7.2f} {ended:7.2f} {ended - begun:7.2f} s  {'  ' * depth}{name}")


def show_built(title: str, built: list[Built], most: int = 400) -> None:
    made = [each for each in built if not each.hit]
    asked = Counter(each.name for each in built)
    taken, making, found = (
        sum(values) for values in ([b.seconds for b in made], [b.making for b in made], [b.seconds for b in built if b.hit])
    )
    print(f"{title}: {len(made)} compiled here in {taken:.1f} s of threads (making {making:.1f}), ", end="")
    print(f"{len(built) - len(made)} from the cache in {found:.1f}")
    by_name: dict[str, float] = {}
    for each in made:
        by_name[each.name] = by_name.get(each.name, 0.0) + each.seconds
    print("  " + ", ".join(f"{name} {by_name.get(name, 0):.1f} s/{count}" for name, count in asked.most_common()))
    for each in built[:most]:
        print(
            f"  @{each.at:6.2f} {each.seconds:5.2f} {each.making:5.2f} {'hit' if each.hit else '   '} {each.name}: {each.what}"
            f"{'' if each.thread.startswith('build') else f' [{each.step}]'}"
        )
    sys.stdout.flush()


def show_helpers() -> None:
    """How long answers of the processes that help took."""
    from modelrunner.kernels import build_helpers

    plain = build_helpers.Helpers._let

    def let(self: Any, job: Any) -> None:
        begun = now()
        plain(self, job)
        if now() - begun > 0.01:
            HELPED.append((begun, now() - begun, job.name))

    build_helpers.Helpers._let = let  # type: ignore[method-assign]


HELPED: list[tuple[float, float, str]] = []
SUMS: dict[str, list[float]] = {}


def summed(owner: Any, name: str, label: str) -> None:
    """Add up the seconds of all calls of a function, in whichever thread."""
    plain, found = getattr(owner, name), SUMS.setdefault(label, [])

    @functools.wraps(plain)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        begun = now()
        try:
            return plain(*args, **kwargs)
        finally:
            found.append(now() - begun)

    setattr(owner, name, wrapped)


def note_parts() -> None:
    import torch

    from modelrunner import runner
    from modelrunner.devices import cuda
    from modelrunner.kernels import ahead

    summed(ahead, "_loaded", "kernels built and loaded, by threads")
    summed(runner.Runner, "_stage", "inputs of shapes")
    summed(cuda, "captured", "captures")
    summed(torch.cuda.CUDAGraph, "capture_end", "of it, ends of captures")
    summed(torch.cuda, "set_device", "device of a thread")


def work_of(name: str, run: int, engine: Any) -> float:
    """Run a workload once; its seconds."""
    from dataclasses import replace

    from modelrunner.plugins.bench import drive, stream
    from modelrunner.plugins.bench.asked import GREEDY
    from modelrunner.plugins.bench.workloads import WORKLOADS

    workload = WORKLOADS[name].scaled(0.02) if DRY else WORKLOADS[name]
    if name == "wide":
        workload = replace(workload, output=(WIDE_OUTPUT, WIDE_OUTPUT))
    vocab = engine.assembly.needs.vocab_size
    if workload.arrivals:
        later = workload.later(0, vocab, run)
        return float(stream.stream(engine, workload.jobs(0, vocab, run), later, workload.arrivals.every, GREEDY).seconds)
    return drive.drive(engine, workload.jobs(0, vocab, run)).seconds


def main() -> None:
    from modelrunner.engine import Engine
    from modelrunner.plugin_manager import PluginManager
    from modelrunner.plugins.bench import session
    from modelrunner.request import OutputKind, SamplingParams

    imported = now()
    manager = PluginManager.load([])
    model = "tiny" if DRY else "qwen3-0.6b"
    wanted = [session.scaled(name, 1) for name in dict.fromkeys(["offline", *NAMES])]
    settings = session.roomy(session.model_settings(model), manager, wanted, 1)
    listen()
    note_steps()
    note_stages()
    show_helpers()
    note_parts()
    print(f"imported at {imported:.2f}, engine from {now():.2f}", flush=True)
    engine = Engine(settings, plugins=[])
    made = now()
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, output_kind=OutputKind.FINAL_ONLY)
    engine.add_request("first", {"prompt_token_ids": list(range(5, 37))}, params)
    while engine.has_unfinished():
        engine.step()
    print(f"engine made at {made:.2f}, first token at {now():.2f}; graphs: {engine.assembly.resolved.graphs}")
    show_stages()
    for label, seconds in SUMS.items():
        print(f"  {label}: {len(seconds)}, {sum(seconds):.2f} s, longest {max(seconds, default=0):.2f}")
    show_built("start", LOG.built)
    if HELPED:
        first = min(begun + took for begun, took, _ in HELPED)
        print(f"helped {len(HELPED)} times, {sum(took for _, took, _ in HELPED):.1f} s; first answer at {first:.2f}")
        print("  " + " ".join(f"{name}@{begun:.1f}+{took:.2f}" for begun, took, name in HELPED))
    for place, name in enumerate(NAMES):
        before = len(LOG.built)
        seconds = work_of(name, place, engine)
        show_built(f"{name}: {seconds:.2f} s", LOG.built[before:])
    print(f"end at {now():.2f}")
    engine.close()


if __name__ == "__main__":
    main()

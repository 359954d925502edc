"""What steps with drafts bring, and what they could: `python3 -P tests/gpu/bench_speculation.py [MODEL,...] [ROWS,...] [K,...] [RATE,...]`.

Dummy weights, greedy, prompts of 128 tokens. A drafter proposes noise; verification runs in full, and then a seeded coin decides how many
drafts count, so that acceptance is what it is to be. One engine a model, for all k. A line for each: tokens a second, steps, milliseconds
a step, the host's share, and of what is possible how much that is: tokens of a step, times steps a second without drafts, over how much
longer a plain body of 1 + k tokens a row takes than one of 1 (layers and head, in graphs of their own, in the same run). For each number of
rows and drafts also the parts of a step, and how long the device waits between launches, under torch's profiler. Some steps run so that
torch raises if one waits for the device. `--dry`: tiny, on any machine.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from speculation_parts import ConstantPlugin, Parts, set_rate, toss

from modelrunner import Engine, OutputKind, SamplingParams
from modelrunner.plugins.bench.asked import GREEDY
from modelrunner.plugins.bench.models import model_folder
from modelrunner.plugins.bench.profiler import profile_steps
from modelrunner.plugins.bench.scenarios import Job
from modelrunner.sampler import Sampler

DRY = "--dry" in sys.argv
ARGUMENTS = [argument for argument in sys.argv[1:] if argument != "--dry"]
PROMPT = 8 if DRY else 128
OUTPUTS = {"qwen3-8b": 96}  # tokens of an output, by model
OUTPUT, REPEATS, GRAPHS = (24, 1, 2) if DRY else (256, 2, 20)
PROFILED, WATCHED = (4, 96) if DRY else (60, 880)  # steps, and tokens of an output that suffice for as many twice


def make_engine(model: str, rows: list[int], drafts: list[int]) -> Engine:
    """With graphs for all these numbers of rows, and of drafts, of which `force` chooses."""
    settings: dict[str, Any] = {
        "model": {"name": str(model_folder(model)), "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 1024},
        "scheduler": {"max_rows": max(rows)},
        "graphs": {"bucket_rows": tuple(rows), "max_tokens": 0},
        "cache": {"prefix_caching": False},
        "speculation": {"drafter": "constant", "num_tokens": max(drafts), "adaptive": True},
    }
    if DRY:
        settings |= {"device": {"name": "cpu"}, "cache": {"num_pages": 400}}
    return Engine(settings, plugins=[ConstantPlugin()])


def force(engine: Engine, k: int) -> None:
    drafting = engine.runner.parts.drafting
    assert drafting is not None
    policy = drafting.policy
    policy.drafts_in = lambda num_decode, max_tokens, step: k  # type: ignore[method-assign]
    policy.learn = lambda drafted, accepted: None  # type: ignore[method-assign]
    policy.varies = False


def begin(engine: Engine, rows: int, output: int) -> None:
    """Take requests in, and step until all decode."""
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False, output_kind=OutputKind.FINAL_ONLY)
    for row in range(rows):
        engine.add_request(str(row), {"prompt_token_ids": prompt(row)}, params)
    while engine.scheduler.num_waiting or any(request.first_token_time is None for request in engine.requests.values()):
        engine.step()


def prompt(row: int) -> list[int]:
    return [5 + (row * 31 + place * 7) % 200 for place in range(PROMPT)]


@contextmanager
def unwaiting() -> Iterator[None]:
    """Whatever waits for the device in here raises; a copy's event may be waited for."""
    if DRY:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def drive(engine: Engine, rows: int, output: int) -> dict[str, float]:
    begin(engine, rows, output)
    stats = engine.scheduler.stats
    host, first, began, steps = 0.0, stats.generated_tokens, time.perf_counter(), stats.steps
    while engine.has_unfinished():
        entered = time.thread_time()
        engine.step()
        host += time.thread_time() - entered
    seconds, count, tokens = time.perf_counter() - began, stats.steps - steps, stats.generated_tokens - first
    return {
        "tok_s": tokens / seconds,
        "steps": count,
        "ms_step": 1000 * seconds / count,
        "host_us": 1e6 * host / count,
        "per_step": tokens / count / rows,
    }


def parts_of(engine: Engine, rows: int, k: int) -> dict[str, float]:
    """Of a step in the middle of requests; and the share of time in which the device waits between launches."""
    begin(engine, rows, OUTPUT)
    with unwaiting():
        for _ in range(6):
            engine.step()
    engine.drain()
    found = Parts(engine, rows, k).measure(GRAPHS)
    while engine.has_unfinished():
        engine.step()
    jobs = [Job(tuple(prompt(row)), WATCHED) for row in range(rows)]
    profile = profile_steps(engine, jobs, GREEDY, PROFILED, steady=True)
    longest = max(profile.gaps, default=0.0)
    watched = {
        "watched_steps": profile.steps,
        "idle_share": profile.idle,
        "idle_inside_share": profile.idle_inside,
        "longest_gap_us": longest,
    }
    return {**found, **watched}


def measure(engine: Engine, model: str, rows: int, ks: list[int], rates: list[float]) -> None:
    output = OUTPUT if DRY else OUTPUTS.get(model, OUTPUT)
    plain: dict[str, float] = {}
    for k in (0, *ks):
        force(engine, k)
        set_rate(1.0)
        for _ in range(2):  # the second step of a kind is captured, if the start did not
            drive(engine, rows, 12)
        parts = parts_of(engine, rows, k)
        if not k:
            plain_body = parts["body_us"]
        show(model, rows, k, "parts", {**parts, "wider": parts["body_us"] / plain_body})
        for rate in rates if k else [0.0]:
            set_rate(rate)
            found = max((drive(engine, rows, output) for _ in range(REPEATS)), key=lambda run: run["tok_s"])
            plain = plain or found
            possible = found["per_step"] * rows * 1000 / plain["ms_step"] / (parts["body_us"] / plain_body)
            shares = {"speed_up": found["tok_s"] / plain["tok_s"], "possible": possible, "of_possible": found["tok_s"] / possible}
            overhead = {"tail_share": parts["tail_us"] / found["ms_step"] / 1000}
            show(model, rows, k, f"rate {rate}", {**found, **shares, **overhead})


def show(model: str, rows: int, k: int, what: str, values: dict[str, float]) -> None:
    print(json.dumps({"model": model, "rows": rows, "k": k, "what": what, **{n: round(v, 4) for n, v in values.items()}}), flush=True)


def main() -> None:
    usual = ("tiny" if DRY else "qwen3-0.6b,qwen3-8b", "1,8" if DRY else "1,8,64", "1,3,5", "0.6,0.8,1.0")
    models, rows, ks, rates = (text.split(",") for text in (*ARGUMENTS, *usual[len(ARGUMENTS) :]))
    Sampler.sample = toss  # type: ignore[method-assign]
    for model in models:
        began = time.perf_counter()
        engine = make_engine(model, [int(n) for n in rows], [int(k) for k in ks])
        print(f"{model}: start {time.perf_counter() - began:.1f} s", flush=True)
        for count in rows:
            measure(engine, model, int(count), [int(k) for k in ks], [float(rate) for rate in rates])
        engine.close()
        del engine
        print(f"{model}: {time.perf_counter() - began:.1f} s in all", flush=True)


if __name__ == "__main__":
    main()

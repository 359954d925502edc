"""Checks and times the matrix products of a decode step, sweeping their tiles: `python3 -P tests/gpu/bench_products.py`.

What counts is the dependent chain of a whole step, without attention and head, in a CUDA graph over the weights of all layers: a product's
tiles also decide how early the next one's weights arrive. So one product's tiles are changed at a time, and what makes the chain fastest
stays. The head is timed alone. `--dry` runs it once, tiny, in the interpreter. Results also go to $OUT/products.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
import types
from collections.abc import Callable
from functools import cache
from pathlib import Path

DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"
try:
    import modelrunner  # noqa: F401
except ImportError:  # not installed: the kernels need nothing but their own folder
    sys.modules["modelrunner"] = package = types.ModuleType("modelrunner")
    package.__path__ = []
    sys.modules["modelrunner.kernels"] = kernels = types.ModuleType("modelrunner.kernels")
    kernels.__path__ = [str(Path(__file__).parents[2] / "kernels")]

sys.path.insert(0, str(Path(__file__).parent))

import torch  # noqa: E402
from product_tiles import MODELS, Config, Model, Product, candidates, default, heads, short, variants  # noqa: E402

from modelrunner.kernels.activation.gated import silu_mul  # noqa: E402
from modelrunner.kernels.linear import launch  # noqa: E402
from modelrunner.kernels.linear.launch import Extras, run  # noqa: E402
from modelrunner.kernels.linear.plan import Gemv, Several  # noqa: E402
from modelrunner.kernels.norm.rows import rms_norm  # noqa: E402
from modelrunner.kernels.room import roomy  # noqa: E402

DTYPE = torch.float32 if DRY else torch.bfloat16
DEVICE = torch.device("cpu" if DRY else "cuda")
EPS = 1e-6


class Layer:
    """Weights of one layer, and how its products run."""

    def __init__(self, products: tuple[Product, ...]) -> None:
        self.weights = {p.name: (torch.randn(p.weight_shape, device=DEVICE) * p.inner**-0.5).to(DTYPE) for p in products}
        self.norms = {p.name: (1 + 0.1 * torch.randn(p.inner, device=DEVICE)).to(DTYPE) for p in products}


def multiply(p: Product, layer: Layer, x: torch.Tensor, residual: torch.Tensor, config: Config) -> torch.Tensor:
    weight, norm = layer.weights[p.name], layer.norms[p.name]
    if config is None:
        if p.kind == "add":
            return torch.addmm(residual, x, weight.t())
        out = torch.nn.functional.linear(rms_norm(x, norm, EPS) if p.kind in ("norm", "gated") else x, weight)
        return silu_mul(out) if p.kind == "gated" else out
    if p.kind == "add":
        return run(config, x, weight, Extras(residual=residual))
    if p.kind == "plain":
        return run(config, x, weight)
    return run(config, x, weight, Extras(norm=norm, eps=EPS, act=int(p.kind == "gated")))


def exact(p: Product, layer: Layer, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    if p.kind in ("norm", "gated"):
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * layer.norms[p.name].double()
    out = wide @ layer.weights[p.name].double().T
    if p.kind == "gated":
        gate, up = out.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up
    return out + residual.double() if p.kind == "add" else out


def time_graph(work: Callable[[], None]) -> float:
    """Microseconds of one run of `work` in a graph: the median of seven."""
    if DRY:
        work()
        return 1.0
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    times, replays = [], 3
    for i in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / replays)
        if i == 0:
            replays = max(3, min(50, int(3000 / times[0])))
    return statistics.median(times[1:])


class Bench:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.layers = [Layer(model.products[:4]) for _ in range(model.layers)]
        self.head = [Layer(model.products[4:])] * 2

    def inputs(self, p: Product, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = roomy((rows, p.inner + 64), DTYPE, DEVICE).normal_()[:, 64:]
        return x, torch.randn(rows, p.outputs, device=DEVICE).to(DTYPE)

    def error(self, p: Product, rows: int, config: Config) -> float:
        """Relative, against float64."""
        x, residual = self.inputs(p, rows)
        layer = (self.head if p.name == "head" else self.layers)[0]
        want = exact(p, layer, x, residual)
        return ((multiply(p, layer, x, residual, config).double() - want).norm() / want.norm()).item()

    def time(self, p: Product, rows: int, config: Config) -> float:
        """Microseconds a launch."""
        x, residual = self.inputs(p, rows)
        layers = self.head if p.name == "head" else self.layers

        def work() -> None:
            for layer in layers:
                multiply(p, layer, x, residual, config)

        return time_graph(work) / len(layers)

    def chain(self, rows: int, configs: dict[str, Config]) -> tuple[float, torch.Tensor]:
        """(microseconds of all layers of the model, without head and attention; the last hidden state)."""
        torch.manual_seed(rows)
        start = torch.randn(rows, self.model.products[0].inner, device=DEVICE).to(DTYPE)
        result = torch.full_like(start, float("nan"))
        return time_graph(lambda: result.copy_(self.run(start, configs))) * self.model.scale, result.double()

    def run(self, hidden: torch.Tensor, configs: dict[str, Config]) -> torch.Tensor:
        qkv, o, gate_up, down = self.model.products[:4]
        for layer in self.layers:
            heads = multiply(qkv, layer, hidden, hidden, configs["qkv"])[:, : o.inner]
            hidden = multiply(o, layer, heads, hidden, configs["o"])
            inner = multiply(gate_up, layer, hidden, hidden, configs["gate_up"])
            hidden = multiply(down, layer, inner, hidden, configs["down"])
        return hidden


@cache
def _tensors(name: str, product: str) -> tuple[Product, Layer]:
    p = next(p for p in MODELS[name].products if p.name == product)
    layer = Layer((p,))
    return p, layer


def compile_one(job: tuple[str, str, int, Config]) -> None:
    """Puts the kernels of a job into the compiler's cache."""
    name, product, rows, config = job
    p, layer = _tensors(name, product)
    x = torch.randn(rows, p.inner + 64, device=DEVICE).to(DTYPE)[:, 64:]
    residual = torch.randn(rows, p.outputs, device=DEVICE).to(DTYPE)
    try:
        multiply(p, layer, x, residual, config)
        torch.cuda.synchronize()
    except Exception as error:
        print(f"does not run: {name} {product} rows {rows} {short(config)}: {type(error).__name__}: {str(error)[:160]}", flush=True)


def compile_all(jobs: list[tuple[str, str, int, Config]], processes: int) -> None:
    jobs = sorted(jobs, key=lambda j: j[:2])
    share = -(-len(jobs) // processes)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(compile_one, jobs, chunksize=max(1, share // 3))


Found = dict[Config, float]  # microseconds


def right(bench: Bench, p: Product, rows: int, configs: list[Config]) -> list[Config]:
    """Those of `configs` that run and compute the product; the others are told."""
    found = []
    for config in dict.fromkeys(configs):
        try:
            error = bench.error(p, rows, config)
        except Exception as failure:
            print(f"fails: {p.name} rows {rows} {short(config)}: {type(failure).__name__}: {str(failure)[:160]}", flush=True)
            continue
        if error < (1e-4 if DRY else 1e-2):
            found.append(config)
        else:
            print(f"WRONG: {p.name} rows {rows} {short(config)}: relative error {error:.1e}", flush=True)
    return found


def descend(bench: Bench, rows: int, todo: dict[str, list[Config]], end: float) -> tuple[dict[str, Config], dict[str, Found]]:
    """Change one product's tiles at a time, twice around, keeping what makes the chain fastest. `end`: of the clock; then stop.

    Returns the best tiles, and for each product the chain's time with each of its tiles, the others being the best so far.
    """
    products = bench.model.products[:4]
    best: dict[str, Config] = {p.name: default(p, rows) for p in products}
    least = bench.chain(rows, best)[0]
    found: dict[str, Found] = {}
    for turn in range(2):
        for p in products:
            seen = {best[p.name]: least} if turn == 0 else {best[p.name]: bench.chain(rows, best)[0]}
            again = sorted(found[p.name], key=found[p.name].__getitem__)[:4] if turn else todo[p.name]
            for config in again:
                if config not in seen and time.time() < end:
                    seen[config] = bench.chain(rows, best | {p.name: config})[0]
            for config in variants(min(seen, key=seen.__getitem__), p) if turn else []:
                if config not in seen and time.time() < end and right(bench, p, rows, [config]):
                    seen[config] = bench.chain(rows, best | {p.name: config})[0]
            found[p.name] = found.get(p.name, {}) | seen
            best[p.name] = min(seen, key=seen.__getitem__)
            least = seen[best[p.name]]
    return best, found


def report(bench: Bench, rows: int, best: dict[str, Config], found: dict[str, Found]) -> list[dict[str, object]]:
    """Prints the chain of the vendor's library, of what ships and of the best found, and each product's six best."""
    products, name = bench.model.products[:4], bench.model.name
    records: list[dict[str, object]] = []
    none: dict[str, Config] = dict.fromkeys(best)
    shipped = {p.name: default(p, rows) for p in products}
    chains = {"cuBLAS": none, "default": shipped, "best": best}
    outs, times = [], []
    for title, configs in chains.items():
        time_of, out = bench.chain(rows, configs)
        outs.append(out)
        times.append(f"{title} {time_of:.0f}")
    far = max(((out - outs[0]).norm() / outs[0].norm()).item() for out in outs[1:])
    floor = sum(p.floor for p in products) * bench.model.layers * bench.model.scale
    print(f"{name} {rows:4} chain: floor {floor:.0f}, {', '.join(times)}; difference {far:.1e}{'' if far < 3e-2 else ' WRONG'}", flush=True)
    alone = (f"{p.name} {p.floor:.1f} {bench.time(p, rows, None):.1f} {bench.time(p, rows, best[p.name]):.1f}" for p in products)
    print(f"{name} {rows:4} alone, floor, cuBLAS, best: {', '.join(alone)}", flush=True)
    for p in products:
        seen = sorted(found.get(p.name, {}).items(), key=lambda pair: pair[1])
        listed = " | ".join(f"{t:.0f} {short(c)}" for c, t in seen[:6])
        print(f"{name} {rows:4} {p.name:8} default {short(shipped[p.name])} | {listed}", flush=True)
        records += [{"model": name, "rows": rows, "product": p.name, "us": t, "config": short(c)} for c, t in seen]
    records.append({"model": name, "rows": rows, "product": "chain", "us": times})
    return records


def sweep(bench: Bench, many: list[int], options: argparse.Namespace, end: float) -> list[dict[str, object]]:
    """All candidates, compiled beforehand by many processes, then one descent for each number of rows."""
    products, name = bench.model.products[:4], bench.model.name
    begun, swept = time.time(), [rows for rows in many if str(rows) in options.sweep.split(",") or options.sweep == "all" or DRY]
    todo = {
        rows: {
            p.name: list(dict.fromkeys([default(p, rows), *(candidates(p, rows, options.streams, options.few) if rows in swept else ())]))
            for p in products
        }
        for rows in many
    }
    for rows in many:
        todo[rows]["head"] = heads(rows)
    # A tile kernel is compiled once for all numbers of rows, a GEMV for each.
    jobs: dict[object, tuple[str, str, int, Config]] = {
        (product, c, rows if isinstance(c, Gemv | Several) else 0): (name, product, rows, c)
        for rows, configs in todo.items()
        for product, those in configs.items()
        for c in those
        if c is not None
    }
    if not DRY:
        compile_all(list(jobs.values()), options.processes)
    print(f"{name}: {len(jobs)} jobs compiled in {time.time() - begun:.0f} s", flush=True)
    records = []
    for place, rows in enumerate(many):
        share = time.time() + max(0, end - time.time()) / max(1, sum(r in swept for r in many[place:]))
        configs = {p.name: right(bench, p, rows, todo[rows][p.name]) for p in products}
        best, found = descend(bench, rows, configs, share) if rows in swept else ({p.name: default(p, rows) for p in products}, {})
        records += report(bench, rows, best, found)
    return records


def report_head(bench: Bench, rows: int) -> None:
    """Prints the time of the head by the vendor's library, and by what ships and what may be faster."""
    head = bench.model.products[4]
    more = [default(head, 8)] if rows <= 8 else []
    configs = right(bench, head, rows, [None, default(head, rows), *more, *heads(rows)])
    times = " | ".join(f"{bench.time(head, rows, config):.1f} {short(config)}" for config in configs)
    print(f"{bench.model.name} {rows:4} head: floor {head.floor:.1f} | {times}", flush=True)


def report_sums(bench: Bench, rows: int) -> None:
    """Prints the chain of what ships for other shapes of the launch that adds parts."""
    configs, shipped, times = {p.name: default(p, rows) for p in bench.model.products[:4]}, (launch.SUM_BLOCK, launch.SUM_WARPS), []
    for launch.SUM_BLOCK, launch.SUM_WARPS in (shipped, (128, 1), (256, 1), (512, 2), (512, 4), (1024, 4), shipped):
        times.append(f"{launch.SUM_BLOCK} by {launch.SUM_WARPS} {bench.chain(rows, configs)[0]:.0f}")
    print(f"{bench.model.name} {rows:4} columns of the sum by warps: {', '.join(times)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="1,8,32,64,128", help="of Qwen3-0.6B")
    parser.add_argument("--large-rows", default="1,32", help="of Qwen3-8B; none: leave it out")
    parser.add_argument("--sweep", default="all", help="for which of these rows; none: the shipped configurations alone")
    parser.add_argument("--streams", action="store_true", help="above 8 rows sweep no other tiles")
    parser.add_argument("--few", action="store_true", help="sweep the kernel of 2 to 4 rows alone")
    parser.add_argument("--sums", action="store_true", help="also the launch that adds parts, in other shapes")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=240, help="when the sweep of a model ends")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    plans = {"0.6b": options.rows, "8b": options.large_rows}
    todo = {name: [int(r) for r in rows.split(",") if r] for name, rows in plans.items()}
    if DRY:
        todo = {"dry": [1, 16]}
    begun = time.time()
    records: list[dict[str, object]] = []
    for name, many in todo.items():
        if many:
            bench = Bench(MODELS[name])
            records += sweep(bench, many, options, time.time() + options.seconds)
            for rows in many:
                report_head(bench, rows)
                if options.sums:
                    report_sums(bench, rows)
    if folder := os.environ.get("OUT"):
        (Path(folder) / "products.json").write_text(json.dumps(records))
    print(f"{time.time() - begun:.0f} s")


if __name__ == "__main__":
    main()

import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import bench_products as b
import torch
from bench_wide import name
from product_tiles import MODELS, default

from modelrunner.kernels.linear.launch import Extras, run
from modelrunner.kernels.linear.plan import Ring, Wide

WHAT = {0: "all", 1: "no x", 2: "no mma", 3: "weights alone", 4: "no store", 5: "no x, store", 8: "no weights", 9: "mma alone", 10: "x alone"}


def main():
    bench = b.Bench(MODELS["8b"])
    p = {p.name: p for p in bench.model.products}
    jobs = []
    for rows, product, c, diags in [
        (128, "gate_up", Wide(128, 1, 3, 64, 1, 5, 128), WHAT),
        (128, "gate_up", Wide(128, 1, 3, 64, 1, 5, 96), (0,)),
        (128, "gate_up", Wide(128, 1, 2, 64, 1, 7, 168), (0, 1, 3)),
        (128, "gate_up", Wide(128, 1, 2, 128, 1, 3, 168), (0, 1, 3)),
        (128, "down", Wide(128, 1, 2, 64, 4, 7, 168), WHAT),
        (128, "down", Wide(128, 1, 2, 64, 4, 6, 96), (0, 3)),
        (128, "down", Wide(128, 1, 2, 128, 4, 3, 168), (0, 1, 3)),
        (128, "down", Wide(128, 1, 2, 128, 2, 3, 168), (0, 1, 3)),
        (256, "gate_up", Wide(128, 2, 3, 64, 1, 4, 128), (0, 1, 2, 4, 8, 9)),
        (256, "down", Wide(128, 2, 2, 64, 4, 4, 168), (0, 1, 2, 4, 8, 9)),
    ]:
        jobs += [(rows, p[product], replace(c, diag=d)) for d in diags]
    small = [("8b", q.name, rows, c) for rows, q, c in jobs]
    more = {
        128: {
            "gate_up": [Wide(128, 1, 3, 64, 1, 5, r) for r in (96, 104, 128)],
            "down": [Wide(128, 1, 2, 64, 4, s, r) for s, r in ((6, 96), (6, 168), (7, 96))] + [Wide(128, 1, 2, 64, 2, 7, 96)],
            "o": [Wide(128, 1, 1, 64, 2, 9, 96), Wide(128, 1, 1, 64, 2, 8, 96), Wide(128, 1, 2, 64, 4, 6, 96)],
            "qkv": [Wide(128, 1, 2, 64, 2, 6, 96), Wide(128, 1, 1, 64, 1, 9, 96), Wide(128, 1, 3, 64, 4, 5, 96)],
        },
        256: {
            "gate_up": [Wide(128, 2, 3, 64, 1, 4, 128), Wide(128, 1, 3, 64, 1, 5, 96)],
            "down": [Wide(128, 1, 2, 64, 2, 7, 96), Wide(128, 1, 2, 64, 2, 6, 96), Wide(128, 1, 2, 128, 2, 3, 96)],
            "o": [Wide(128, 1, 2, 64, 2, 7, 96), Wide(128, 1, 2, 64, 2, 6, 96), Wide(128, 1, 3, 64, 2, 5, 96)],
            "qkv": [Wide(128, 1, 3, 64, 2, 5, 96), Wide(128, 1, 2, 64, 1, 6, 96), Wide(128, 1, 3, 64, 1, 5, 96)],
        },
    }
    small += [("8b", q, rows, c) for rows, of in more.items() for q, cs in of.items() for c in cs]
    small += [("8b", q.name, rows, default(q, rows)) for rows in more for q in bench.model.products[:4] if default(q, rows)]
    b.compile_all(small, 14)
    print("compiled", flush=True)
    last = None
    for rows, q, c in jobs:
        x, residual = bench.inputs(q, rows)
        extras = Extras(act=1) if q.kind == "gated" else Extras(residual=residual)

        def work():
            for layer in bench.layers:
                run(c, x, layer.weights[q.name], extras)

        key = (rows, q.name, replace(c, diag=0))
        if key != last:
            print(f"\n{rows} {q.name} {name(c)} r{c.registers}:", end=" ")
            last = key
        try:
            print(f"{WHAT[c.diag]} {b.time_graph(work) / len(bench.layers):.1f}", end=", ", flush=True)
        except Exception as e:
            print("fails", type(e).__name__, str(e)[:100], end=", ")
    print()
    for rows, of in more.items():
        best = {q.name: default(q, rows) for q in bench.model.products[:4]}
        least = bench.chain(rows, best)[0]
        print(f"{rows} chain default {least:.0f}", flush=True)
        for q, cs in of.items():
            errors = [max(bench.error(p[q], many, c) for many in (rows, rows - 7)) for c in cs]
            times = [(bench.chain(rows, best | {q: c})[0], c) for c, e in zip(cs, errors) if e < 6e-3]
            print(f"{rows} {q}: " + " | ".join(f"{t:.0f} {name(c)} r{c.registers}" for t, c in times), [f"{e:.0e}" for e in errors], flush=True)
            if min(times, key=lambda t: t[0])[0] < least:
                least, best[q] = min(times, key=lambda t: t[0])
        print(f"{rows} best {bench.chain(rows, best)[0]:.0f} {[name(c) for c in best.values()]}", flush=True)


if __name__ == "__main__":
    main()

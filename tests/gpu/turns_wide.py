import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import bench_products as b
from product_tiles import MODELS, default, short

from modelrunner.kernels.linear.plan import Wide, _stream, plan


def W(bt, tiles, groups, bk, split, slots, registers):
    return Wide(bt, tiles, groups, bk, split, slots, registers)


def main():
    bench = b.Bench(MODELS["8b"])
    p = {p.name: p for p in bench.model.products}
    none = {q.name: plan(64, q.outputs, q.inner, 16, q.kind == "gated", q.kind in ("norm", "gated"), False) for q in bench.model.products[:4]}
    many = {"gate_up": W(128, 2, 3, 64, 1, 4, 128)}
    old = {rows: {"gate_up": _stream(rows, 12288, 4096, True)} for rows in (72, 96, 128)} | {rows: {"gate_up": None} for rows in (224, 240, 256)}
    plans = {
        64: [
            none, {}, {"down": W(64, 1, 1, 128, 2, 7, 72)}, {"qkv": W(64, 1, 1, 128, 1, 7, 72)}, {"o": W(64, 1, 1, 256, 2, 3, 72)},
            {"o": W(64, 1, 1, 128, 2, 5, 72)}, {"o": W(64, 1, 1, 64, 2, 12, 72)}, {"gate_up": W(64, 1, 3, 128, 1, 3, 96)},
            {"gate_up": W(64, 1, 2, 128, 1, 4, 72)}, {"down": W(64, 1, 1, 128, 2, 6, 168), "qkv": W(64, 1, 1, 128, 1, 6, 168)},
            {"o": W(64, 1, 3, 128, 4, 3, 72)}, {"down": W(64, 1, 3, 128, 6, 3, 72)},
        ],
        34: [none, {}], 48: [none, {}],
        128: [old[128], {}, {"qkv": W(128, 1, 1, 128, 1, 4, 96)}, {"down": W(128, 1, 1, 128, 2, 4, 96)}, {"down": W(128, 1, 2, 128, 4, 3, 96)}],
        96: [old[96], {}], 72: [old[72], {}],
        224: [old[224], many], 240: [old[240], many], 256: [old[256], many],
    }  # fmt: skip
    jobs = [("8b", q, rows, c) for rows, changes in plans.items() for change in changes for q, c in change.items() if c]
    jobs += [("8b", q.name, rows, default(q, rows)) for rows in plans for q in bench.model.products[:4] if default(q, rows)]
    b.compile_all(list(dict.fromkeys(jobs)), 14)
    print("compiled", flush=True)
    wrong = set()
    for _, q, rows, c in dict.fromkeys(jobs):
        if isinstance(c, Wide):
            e = max(bench.error(p[q], many, c) for many in (rows, rows - 7))
            if not e < 6e-3:
                wrong.add((rows, q, c))
                print("WRONG", q, rows, short(c), e, flush=True)
    hot = time.time() + 2
    while time.time() < hot:
        bench.chain(256, dict.fromkeys(p))
    for rows, changes in plans.items():
        changes = [c for c in changes if not any((rows, q, w) in wrong for q, w in c.items())]
        base = {q.name: default(q, rows) for q in bench.model.products[:4]}
        times = [[] for _ in changes]
        for turn in range(5 if rows in (128, 256) else 3):
            for place, change in enumerate(changes):
                times[place].append(bench.chain(rows, base | change)[0])
        for of, change in zip(times, changes):
            print(f"{rows} {statistics.median(of):.0f} ({min(of):.0f} to {max(of):.0f}) " + ", ".join(f"{q} {short(c)}" for q, c in change.items()), flush=True)


if __name__ == "__main__":
    main()

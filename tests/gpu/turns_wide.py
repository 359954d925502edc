import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import bench_products as b
from product_tiles import MODELS, default, short

from modelrunner.kernels.linear.plan import Stream, Wide, _stream


def W(bt, tiles, groups, bk, split, slots, registers):
    return Wide(bt, tiles, groups, bk, split, slots, registers)


def main():
    bench = b.Bench(MODELS["8b"])
    p = {p.name: p for p in bench.model.products}
    g64 = {"gate_up": W(64, 1, 3, 64, 1, 6, 72)}
    d64 = {"down": W(64, 1, 1, 128, 2, 6, 72)}
    q64 = {"qkv": W(64, 1, 1, 128, 1, 6, 72)}
    stream = {"gate_up": _stream(128, 12288, 4096, True)}
    plans = {
        64: [
            {}, g64, g64 | d64, g64 | {"down": W(64, 1, 2, 64, 4, 9, 72)}, g64 | d64 | q64, g64 | d64 | {"qkv": W(64, 1, 1, 256, 1, 3, 72)},
            g64 | q64 | {"down": W(64, 1, 1, 256, 2, 3, 72)},
            g64 | {"down": W(64, 1, 1, 128, 2, 5, 72), "qkv": W(64, 1, 1, 128, 1, 5, 72)},
            d64 | q64 | {"gate_up": W(64, 1, 2, 128, 1, 4, 72)}, d64 | q64 | {"gate_up": W(64, 1, 3, 128, 1, 3, 72)},
            d64 | q64 | {"gate_up": W(64, 1, 3, 64, 1, 6, 96)}, g64 | q64 | {"down": W(64, 1, 2, 128, 4, 4, 72)},
        ],
        128: [stream, {"gate_up": W(128, 1, 3, 64, 1, 5, 96)}, {"gate_up": W(128, 1, 3, 64, 1, 5, 128)}, {"gate_up": W(128, 1, 3, 64, 1, 4, 96)}],
        256: [{}, {"gate_up": W(128, 2, 3, 64, 1, 4, 128)}],
        192: [{}, {"gate_up": W(128, 2, 3, 64, 1, 4, 128)}, {"gate_up": W(64, 2, 3, 64, 1, 5, 96)}],
        160: [{}, {"gate_up": W(128, 2, 3, 64, 1, 4, 128)}],
        40: [{}, g64 | d64 | q64],
        32: [
            {}, {"gate_up": W(32, 1, 3, 64, 1, 8, 64)}, {"gate_up": W(32, 1, 2, 128, 1, 5, 64)}, {"qkv": W(32, 1, 1, 256, 1, 4, 64)},
            {"qkv": W(32, 1, 1, 128, 1, 9, 64)}, {"down": W(32, 1, 1, 256, 2, 4, 64)}, {"down": W(32, 1, 2, 128, 4, 5, 64)},
            {"gate_up": W(32, 1, 3, 128, 1, 4, 64)},
        ],
    }  # fmt: skip
    jobs = [("8b", q, rows, c) for rows, changes in plans.items() for change in changes for q, c in change.items()]
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
    none = dict.fromkeys(p)
    hot = time.time() + 2
    while time.time() < hot:
        bench.chain(256, none)
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

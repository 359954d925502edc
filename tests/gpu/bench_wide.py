"""Wide rings: errors against float64, each product alone, and the chain with it changed."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import bench_products as b
import torch
from product_tiles import MODELS, default, short

from modelrunner.kernels.linear.plan import Ring, Stream, Wide

ROOM = 231_000


def wide(bt, tiles, groups, bk, split, cut=0):
    return Wide(bt, tiles, groups, bk, split, ROOM // (2 * bk * (64 * groups + bt * tiles)) - cut, (168, 168, 128)[groups - 1])


def name(c):
    return f"wide {c.tiles}x{c.bt} g{c.groups} k{c.bk}/{c.split} s{c.slots}" if isinstance(c, Wide) else short(c)


def chosen(rows):
    bt, tiles = (64, 1) if rows <= 64 else (128, 1) if rows <= 128 else (128, 2)
    w = lambda groups, bk, split, cut=0, bt=bt, tiles=tiles: wide(bt, tiles, groups, bk, split, cut)  # noqa: E731
    if rows <= 128:
        return {
            "qkv": [w(3, 64, 4), w(3, 128, 4), w(2, 64, 2), w(2, 128, 2), w(3, 64, 2)],
            "o": [w(2, 64, 4), w(2, 128, 4), w(3, 64, 4), w(2, 64, 2), w(1, 64, 2), w(1, 128, 2)],
            "gate_up": [w(3, 64, 1), w(3, 128, 1), w(2, 64, 1)],
            "down": [w(2, 64, 4), w(2, 128, 4), w(3, 64, 6), w(3, 64, 4), w(1, 64, 2), w(1, 128, 2)],
        }
    return {
        "qkv": [w(3, 64, 4), w(3, 64, 2), w(2, 64, 2), w(2, 64, 2, bt=256, tiles=1), w(3, 64, 2, bt=128, tiles=1)],
        "o": [w(2, 64, 4), w(2, 64, 2), w(2, 64, 4, bt=256, tiles=1), w(3, 64, 4), w(2, 64, 2, bt=128, tiles=1)],
        "gate_up": [w(3, 64, 1), w(2, 64, 1, bt=256, tiles=1), w(3, 64, 1, bt=128, tiles=1)],
        "down": [w(2, 64, 4), w(2, 64, 4, bt=256, tiles=1), w(3, 64, 6), w(2, 64, 2, bt=128, tiles=1)],
    }


def main():
    rows_list, end = [int(r) for r in sys.argv[1].split(",")], time.time() + float(sys.argv[2])
    bench = b.Bench(MODELS["8b"])
    products = bench.model.products[:4]
    plan = {rows: chosen(rows) for rows in rows_list}
    b.compile_all([("8b", p.name, rows, c) for rows in rows_list for p in products for c in [*plan[rows][p.name], default(p, rows)] if c], 14)
    print(f"compiled, {end - time.time():.0f} s left", flush=True)
    for rows in rows_list:
        good = {}
        for p in products:
            base, good[p.name] = default(p, rows), []
            line = []
            for c in dict.fromkeys([None, base, *plan[rows][p.name]]):
                try:
                    for many in {rows, rows - 5, rows // 2 + 1}:
                        torch.manual_seed(many)
                        e = bench.error(p, many, c)
                        if not e < 6e-3:
                            print(f"WRONG {p.name} {many} {name(c)} {e:.1e}", flush=True)
                            break
                    else:
                        good[p.name].append(c)
                        line.append(f"{bench.time(p, rows, c):.1f} {name(c)}")
                except Exception as f:
                    print(f"fails {p.name} {rows} {name(c)} {type(f).__name__} {str(f)[:300]}", flush=True)
            print(f"{rows} {p.name} floor {p.floor:.1f} alone: " + " | ".join(line), flush=True)
        best = {p.name: default(p, rows) for p in products}
        least = bench.chain(rows, best)[0]
        print(f"{rows} chain default {least:.0f}", flush=True)
        for p in sorted(products, key=lambda p: -p.floor):
            line = []
            for c in good[p.name]:
                if time.time() > end or c == best[p.name]:
                    continue
                t = bench.chain(rows, best | {p.name: c})[0]
                line.append((t, c))
            print(f"{rows} {p.name}: " + " | ".join(f"{t:.0f} {name(c)}" for t, c in sorted(line, key=lambda x: x[0])), flush=True)
            if line and min(line, key=lambda x: x[0])[0] < least:
                least, best[p.name] = min(line, key=lambda x: x[0])
        again, out = bench.chain(rows, best)
        want = bench.chain(rows, dict.fromkeys(best))
        print(f"{rows} best {again:.0f}, cuBLAS {want[0]:.0f}, differ {((out - want[1]).norm() / want[1].norm()).item():.1e}: " + ", ".join(f"{k} {name(v)}" for k, v in best.items()), flush=True)


if __name__ == "__main__":
    main()

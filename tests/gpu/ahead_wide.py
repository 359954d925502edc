import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import bench_products as b
import torch
import triton
import triton.language as tl
from bench_wide import name
from product_tiles import MODELS, default
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.linear import launch
from modelrunner.kernels.linear.launch import Extras, run
from modelrunner.kernels.linear.plan import Wide
from modelrunner.kernels.norm import rows as norm_rows
from modelrunner.kernels.norm.rows import scaled


@triton.jit
def norm_ahead(x_ptr, weight_ptr, out_ptr, w_ptr, x_stride, eps, OF: tl.constexpr, PER: tl.constexpr, STEPS: tl.constexpr,
               BYTES: tl.constexpr, LATE: tl.constexpr, PAIR: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    """Of PAIR * N rows of w, the program's share of rows, BYTES of each from where its product begins."""
    gdc_launch_dependents()
    column = tl.arange(0, D)
    weight = tl.load(weight_ptr + column)
    if LATE:
        gdc_wait()
    share: tl.constexpr = PAIR * N // OF
    line = tl.program_id(0) * share + tl.arange(0, triton.next_power_of_2(share))
    inside = tl.arange(0, triton.next_power_of_2(share)) < share
    begin = (line % N) // PER % STEPS * 128
    address = w_ptr.to(tl.int64) + tl.where(inside, line, 0).to(tl.int64) * (2 * D) + begin
    if BYTES > 0:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [address, BYTES], dtype=tl.int32, is_pure=False, pack=1
        )
    if not LATE:
        gdc_wait()
    x = tl.load(x_ptr + tl.program_id(0) * x_stride + column)
    wide = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    tl.store(out_ptr + tl.program_id(0) * D + column, scaled(wide, rstd, weight, x.dtype))


AHEAD = {}
plain = b.multiply


def multiply(p, layer, x, residual, config):
    ahead = AHEAD.get(p.name)
    if ahead is None or config is None:
        return plain(p, layer, x, residual, config)
    size, late, warps = ahead
    per, steps = (32 * config.groups, p.inner // config.bk) if isinstance(config, Wide) else (64, 1)
    out = torch.empty((x.shape[0], p.inner), dtype=x.dtype, device=x.device)
    pair = 2 if p.kind == "gated" else 1
    norm_ahead[(x.shape[0],)](
        x, layer.norms[p.name], out, layer.weights[p.name], x.stride(0), b.EPS, OF=x.shape[0], PER=per, STEPS=steps, BYTES=size, LATE=late,
        PAIR=pair, N=p.outputs, D=p.inner, num_warps=warps, launch_pdl=True,
    )
    return run(config, out, layer.weights[p.name], Extras(act=int(p.kind == "gated")))


b.multiply = multiply


def main():
    bench = b.Bench(MODELS["8b"])
    p = {p.name: p for p in bench.model.products}
    base = {rows: {q.name: default(q, rows) for q in bench.model.products[:4]} for rows in (64, 128, 256)}
    wide = Wide(128, 1, 3, 64, 1, 5, 96)
    r64 = {
        "gate_up": [Wide(64, 1, 3, 64, 1, s, r) for s, r in ((7, 72), (6, 72), (7, 128))] + [Wide(64, 1, 3, 128, 1, 3, 72)],
        "down": [Wide(64, 1, 2, 64, 4, 9, 72), Wide(64, 1, 1, 64, 2, 13, 72), Wide(64, 1, 1, 128, 2, 6, 72)],
        "qkv": [Wide(64, 1, 2, 64, 2, 8, 72), Wide(64, 1, 1, 128, 1, 6, 72)],
        "o": [Wide(64, 1, 1, 128, 2, 6, 72), Wide(64, 1, 2, 64, 4, 8, 72)],
    }
    r256 = {
        "gate_up": [Wide(128, 2, 3, 64, 1, 4, 128), Wide(128, 1, 3, 64, 1, 5, 96)],
        "down": [Wide(128, 1, 2, 64, 2, 7, 168), Wide(128, 1, 2, 64, 2, 6, 104), Wide(256, 1, 2, 64, 4, 4, 168)],
        "o": [Wide(128, 1, 2, 64, 2, 7, 168), Wide(256, 1, 2, 64, 4, 4, 168)],
    }
    jobs = [("8b", q, rows, c) for rows, of in ((64, r64), (256, r256)) for q, cs in of.items() for c in cs]
    jobs += [("8b", q, rows, c) for rows in base for q, c in base[rows].items() if c] + [("8b", "gate_up", 128, wide)]
    b.compile_all(jobs, 14)
    print("compiled", flush=True)

    def chain(rows, change, what):
        got, out = bench.chain(rows, base[rows] | change)
        print(f"{rows} {got:.0f} {what}", flush=True)
        return got, out

    want = chain(128, {}, "default")[1]
    g = {"gate_up": wide}
    chain(128, g, "wide gate_up")
    for warps in (4, 8, 16):
        AHEAD.update(gate_up=(0, False, warps), qkv=(0, False, warps))
        out = chain(128, g, f"own norm, {warps} warps, nothing ahead")[1]
    print(f"difference {((out - want).norm() / want.norm()).item():.1e}")
    for where in (("gate_up",), ("qkv",), ("gate_up", "qkv")):
        for size, late in ((128, False), (256, False), (512, False), (1024, False), (128, True), (256, True), (512, True), (1024, True)):
            AHEAD.clear()
            AHEAD.update({q: (0, False, 8) for q in ("gate_up", "qkv")} | {q: (size, late, 8) for q in where})
            chain(128, g, f"ahead of {where}: {size} bytes, {'late' if late else 'early'}")
    AHEAD.clear()
    for block, warps in ((128, 1), (256, 1), (512, 1), (256, 2), (64, 0.5), (128, 0.5), (128, 1)):
        launch.SUM_BLOCK, launch.SUM_WARPS = block, warps
        old = launch.sum_shape
        launch.sum_shape = lambda rows, outputs, block=block, warps=warps: (4 * block, int(4 * warps))
        a, c = bench.chain(128, base[128])[0], bench.chain(128, base[128] | g)[0]
        launch.sum_shape = old
        launch.SUM_BLOCK, launch.SUM_WARPS = 128, 1
        print(f"128 sums of {4 * block} columns by {int(4 * warps)} warps: default {a:.0f}, wide gate_up {c:.0f}", flush=True)
    for turn in range(2):
        for rows, of in ((256, r256), (64, r64)):
            chain(rows, {}, "default")
            for q, cs in of.items():
                for c in cs:
                    e = max(bench.error(p[q], many, c) for many in (rows, rows - 7)) if turn == 0 else 0
                    if e < 6e-3:
                        chain(rows, {q: c}, f"{q} {name(c)} r{c.registers} {e:.0e}")


if __name__ == "__main__":
    main()

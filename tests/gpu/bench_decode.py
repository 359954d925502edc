"""Compares configurations of decode attention inside a step's layers: `python3 -P tests/gpu/bench_decode.py [ROWS...]`.

A CUDA graph holds the 28 layers of a decode step of Qwen3-0.6B (projection, attention, output, and the two products of the gate), each of
which waits for the one before; without attention in them they are the base line. So a configuration's figure is what attention, rotation
and cache write cost where they stand, with the launches around them overlapping as they do in a step. `--dry`: once, tiny, interpreted.
`--fp8`: with a cache of float8_e4m3fn.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import bench_attention as bench
import torch

from modelrunner.kernels.attention import gpu
from modelrunner.kernels.attention.work_list import AttentionWork, DecodeConfig
from modelrunner.kernels.linear import gpu as linear

DRY, DEVICE, DTYPE, HEADS, KV_HEADS, DIM = bench.DRY, bench.DEVICE, bench.DTYPE, bench.HEADS, bench.KV_HEADS, bench.DIM
HIDDEN, INNER, LAYERS, BOUND = (32, 48, 2, 64) if DRY else (1024, 3072, 28, 4096)
LENGTHS = {1: 1100, 2: 600, 4: 600, 8: 600, 16: 600, 24: 600, 32: 600, 48: 600, 64: 400, 128: 400, 256: 400, 1024: 290}
OPS = linear.OVERRIDES
KEPT = torch.float8_e4m3fn if "--fp8" in sys.argv else None


SHAPES = (64, 4, 3, 2), (64, 4, 4, 2), (32, 2, 4, 4)  # block_keys, warps, stages, programs a multiprocessor
ONE = {  # launch: chunk, and which shape
    1: [(64, 0), (128, 0)],
    2: [(64, 0), (128, 0)],
    4: [(64, 0), (128, 0), (192, 0)],
    8: [(256, 0), (320, 0), (384, 0), (384, 1), (512, 0)],
    16: [(384, 0), (512, 0), (640, 0), (1024, 0), (1024, 1)],
    24: [(384, 0), (512, 0), (1024, 0), (512, 2), (1024, 2)],
    32: [(384, 0), (640, 0), (1024, 0), (1024, 1)],
    48: [(1024, 0), (512, 2)],
    64: [(1024, 0), (512, 2)],
    128: [(1024, 2)],
}
TWO = {8: [(256, 0)], 16: [(384, 0)], 32: [(1024, 0)], 48: [(512, 2)], 64: [(512, 2)], 128: [(512, 2)]}  # launches


EIGHT_BITS = {  # rows: chunk, block_keys, warps, stages, programs; one launch up to 32 rows
    8: [(256, 64, 4, 4, 2), (256, 64, 4, 2, 2)],
    32: [(1024, 64, 4, 3, 2), (1024, 128, 4, 2, 2), (512, 64, 4, 4, 2)],
    128: [(1024, 64, 2, 4, 4), (1024, 32, 2, 4, 6), (1024, 64, 4, 4, 2), (1024, 64, 4, 3, 3)],
    1024: [(1024, 64, 2, 3, 4), (1024, 64, 2, 4, 3), (1024, 32, 2, 4, 5), (1024, 64, 4, 3, 3), (1024, 128, 4, 2, 2)],
}


def configs(rows: int) -> list[DecodeConfig]:
    if KEPT is not None:
        return [DecodeConfig(*values, fused=rows <= 32) for values in EIGHT_BITS.get(rows, [])]
    found = [(n, *SHAPES[i], False, True) for n, i in ONE.get(rows, [])] + [(n, *SHAPES[i]) for n, i in TWO.get(rows, [])]
    return [DecodeConfig(*values) for values in found]


class Layers:
    """The weights and caches of some layers, and a step of `rows` rows of one new token each over them."""

    def __init__(self, rows: int, length: int, layers: int = LAYERS) -> None:
        lengths = torch.randint(length * 3 // 4, length * 5 // 4 + 1, (rows,)).tolist() if rows > 1 else [length]
        self.step = step = bench.make_step([(n - 1, 1) for n in lengths], layers, num_decode=rows, kept=KEPT)
        a, last = step.arguments, step.arguments["seq_len"].long() - 1
        a["block_table"] = torch.nn.functional.pad(a["block_table"], (0, BOUND // bench.PAGE - a["block_table"].shape[1]))
        page = a["block_table"].gather(1, (last // bench.PAGE).unsqueeze(1)).squeeze(1).long()
        a["slots"] = page * bench.PAGE + last % bench.PAGE
        step.limits["max_seq_len"] = BOUND
        self.bytes = sum(lengths) * 2 * KV_HEADS * DIM * step.caches[0].element_size()
        self.scales = {} if KEPT is None else {"scales": torch.ones(2, KV_HEADS, device=DEVICE)}
        shapes = ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), (HIDDEN, HEADS * DIM), (2 * INNER, HIDDEN), (HIDDEN, INNER)
        self.weights = [[torch.randn(shape, dtype=DTYPE, device=DEVICE) * shape[1] ** -0.5 for shape in shapes] for _ in range(layers)]
        self.x = torch.randn(rows, HIDDEN, dtype=DTYPE, device=DEVICE)
        self.norm, self.head_norm = (torch.ones(n, dtype=DTYPE, device=DEVICE) for n in (HIDDEN, DIM))
        angle = torch.rand(rows, DIM // 2, device=DEVICE) * 7
        self.cos_sin = torch.cat((angle.cos(), angle.sin()), 1)

    def attend(self, qkv: torch.Tensor, cache: torch.Tensor, work: AttentionWork) -> torch.Tensor:
        norms, slots = (self.head_norm, self.head_norm), self.step.arguments["slots"]
        return gpu.qkv_attention(qkv, HEADS, KV_HEADS, *norms, 1e-6, self.cos_sin, cache, slots, work, scale=bench.SCALE, **self.scales)

    def run(self, work: AttentionWork | None) -> torch.Tensor:
        x = self.x
        for cache, (w_qkv, w_out, w_gate_up, w_down) in zip(self.step.caches, self.weights, strict=True):
            qkv = OPS["norm_matmul"](x, self.norm, 1e-6, w_qkv)
            heads = qkv[:, : HEADS * DIM] if work is None else self.attend(qkv, cache, work).flatten(1)
            x = OPS["matmul_add"](heads, w_out, x)
            x = OPS["matmul_add"](OPS["norm_gated_matmul"](x, self.norm, 1e-6, w_gate_up, "silu_mul"), w_down, x)
        return x

    def wrong(self, config: DecodeConfig) -> float:
        """Largest difference from the references, relative to the tolerance of 1.6e-2, of the attention of one layer and of the cache."""
        step, cache, rows = self.step, self.step.caches[-1], self.x.shape[0]
        qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * DIM, device=DEVICE).to(DTYPE)
        got, written = self.attend(qkv, cache, step.work(decode=config)), cache.clone()
        norms, slots = (self.head_norm, self.head_norm), step.arguments["slots"]
        step.q = gpu.qkv_rope_write(qkv, HEADS, KV_HEADS, *norms, 1e-6, self.cos_sin, cache, slots, step.work(), **self.scales)
        step.limits["max_seq_len"] = int(step.arguments["seq_len"].max())
        index = bench.reference.attention_index(cache, **step.arguments, num_heads=HEADS, dtype=DTYPE, **step.limits)
        want = bench.reference.indexed_attention(step.q, cache, index, scale=bench.SCALE, **self.scales).float()
        step.limits["max_seq_len"] = BOUND
        pairs = ((got.float(), want), *([(written.float(), cache.float())] if KEPT is None else []))
        return max(float(((x - y).abs() / (1.6e-2 + 1.6e-2 * y.abs())).nan_to_num(1e9).max()) for x, y in pairs)


def name(config: DecodeConfig) -> str:
    ways = f"{'hold ' if config.hold else ''}{'one launch' if config.fused else 'two launches'}"
    shape = f"chunk {config.chunk} block {config.block_keys} warps {config.num_warps} stages {config.num_stages}"
    return f"{shape} programs {config.programs} {ways}"


def compile_one(job: tuple[int, DecodeConfig]) -> str:
    """Fill Triton's cache on disk, and check."""
    rows, config = job
    wrong = Layers(min(rows, 16), 200 if not DRY else 20, 1).wrong(config)
    return "" if wrong <= 1 else f"BAD {rows} rows, {name(config)}: {wrong:.1f} of the tolerance"


def bench_rows(rows: int) -> None:
    layers = Layers(rows if not DRY else 2, LENGTHS[rows] if not DRY else 20)
    floor = layers.bytes / bench.BYTES_PER_S * 1e6
    base = bench.graph_us(lambda: layers.run(None), LAYERS, 5)
    print(
        f"{rows} rows x {LENGTHS[rows]}: floor {floor:.2f} us; layer without attention {base:.2f}; attention, rotation, write:", flush=True
    )
    for config in [layers.step.work().decode.config, *configs(rows)[: 2 if DRY else None]]:
        work = layers.step.work(decode=config)
        try:
            us = bench.graph_us(lambda work=work: layers.run(work), LAYERS, 5) - base
            alone = bench.attention_us(layers.step, work) if not config.fused else float("nan")
            print(f"    {us:6.2f} us, alone {alone:6.2f}  {name(config)}", flush=True)
        except Exception as error:
            print(f"    {name(config)}: {type(error).__name__} {str(error)[:80]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny, in the interpreter; no times")
    parser.add_argument("--fp8", action="store_true", help="with a cache of float8_e4m3fn")
    parser.add_argument("rows", nargs="*", type=int, default=list(LENGTHS))
    args = parser.parse_args()
    begin = time.time()
    jobs = list({config: (rows, config) for rows in args.rows for config in configs(rows)}.values())
    if DRY:
        bad = [compile_one((2, DecodeConfig(16, 16, 4, 2, 2, fused=fused))) for fused in (False, True)]
    else:
        with multiprocessing.get_context("spawn").Pool(min(15, os.cpu_count() or 2)) as pool:
            bad = pool.map(compile_one, jobs, chunksize=1)
    print("\n".join([*filter(None, bad), f"compiled and checked {len(jobs)} after {time.time() - begin:.0f} s"]), flush=True)
    for rows in args.rows:
        bench_rows(rows)
    print(f"done after {time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()

"""Compares configurations of decode attention inside a step's layers: `python3 -P tests/gpu/bench_decode.py [CASE...]`.

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
from modelrunner.plugins.bench.workloads import WORKLOADS

DRY, DEVICE, DTYPE, HEADS, KV_HEADS, DIM = bench.DRY, bench.DEVICE, bench.DTYPE, bench.HEADS, bench.KV_HEADS, bench.DIM
HIDDEN, INNER, LAYERS, BOUND = (32, 48, 2, 64) if DRY else (1024, 3072, 28, 4096)
LENGTHS = {1: 1100, 2: 600, 4: 600, 8: 600, 16: 600, 24: 600, 32: 600, 48: 600, 64: 400, 128: 400, 256: 400, 1024: 290}
OFFLINE = (20, 300, 600, 750, 900)  # steps after which the rows that `offline` has left are a case, too
OPS = linear.OVERRIDES
KEPT = torch.float8_e4m3fn if "--fp8" in sys.argv else None


FEW, MANY = (64, 4, 4, 2), (32, 2, 4, 4)  # block_keys, warps, stages, programs a multiprocessor
ONE = {  # rows: chunk and shape, in one launch
    1: [(64, FEW), (128, FEW)],
    2: [(64, FEW), (128, FEW)],
    4: [(64, FEW), (128, FEW), (192, FEW)],
    8: [(256, FEW), (320, FEW), (384, FEW), (512, FEW)],
    16: [(384, FEW), (512, FEW), (640, FEW), (1024, FEW)],
    24: [(384, FEW), (512, FEW), (1024, FEW), (512, MANY), (1024, MANY)],
    32: [(384, FEW), (640, FEW), (1024, FEW)],
}
STREAMS = [(chunk, 32, 2, stages, 4) for chunk in (512, 1024, 2048) for stages in (3, 4)]  # chunk and shape, for 8 rows and more


EIGHT_BITS = {  # rows: chunk, block_keys, warps, stages, programs; one launch up to 32 rows
    8: [(256, 64, 4, 4, 2), (256, 64, 4, 2, 2)],
    32: [(1024, 64, 4, 3, 2), (1024, 128, 4, 2, 2), (512, 64, 4, 4, 2)],
    128: [(1024, 64, 2, 4, 4), (1024, 32, 2, 4, 6), (1024, 64, 4, 4, 2), (1024, 64, 4, 3, 3)],
    1024: [(1024, 64, 2, 3, 4), (1024, 64, 2, 4, 3), (1024, 32, 2, 4, 5), (1024, 64, 4, 3, 3), (1024, 128, 4, 2, 2)],
}


def configs(rows: int) -> list[DecodeConfig]:
    """To compare; those of two launches are fused=False."""
    if KEPT is not None:
        return [DecodeConfig(*values, fused=rows <= 32) for values in EIGHT_BITS.get(rows, [])]
    found = [DecodeConfig(chunk, *shape, fused=True) for chunk, shape in ONE.get(rows, [])]
    if rows >= 8:
        found += [DecodeConfig(*shape, stream=True) for shape in STREAMS]
        found += [DecodeConfig(1024, *MANY), DecodeConfig(1024, 32, 2, 3, 4), DecodeConfig(1024, 32, 2, 3, 4, fused=True, stream=True)]
    return found


def lengths_of(case: str) -> list[int]:
    """Tokens of each row. case: a number of rows, of unlike lengths, "32x600" for rows of one length, or "offline" and its steps so far."""
    if case.startswith("offline"):
        steps = int(case.removeprefix("offline"))
        return [len(job.prompt) + steps for job in WORKLOADS["offline"].jobs(0, 1000) if job.output > steps]
    if "x" in case:
        rows, length = map(int, case.split("x"))
        return [length] * rows
    rows = int(case)
    length = LENGTHS[rows]
    return torch.randint(length * 3 // 4, length * 5 // 4 + 1, (rows,)).tolist() if rows > 1 else [length]


class Layers:
    """The weights and caches of some layers, and a step over them of one new token each of rows of so many tokens."""

    def __init__(self, lengths: list[int], layers: int = LAYERS) -> None:
        rows = len(lengths)
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
    ways = "stream " * config.stream + "hold " * config.hold + ("one launch" if config.fused else "two launches")
    shape = f"chunk {config.chunk} block {config.block_keys} warps {config.num_warps} stages {config.num_stages}"
    return f"{shape} programs {config.programs} {ways}"


def compile_one(config: DecodeConfig) -> str:
    """Fill Triton's cache on disk, and check."""
    wrong = Layers([20, 7] if DRY else torch.randint(1, 900, (16,)).tolist(), 1).wrong(config)
    return "" if wrong <= 1 else f"BAD {name(config)}: {wrong:.1f} of the tolerance"


def bench_case(case: str) -> None:
    layers = Layers([20, 9] if DRY else lengths_of(case))
    rows = layers.x.shape[0]
    floor = layers.bytes / bench.BYTES_PER_S * 1e6
    base = bench.graph_us(lambda: layers.run(None), LAYERS, 5)
    print(f"{case}: {rows} rows, floor {floor:.2f} us; layer without attention {base:.2f}; attention, rotation, write:", flush=True)
    for config in [layers.step.work().decode.config, *configs(8 if DRY else rows)]:
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
    parser.add_argument("--compile", action="store_true", help="compile and check, no times")
    parser.add_argument("--fp8", action="store_true", help="with a cache of float8_e4m3fn")
    parser.add_argument("cases", nargs="*", default=[*map(str, LENGTHS), *(f"offline{steps}" for steps in OFFLINE)])
    args = parser.parse_args()
    begin = time.time()
    jobs = list(dict.fromkeys(config for case in args.cases for config in configs(len(lengths_of(case)))))
    if DRY:
        bad = [compile_one(DecodeConfig(16, 16, 4, 2, 2, fused=fused, stream=stream)) for fused in (0, 1) for stream in (0, 1)]
    else:
        with multiprocessing.get_context("spawn").Pool(min(15, os.cpu_count() or 2)) as pool:
            bad = pool.map(compile_one, jobs, chunksize=1)
    print("\n".join([*filter(None, bad), f"compiled and checked {len(jobs)} after {time.time() - begin:.0f} s"]), flush=True)
    for case in args.cases if not args.compile else []:
        bench_case(case)
    print(f"done after {time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()

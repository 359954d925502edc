"""Decode attention by rings beside what ships: `python3 -P tests/gpu/bench_rings.py [--heads 32] [CASE...]`, cases as in `bench_decode.py`.

For each case microseconds inside the layers (as `bench_decode.py`) and of a chain of attention alone, with rotation and cache write.
`--profile`: when the kernels of a layer begin and end.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from dataclasses import astuple, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import bench_attention as bench
import bench_decode as decode
import torch

from modelrunner.kernels.attention.ring_rows import RingConfig, RingWork, ring_work
from modelrunner.kernels.attention.work_list import AttentionWork

DIM, KV_HEADS = bench.DIM, bench.KV_HEADS
CONFIGS = [RingConfig(2, 3, 128, 1), RingConfig(1, 4, 128, 2), RingConfig(1, 6, 128, 2)]


class RingLayers(decode.Layers):
    """Layers whose attention is by rings of a configuration, if there is one."""

    rings: RingWork | None = None

    def use(self, config: RingConfig | None) -> None:
        a, cache = self.step.arguments, self.step.caches[0]
        rows = (a["block_table"], a["query_len"], a["seq_len"])
        self.rings = None if config is None else ring_work(config, cache, decode.HEADS, *rows)

    def attend(self, qkv: torch.Tensor, cache: torch.Tensor, work: AttentionWork) -> torch.Tensor:
        return super().attend(qkv, cache, replace(work, rings=self.rings))


def bench_case(case: str) -> None:
    layers = RingLayers(decode.lengths_of(case), decode.LAYERS)
    base = bench.graph_us(lambda: layers.run(None), decode.LAYERS, 5)
    qkv = [torch.randn(layers.x.shape[0], (decode.HEADS + 2 * KV_HEADS) * DIM, device=bench.DEVICE).to(bench.DTYPE) for _ in range(4)]
    line = f"{case}: {layers.x.shape[0]} rows, floor {layers.bytes / bench.BYTES_PER_S * 1e6:.1f}, layer without {base:.1f} |"
    for shape in (None, *CONFIGS, None):
        work = layers.step.work()
        layers.use(shape)

        def alone() -> None:
            for i, cache in enumerate(layers.step.caches):
                layers.attend(qkv[i % 4], cache, work)  # noqa: B023

        try:
            inside = bench.graph_us(lambda: layers.run(work), decode.LAYERS, 5) - base  # noqa: B023
            line += f" {astuple(shape) if shape else 'before'} {inside:.1f} ({bench.graph_us(alone, decode.LAYERS, 5):.1f})"
        except Exception as error:
            line += f" {shape} {type(error).__name__} {str(error)[:200]}"
    print(line, flush=True)


def profile_case(case: str) -> None:
    """When the kernels of a layer begin and end, on average over a graph's layers."""
    layers = RingLayers(decode.lengths_of(case), decode.LAYERS)
    for shape in (None, CONFIGS[0]):
        work = layers.step.work()
        layers.use(shape)
        layers.run(work)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers.run(work)
        graph.replay()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
            graph.replay()
            torch.cuda.synchronize()
        found = sorted(
            (e.time_range.start, e.time_range.end, e.name) for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA
        )
        per = len(found) // decode.LAYERS
        found = found[-per * decode.LAYERS :]
        sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        chosen = range(4, decode.LAYERS - 1)
        for layer in chosen:
            zero = found[layer * per][0]
            for i in range(per):
                sums[i][0] += (found[layer * per + i][0] - zero) / len(chosen)
                sums[i][1] += (found[layer * per + i][1] - zero) / len(chosen)
        us = (found[(decode.LAYERS - 1) * per][0] - found[4 * per][0]) / (decode.LAYERS - 5)
        print(f"profile {case} {astuple(shape) if shape else 'before'}: {len(found)} kernels, layer {us:.1f} us")
        for i in range(per):
            print(f"    {sums[i][0]:7.2f} to {sums[i][1]:7.2f}  {found[8 * per + i][2][:50]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=16, help="16: Qwen3-0.6B; 32: 8B, of which 12 layers")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("cases", nargs="*")
    args = parser.parse_args()
    if args.heads == 32:
        decode.HEADS, decode.HIDDEN, decode.INNER, decode.LAYERS = 32, 4096, 12288, 12
        bench.make_step.__kwdefaults__["heads"] = (32, KV_HEADS, DIM)
    for case in args.cases:
        (profile_case if args.profile else bench_case)(case)


if __name__ == "__main__":
    main()

"""Decode attention by rings beside what ships: `python3 -P tests/gpu/bench_rings.py [--heads 32] [CASE...]`, cases as in `bench_decode.py`.

First both against float32 with poisoned memory; then, for each case, microseconds inside the layers (as `bench_decode.py`) and of a chain
of attention alone, with rotation and cache write.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import bench_attention as bench
import bench_decode as decode
import torch

from modelrunner.kernels.attention.deal import DealtRows, deal_rows
from modelrunner.kernels.attention.device import processors
from modelrunner.kernels.attention.ring_rows import ring_rows

DIM, PAGE, KV_HEADS = bench.DIM, bench.PAGE, bench.KV_HEADS
SHAPES = [(2, 3, 128, 2), (2, 3, 128, 4), (2, 3, 128, 1), (1, 6, 128, 4), (1, 4, 128, 4), (1, 3, 128, 4)]  # programs a multiprocessor, buffers, registers, warps that ask


class RingLayers(decode.Layers):
    """Layers whose attention is by rings, if `shape` is one."""

    shape: tuple[int, int, int, int] | None = None
    dealt: DealtRows

    def deal(self, shape: tuple[int, int, int, int] | None) -> None:
        self.shape, a = shape, self.step.arguments
        if shape is not None:
            programs = processors(bench.DEVICE) * shape[0]
            self.dealt = deal_rows(programs, KV_HEADS, decode.HEADS // KV_HEADS, DIM, PAGE, a["block_table"], a["query_len"], a["seq_len"])

    def attend(self, qkv: torch.Tensor, cache: torch.Tensor, work: object) -> torch.Tensor:
        if self.shape is None:
            return super().attend(qkv, cache, work)  # type: ignore[arg-type]
        out = torch.empty((qkv.shape[0], decode.HEADS, DIM), dtype=qkv.dtype, device=qkv.device)
        rotary, a = (self.head_norm, self.head_norm, self.cos_sin, 1e-6), self.step.arguments
        ring_rows(qkv, cache, out, a["slots"], a["block_table"], self.dealt, bench.SCALE, rotary, *self.shape[1:])
        return out


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    return wide.to(x.dtype) * weight


def turned(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    cos, sin = cos_sin[:, None].chunk(2, 2)
    a, b = x.float().chunk(2, 2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), 2).to(x.dtype)


def check(lengths: list[int], heads: int, shape: tuple[int, int, int, int]) -> float:
    """Largest difference from float32, relative to the tolerance of 1.6e-2. A length of 0 is a dead row."""
    rows, device, dtype = len(lengths), bench.DEVICE, bench.DTYPE
    step = bench.make_step([(max(n - 1, 0), 1) for n in lengths], 2, num_decode=rows)
    a, cache = step.arguments, step.caches[1]
    dead = torch.tensor([n == 0 for n in lengths], device=device)
    a["query_len"][dead], a["seq_len"][dead] = 0, 0
    position = (a["seq_len"].long() - 1).clamp(min=0)
    page = a["block_table"].gather(1, (position // PAGE).unsqueeze(1)).squeeze(1).long()
    slots = torch.where(dead, -1, page * PAGE + position % PAGE)
    for row, n in enumerate(lengths):  # what nobody wrote
        cache[page[row], max(n - 1, 0) % PAGE :] = float("nan")
    qkv = torch.randn(rows, (heads + 2 * KV_HEADS) * DIM, device=device).to(dtype)
    weights = [1 + torch.randn(DIM, device=device).to(dtype) / 4 for _ in range(2)]
    angle = torch.rand(rows, DIM // 2, device=device) * 7
    cos_sin = torch.cat((angle.cos(), angle.sin()), 1)
    dealt = deal_rows(processors(device) * shape[0], KV_HEADS, heads // KV_HEADS, DIM, PAGE, a["block_table"], a["query_len"], a["seq_len"])
    q, k, v = qkv.view(rows, -1, DIM).split((heads, KV_HEADS, KV_HEADS), 1)
    q, k = turned(normed(q, weights[0]), cos_sin), turned(normed(k, weights[1]), cos_sin)
    want_cache, worst = cache.clone(), 0.0
    live = ~dead
    want_cache[page[live], position[live] % PAGE] = torch.stack((k, v), 1)[live]
    for _ in range(2):
        dealt.outputs.fill_(float("nan")), dealt.sums.fill_(float("nan"))
        out = torch.full((rows, heads, DIM), float("nan"), dtype=dtype, device=device)
        ring_rows(qkv, cache, out, slots, a["block_table"], dealt, bench.SCALE, (*weights, cos_sin, 1e-6), *shape[1:])
        torch.cuda.synchronize()
        for row, n in enumerate(lengths):
            want = torch.zeros(heads, DIM, device=device)
            if n:
                kept = want_cache[a["block_table"][row, : -(-n // PAGE)].long()].flatten(0, 1)[:n].float().repeat_interleave(heads // KV_HEADS, 2)
                scores = torch.einsum("hd,shd->hs", q[row].float(), kept[:, 0]) * bench.SCALE
                want = torch.einsum("hs,shd->hd", scores.softmax(1), kept[:, 1])
            wrong = ((out[row].float() - want).abs() / (1.6e-2 + 1.6e-2 * want.abs())).nan_to_num(1e9).max()
            worst = max(worst, float(wrong))
        same = ((cache.float() - want_cache.float()).abs() <= 1e-2 + 1e-2 * want_cache.float().abs()) | (cache.isnan() & want_cache.isnan())
        worst = max(worst, 0.0 if same.all() else 1e6)
    return worst


def checks() -> None:
    cases = {
        "odd": [1, 2, 15, 16, 17, 18, 63, 64, 65, 66, 0, 129, 1000, 0],
        "one": [1], "long": [3000], "dead": [0, 0], "few": [700, 5, 1300],
        "many": torch.randint(300, 500, (128,)).tolist(), "short": torch.randint(1, 40, (256,)).tolist(),
    }  # fmt: skip
    for heads in (16, 32):
        for shape in SHAPES:
            found = {name: round(check(lengths, heads, shape), 3) for name, lengths in cases.items()}
            print("BAD" if not max(found.values()) <= 1 else "good", heads, shape, found, flush=True)


def bench_case(case: str) -> None:
    layers = RingLayers(decode.lengths_of(case), decode.LAYERS)
    base = bench.graph_us(lambda: layers.run(None), decode.LAYERS, 5)
    qkv = [torch.randn(layers.x.shape[0], (decode.HEADS + 2 * KV_HEADS) * DIM, device=bench.DEVICE).to(bench.DTYPE) for _ in range(4)]
    line = f"{case}: {layers.x.shape[0]} rows, floor {layers.bytes / bench.BYTES_PER_S * 1e6:.1f}, layer without {base:.1f} |"
    for shape in (None, *SHAPES, None):
        work = layers.step.work()
        layers.deal(shape)

        def alone() -> None:
            for i, cache in enumerate(layers.step.caches):
                layers.attend(qkv[i % 4], cache, work)  # noqa: B023

        try:
            inside = bench.graph_us(lambda: layers.run(work), decode.LAYERS, 5) - base  # noqa: B023
            line += f" {shape or 'shipped'} {inside:.1f} ({bench.graph_us(alone, decode.LAYERS, 5):.1f})"
        except Exception as error:
            line += f" {shape} {type(error).__name__} {str(error)[:200]}"
    print(line, flush=True)


def profile_case(case: str) -> None:
    """When the kernels of a layer begin and end, on average over a graph's layers."""
    from collections import defaultdict

    layers = RingLayers(decode.lengths_of(case), decode.LAYERS)
    for shape in (None, SHAPES[0]):
        work = layers.step.work()
        layers.deal(shape)
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
        found = sorted((e.time_range.start, e.time_range.end, e.name) for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA)
        per = len(found) // decode.LAYERS
        found = found[-per * decode.LAYERS :]
        sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        chosen = range(4, decode.LAYERS - 1)
        for layer in chosen:
            zero = found[layer * per][0]
            for i in range(per):
                sums[i][0] += (found[layer * per + i][0] - zero) / len(chosen)
                sums[i][1] += (found[layer * per + i][1] - zero) / len(chosen)
        print(f"profile {case} {shape or 'shipped'}: {len(found)} kernels, layer {(found[(decode.LAYERS - 1) * per][0] - found[4 * per][0]) / (decode.LAYERS - 5):.1f} us")
        for i in range(per):
            print(f"    {sums[i][0]:7.2f} to {sums[i][1]:7.2f}  {found[8 * per + i][2][:50]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=16, help="16: Qwen3-0.6B; 32: 8B, of which 12 layers")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("cases", nargs="*")
    args = parser.parse_args()
    if args.check:
        checks()
    if args.heads == 32:
        decode.HEADS, decode.HIDDEN, decode.INNER, decode.LAYERS = 32, 4096, 12288, 12
        bench.make_step.__kwdefaults__["heads"] = (32, KV_HEADS, DIM)
    for case in args.cases:
        (profile_case if args.profile else bench_case)(case)


if __name__ == "__main__":
    main()

"""Checks and times the attention kernels against what memory or the tensor cores allow: `python3 -P tests/gpu/bench_attention.py`.

Times are of CUDA graphs that run one launch for each of several layers' caches, so that the second-level cache does not help. Shapes:
Qwen3-0.6B (16 heads, 8 key heads, head size 128, pages of 16 tokens), bfloat16. `--dry` runs all of it once, tiny, in the interpreter.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402

from modelrunner.kernels import attention as reference  # noqa: E402
from modelrunner.kernels.attention import gpu, work_list  # noqa: E402
from modelrunner.kernels.attention.prefill_list import PrefillConfig, choose_gathered  # noqa: E402
from modelrunner.kernels.attention.work_list import DecodeConfig  # noqa: E402

HEADS, KV_HEADS, DIM, PAGE = (4, 2, 16, 4) if DRY else (16, 8, 128, 16)
DTYPE = torch.float32 if DRY else torch.bfloat16
DEVICE = torch.device("cpu" if DRY else "cuda")
SCALE = DIM**-0.5
BYTES_PER_S, FLOPS_PER_S = 4.29e12, 650e12
DECODE = {
    "1x1100": (1, 1100),
    "8x600": (8, 600),
    "32x600": (32, 600),
    "128x400": (128, 400),
    "256x600": (256, 600),
    "1024x290": (1024, 290),
    "1x32768": (1, 32768),
}
CHUNKS = (64, 128, 256, 512, 1024)
# block_keys, warps, stages, programs per multiprocessor
DECODE_KERNELS = [(64, 4, 1, 2), (64, 4, 3, 2), (64, 4, 4, 2), (32, 4, 4, 3), (32, 4, 6, 3), (32, 2, 4, 4), (64, 8, 4, 2), (128, 8, 3, 1)]
PREFILL = {
    "2x8192": [(0, 8192)] * 2,
    "8192+8192": [(8192, 8192)],
    "2048+0": [(0, 2048)],
    "2048+6144": [(6144, 2048)],
    "448+6144": [(6144, 448)],
    "448+0": [(0, 448)],
    "960+6144": [(6144, 960)],
    "16x1024": [(0, 1024)] * 16,
    "512x32": [(0, 32)] * 512,
}
PREFILL_KERNELS = [
    (128, 64, 8, 2, 1),
    (128, 64, 8, 3, 1),
    (128, 64, 8, 4, 1),
    (128, 128, 8, 2, 1),
    (128, 128, 8, 3, 1),
    (64, 64, 4, 2, 2),
    (64, 64, 4, 3, 2),
    (64, 128, 4, 2, 1),
    (128, 32, 4, 3, 2),
    (128, 64, 8, 2, 1, True),
    (128, 64, 8, 3, 1, True),
    (128, 64, 8, 4, 1, True),
    (128, 32, 8, 4, 1, True),
    (64, 64, 4, 2, 2, True),
    (64, 64, 4, 3, 2, True),
    (128, 64, 4, 2, 2, True),
]


@dataclass
class Step:
    """Rows of (computed, query) tokens over the caches of some layers: arguments of `attention_index`, and of `build_work`."""

    q: torch.Tensor
    caches: list[torch.Tensor]
    arguments: dict[str, torch.Tensor]
    limits: dict[str, Any]

    def work(self, decode: DecodeConfig | None = None, prefill: PrefillConfig | None = None) -> work_list.AttentionWork:
        a, n = self.arguments, self.limits
        limits = (n["num_decode"], n["decode_query"], n["max_seq_len"], n["window"])
        bounds = (self.q.shape[1], a["query_len"].shape[0] - n["num_decode"], n["max_query"], n["max_seq_len"], n["window"])
        prefill = prefill or choose_gathered(self.caches[0], *bounds, self.q.dtype)
        rows = (a["block_table"], a["query_start"], a["query_len"], a["seq_len"], a["slots"])
        return work_list.build_work(self.caches[0], *rows, self.q.shape[1], limits, self.q.dtype, decode, prefill)


def make_step(
    rows: list[tuple[int, int]],
    layers: int,
    *,
    num_decode: int = 0,
    decode_query: int = 1,
    window: int | None = None,
    heads: tuple[int, int, int] = (HEADS, KV_HEADS, DIM),
    dtype: torch.dtype = DTYPE,
    kept: torch.dtype | None = None,
) -> Step:
    """Pages in random order over an arena of all layers. kept: type of the cache, if another."""
    lengths = torch.tensor([done + query for done, query in rows])
    query_len = torch.tensor([query for _, query in rows])
    pages = -(-lengths // PAGE)
    num_pages = int(pages.sum()) + 1
    arena = torch.randn(num_pages, layers, PAGE, 2, heads[1], heads[2], dtype=dtype, device=DEVICE)
    arena[0] = 0
    arena = arena.to(kept or dtype)
    table = torch.zeros(len(rows), int(pages.max()), dtype=torch.int32)
    order = (torch.randperm(num_pages - 1) + 1).to(torch.int32)
    end = pages.cumsum(0)
    for i in range(len(rows)):
        table[i, : pages[i]] = order[end[i] - pages[i] : end[i]]
    slots_of = torch.where(torch.arange(len(rows)) < num_decode, decode_query, query_len)
    start = torch.cat((torch.zeros(1, dtype=torch.int64), slots_of.cumsum(0)))
    num_tokens = int(start[-1])
    token_row = torch.repeat_interleave(torch.arange(len(rows)), slots_of)
    slots = torch.zeros(num_tokens, dtype=torch.int64)
    q = torch.randn(num_tokens, heads[0], heads[2], dtype=dtype, device=DEVICE)
    lens = {"query_start": start.int(), "query_len": query_len.int(), "seq_len": lengths.int()}
    arguments = {"block_table": table, **lens, "token_row": token_row, "slots": slots}
    limits = {"num_decode": num_decode, "decode_query": decode_query, "window": window}
    limits |= {"max_query": int(query_len.max()), "max_seq_len": int(lengths.max())}
    return Step(q, [arena[:, i] for i in range(layers)], {k: v.to(DEVICE) for k, v in arguments.items()}, limits)


def worst(step: Step, softcap: float | None = None, sinks: torch.Tensor | None = None, **configs: Any) -> float:
    """Largest difference from the reference, relative to the tolerance of 1.6e-2. Of live tokens; the others must be finite."""
    index = reference.attention_index(step.caches[-1], **step.arguments, num_heads=step.q.shape[1], dtype=step.q.dtype, **step.limits)
    want = reference.indexed_attention(step.q, step.caches[-1], index, scale=SCALE, softcap=softcap, sinks=sinks).float()
    got = gpu.indexed_attention(step.q, step.caches[-1], step.work(**configs), scale=SCALE, softcap=softcap, sinks=sinks).float()
    assert torch.isfinite(got).all()
    a = step.arguments
    token = torch.arange(got.shape[0], device=DEVICE) - a["query_start"][a["token_row"]]
    wrong = (got - want).abs() / (1.6e-2 + 1.6e-2 * want.abs())
    return float(wrong[token < a["query_len"][a["token_row"]]].max())


def check() -> None:
    """All kinds of steps against the reference; prints the worst, fails above 1."""
    small = 1 if DRY else 20
    mixed = [(37 * small, 1), (3, 1), (100 * small, 1), (0, 23), (30, 11 * small), (7, 1), (0, 40 * small)]
    found = {}
    for window in (None, 9, 100):
        for name, extra in {"plain": {}, "softcap": {"softcap": 20.0}, "sinks": {"sinks": torch.randn(HEADS, device=DEVICE)}}.items():
            found[f"{name}-{window}"] = worst(make_step(mixed, 2, num_decode=3, window=window), **extra)
    drafts = [(20 * small, 4), (33, 1), (5, 3), (47 * small, 3)]
    found["drafts"] = worst(make_step(drafts, 2, num_decode=4, decode_query=4))
    for heads in ((9, 3, 64), (8, 8, 96), (16, 2, 128), (8, 4, 256)):
        if not DRY:
            found[f"heads-{heads}"] = worst(make_step(mixed, 2, num_decode=3, heads=heads))
            found[f"fp16-{heads}"] = worst(make_step(mixed, 2, num_decode=3, heads=heads, dtype=torch.float16))
    for chunk in CHUNKS[:3]:
        rows = [(150 if DRY else 1500, 1), (70, 1)]
        found[f"chunk-{chunk}"] = worst(make_step(rows, 1, num_decode=2), decode=DecodeConfig(chunk, 64, 4, 5, 2))
    bad = {name: value for name, value in found.items() if not value <= 1}
    print(f"check: {len(found)} steps, worst {max(found.values()):.3f} of the tolerance", f"BAD {bad}" if bad else "", flush=True)
    if bad:
        raise SystemExit(1)


def graph_us(launch: Callable[[], object], count: int, repeats: int = 10) -> float:
    """Microseconds of one of the `count` launches that `launch` does, in a graph: the best of `repeats` replays."""
    launch()
    if DRY:
        return 1.0
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    best = float("inf")
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / count)
    return best


def attention_us(step: Step, work: work_list.AttentionWork) -> float:
    def launch() -> None:
        for cache in step.caches:
            gpu.indexed_attention(step.q, cache, work, scale=SCALE)

    return graph_us(launch, len(step.caches))


def decode_layers(rows: int, length: int) -> int:
    """Layers whose caches together are far larger than the second-level cache."""
    size = rows * length * 2 * KV_HEADS * DIM * 2
    return 2 if DRY else min(28, max(3, -(-400_000_000 // size)))


def bench_decode(shapes: list[str], quick: bool) -> None:
    kernels = DECODE_KERNELS[:2] if DRY or quick else DECODE_KERNELS
    for name in shapes:
        rows, length = DECODE[name] if not DRY else (2, 40)
        # Lengths that differ, as those of requests do; their mean is the shape's.
        lengths = torch.randint(length * 3 // 4, length * 5 // 4 + 1, (rows,)).tolist() if rows > 1 else [length]
        step = make_step([(n - 1, 1) for n in lengths], decode_layers(rows, length), num_decode=rows)
        floor = sum(lengths) * 2 * KV_HEADS * DIM * 2 / BYTES_PER_S * 1e6
        shipped = attention_us(step, step.work())
        config = step.work().decode.config
        print(f"decode {name}: floor {floor:.2f} us; shipped {config}: {shipped:.2f} us = {floor / shipped:.0%}", flush=True)
        for block, warps, stages, programs in kernels:
            cells = []
            for chunk in CHUNKS:
                if chunk < block or (stages == 1) != (chunk == block) or (rows > 16 and chunk < 256 and stages != 1):
                    continue
                us = attention_us(step, step.work(decode=DecodeConfig(chunk, block, warps, stages, programs, hold=stages == 1)))
                cells.append(f"{chunk}: {us:.2f} ({floor / us:.0%})")
            if cells:
                print(f"    block {block} warps {warps} stages {stages} programs {programs}  chunk " + "  ".join(cells), flush=True)
        capped = step.limits["max_seq_len"]
        step.limits["max_seq_len"] = 40 if DRY else 32768
        us, list_us = attention_us(step, step.work()), graph_us(step.work, 1)
        print(f"    bound 32768 as in a captured step: {us:.2f} us; list {list_us:.2f} us", flush=True)
        step.limits["max_seq_len"] = capped
        del step


def bench_chain(shapes: list[str]) -> None:
    """qkv_rope_write and attention after each other, as a layer runs them."""
    for name in shapes:
        rows, length = DECODE[name] if not DRY else (2, 40)
        step = make_step([(length - 1, 1)] * rows, decode_layers(rows, length), num_decode=rows)
        table, a = step.arguments["block_table"], step.arguments
        a["slots"] = (table[:, (length - 1) // PAGE].long() * PAGE + (length - 1) % PAGE).contiguous()
        qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * DIM, dtype=DTYPE, device=DEVICE)
        norm, cos_sin = torch.ones(DIM, dtype=DTYPE, device=DEVICE), torch.randn(rows, DIM, device=DEVICE)
        work = step.work()

        def write(cache: torch.Tensor) -> torch.Tensor:
            return gpu.qkv_rope_write(qkv, HEADS, KV_HEADS, norm, norm, 1e-6, cos_sin, cache, a["slots"], work)  # noqa: B023

        def both() -> None:
            for cache in step.caches:  # noqa: B023
                gpu.indexed_attention(write(cache), cache, work, scale=SCALE)  # noqa: B023

        def writes() -> None:
            for cache in step.caches:  # noqa: B023
                write(cache)

        layers = len(step.caches)
        print(f"chain {name}: qkv_rope_write {graph_us(writes, layers):.2f} us, with attention {graph_us(both, layers):.2f} us", flush=True)


def prefill_flops(rows: list[tuple[int, int]]) -> float:
    pairs = sum(query * done + query * (query + 1) / 2 for done, query in rows)
    return 4 * pairs * HEADS * DIM


def sdpa_us(rows: list[tuple[int, int]]) -> float:
    """PyTorch's own attention on contiguous keys and values, where all rows are alike and start at 0."""
    n, length = len(rows), rows[0][1]
    q, k, v = (torch.randn(n, HEADS, length, DIM, dtype=DTYPE, device=DEVICE) for _ in range(3))
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch.nn.attention.SDPBackend.MATH]):
        return graph_us(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), 1)


def bench_prefill(shapes: list[str], quick: bool) -> None:
    kernels = [PREFILL_KERNELS[0], PREFILL_KERNELS[-1]] if DRY or quick else PREFILL_KERNELS
    for name in shapes:
        rows = PREFILL[name] if not DRY else [(8, 20), (0, 9)]
        step, flops = make_step(rows, 2), prefill_flops(rows)
        shipped = attention_us(step, step.work())
        line = f"prefill {name}: floor {flops / FLOPS_PER_S * 1e6:.0f} us; shipped {shipped:.1f} us = {flops / shipped / 1e6:.0f} TFLOP/s"
        if rows[0][0] == 0:
            us = sdpa_us(rows)
            line += f"; SDPA {us:.1f} us = {flops / us / 1e6:.0f}"
        print(f"{line}; list {graph_us(step.work, 1):.1f} us", flush=True)
        for shape in kernels:
            try:
                us = attention_us(step, step.work(prefill=PrefillConfig(*shape)))
            except Exception as error:
                print(f"    {shape}: {type(error).__name__} {str(error)[:80]}")
                continue
            names = "queries {} keys {} warps {} stages {} programs {} gathered {}".format(*shape, *([False] if len(shape) == 5 else []))
            print(f"    {names}: {us:.1f} us = {flops / us / 1e6:.0f} TFLOP/s", flush=True)


def compile_one(shape: tuple[int, ...]) -> None:
    """Fill Triton's cache on disk."""
    if len(shape) == 4:
        step = make_step([(300, 1)] * 2, 1, num_decode=2)
        chunk = shape[0] if shape[2] == 1 else 2 * shape[0]
        work = step.work(decode=DecodeConfig(chunk, *shape, hold=shape[2] == 1))
    else:
        step = make_step([(300, 20)], 1)
        work = step.work(prefill=PrefillConfig(*shape))
    try:
        gpu.indexed_attention(step.q, step.caches[0], work, scale=SCALE)
        torch.cuda.synchronize()
    except Exception as error:
        print(f"    {shape} does not run: {type(error).__name__} {str(error)[:100]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny, in the interpreter; no times")
    parser.add_argument("--quick", action="store_true", help="few configurations")
    parser.add_argument("--decode", nargs="*", default=list(DECODE), help="shapes")
    parser.add_argument("--prefill", nargs="*", default=list(PREFILL), help="shapes")
    parser.add_argument("--no-check", action="store_true")
    args = parser.parse_args()
    begin = time.time()
    if not DRY and not args.quick:
        with multiprocessing.get_context("spawn").Pool(8) as pool:
            pool.map(compile_one, (DECODE_KERNELS if args.decode else []) + (PREFILL_KERNELS if args.prefill else []), chunksize=1)
        print(f"compiled after {time.time() - begin:.0f} s", flush=True)
    if not args.no_check:
        check()
    bench_decode(args.decode[:2] if DRY else args.decode, args.quick)
    bench_chain(args.decode[:1] if DRY else args.decode)
    bench_prefill(args.prefill[:1] if DRY else args.prefill, args.quick)
    print(f"done after {time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()

"""Compares the attention backends phase by phase: `python3 -P tests/gpu/bench_backends.py [decode] [prompts] [mixed]`.

Each runs `attend_qkv` of several layers, as a model does: norms, rotation, cache write, attention. Shapes: Qwen3-0.6B (16 heads, 8 key
heads, head size 128, pages of 16 tokens), bfloat16. Decode steps have the bounds of a captured step and are timed as a graph, steps with
prompts as they run, eagerly; `begin` is the time of one step's metadata, host or device, whichever is longer. Before that, results are
compared with those of `paged`. `--dry`: tiny, without times, with doubles of the packages if there is no GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
DRY = "--dry" in sys.argv
if DRY:
    sys.path += [str(Path(__file__).parents[1] / "plugins" / name) for name in ("flashinfer_double", "fa3_double")]

import bench_attention as bench  # noqa: E402

from modelrunner.attention import AttentionBackend, AttentionMeta, Rotary  # noqa: E402
from modelrunner.batch import Prompts  # noqa: E402
from modelrunner.model_state import FullAttention  # noqa: E402
from modelrunner.ops import Ops, Registry  # noqa: E402
from modelrunner.plugins import reference_kernels, triton_kernels  # noqa: E402
from modelrunner.settings import load_settings  # noqa: E402

HEADS, KV_HEADS, DIM, PAGE, DTYPE, DEVICE = bench.HEADS, bench.KV_HEADS, bench.DIM, bench.PAGE, bench.DTYPE, bench.DEVICE
BOUND = 64 if DRY else 4096  # tokens, of the longest request
DECODE = {1: 1100, 8: 600, 32: 600, 128: 400, 1024: 290}
PROMPTS = {
    "2 x 8192": [(0, 8192)] * 2,
    "2048 after 6144": [(6144, 2048)],
    "4 x 4096": [(0, 4096)] * 4,
    "8 x 2048": [(0, 2048)] * 8,
    "16 x 1024": [(0, 1024)] * 16,
    "32 x 512": [(0, 512)] * 32,
    "64 x 256": [(0, 256)] * 64,
    "2048 alone": [(0, 2048)],
}
MIXED = {  # decode rows, and prompts
    "64 x 600 and 8192": ([(599, 1)] * 64, [(0, 8192)]),
    "64 x 600 and 448 after 6144": ([(599, 1)] * 64, [(6144, 448)]),
    "200 x 600 and 28 x 560": ([(599, 1)] * 200, [(0, 560)] * 28),
}


def operations() -> Ops:
    """The operations of the device, as an engine has them."""
    registry = Registry()
    device: Any = SimpleNamespace(type=DEVICE.type, name=DEVICE.type, torch_device=DEVICE, settings=load_settings({}))
    for plugin in (reference_kernels, triton_kernels):
        plugin.kernels(register=registry, device=device)
    return registry.resolve(DEVICE.type)


@dataclass
class Case:
    cache: torch.Tensor
    meta: AttentionMeta
    qkv: torch.Tensor
    rotary: Rotary

    @property
    def layers(self) -> int:
        return self.cache.shape[1]


def make_case(decode: list[tuple[int, int]], prompts: list[tuple[int, int]], layers: int, bound: int | None = None) -> Case:
    """Rows of (computed, query) tokens. bound: of their lengths, as in a step made for a graph."""
    rows = decode + prompts
    length = np.array([done + query for done, query in rows], np.int32)
    query = np.array([query for _, query in rows], np.int32)
    pages = -(-length // PAGE)
    start = np.concatenate([[0], np.cumsum(query)]).astype(np.int32)
    width = -(-(bound or int(length.max())) // PAGE)
    table = np.zeros((len(rows), width), np.int32)
    order, at = np.random.default_rng(0).permutation(int(pages.sum())).astype(np.int32) + 1, 0
    for row, count in enumerate(pages):
        table[row, :count] = order[at : at + count]
        at += int(count)
    row = np.repeat(np.arange(len(rows)), query)
    position = np.arange(int(start[-1])) - start[row] + (length - query)[row]
    slots = table[row, position // PAGE].astype(np.int64) * PAGE + position % PAGE
    put = [torch.from_numpy(a).to(DEVICE) for a in (start, query, length, row, position.astype(np.int64), slots, table)]
    limits = (len(rows), int(start[-1]), len(decode), 1, int(query.max()), bound or int(length.max()))
    known = Prompts(query[len(decode) :], length[len(decode) :]) if prompts and bound is None else None
    meta = AttentionMeta(*limits, *put, captured=bound is not None, prompts=known)
    cache = torch.randn(int(pages.sum()) + 1, layers, PAGE, 2, KV_HEADS, DIM, device=DEVICE).to(DTYPE)
    cache[0] = 0
    qkv = torch.randn(int(start[-1]), (HEADS + 2 * KV_HEADS) * DIM, dtype=DTYPE, device=DEVICE)
    angle = torch.rand(int(start[-1]), DIM // 2, device=DEVICE) * 6
    norm = torch.ones(DIM, dtype=DTYPE, device=DEVICE)
    return Case(cache, meta, qkv, Rotary(torch.cat((angle.cos(), angle.sin()), 1), norm, norm, 1e-6))


def backends() -> dict[str, type[AttentionBackend]]:
    """Those whose packages are there, the built-in one first."""
    found = {}
    for name, kind in {"paged": "PagedAttention", "flash_attention3": "FlashAttention3", "flashinfer": "FlashInfer"}.items():
        package = {"flash_attention3": "fa3_fwd_interface", "flashinfer": "flashinfer"}.get(name)
        try:
            if package:
                import_module(package)
        except ImportError as error:
            print(f"{name}: {error}")
            continue
        found[name] = getattr(import_module(f"modelrunner.backends.{name}"), kind)
    return found


def start(kind: type[AttentionBackend], case: Case, cache: torch.Tensor | None = None) -> AttentionBackend:
    group = FullAttention("full", tuple(range(case.layers)), HEADS, KV_HEADS, DIM, DIM**-0.5)
    return kind(group, case.cache if cache is None else cache, operations(), DTYPE)


def check(kinds: dict[str, type[AttentionBackend]]) -> None:
    """Every backend's outputs and cache against those of `paged`; raises SystemExit above the tolerance."""
    small = 1 if DRY else 20
    decode, prompts = [(37 * small, 1), (0, 1), (100, 1)], [(0, 23), (30, 11 * small), (7, 1), (0, 40 * small), (100 * small, 300)]
    worst: dict[str, float] = {}
    for rows, tail, bound in ((decode, prompts, None), ([], prompts, None), (decode, [], 256 * small)):
        case = make_case(rows, tail, 2, bound)
        want: list[torch.Tensor] = []
        for name, kind in kinds.items():
            cache = case.cache.clone()
            backend = start(kind, case, cache)
            step = backend.begin(case.meta)
            outs = [backend.attend_qkv(case.qkv, case.rotary, layer, step).float() for layer in (0, 1)] + [cache.float()]
            want = want or outs
            wrong = max(float(((got - ref).abs() / (1.6e-2 + 1.6e-2 * ref.abs())).max()) for got, ref in zip(outs, want, strict=True))
            worst[name] = max(worst.get(name, 0.0), wrong)
    print("check, worst in parts of the tolerance:", {name: round(wrong, 3) for name, wrong in worst.items()}, flush=True)
    if not all(wrong <= 1 for wrong in worst.values()):
        raise SystemExit("results differ")


def eager_us(launch: Callable[[], object], count: int, repeats: int = 10) -> float:
    """Microseconds of one of the `count` launches that `launch` does: the best of `repeats`."""
    launch()
    if DRY:
        return 1.0
    best = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # so that the host is ahead
        begin.record()
        launch()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / count)
    return best


def begin_us(backend: AttentionBackend, meta: AttentionMeta) -> float:
    if not DRY:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(20):
        backend.begin(meta)
    if not DRY:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / 20 * 1e6


def compare(title: str, case: Case, kinds: dict[str, type[AttentionBackend]], timed: Callable[..., float]) -> None:
    cells = []
    for name, kind in kinds.items():
        backend = start(kind, case)
        step = backend.begin(case.meta)

        def launch(backend: AttentionBackend = backend, step: Any = step) -> None:
            for layer in range(case.layers):
                backend.attend_qkv(case.qkv, case.rotary, layer, step)

        cells.append(f"{name} {timed(launch, case.layers):.1f} (begin {begin_us(backend, case.meta):.0f})")
    print(f"{title}: " + ", ".join(cells), flush=True)


def wrapper_us(case: Case) -> str:
    """FlashInfer's decode wrapper, which is planned on the host for each step: its launch, and its plan."""
    flashinfer = import_module("flashinfer")
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE)
    length = case.meta.seq_len.cpu()
    pages = -(-length // PAGE)
    indptr = torch.cat((torch.zeros(1, dtype=torch.int32), pages.cumsum(0, dtype=torch.int32)))
    table = case.meta.block_table
    indices = torch.cat([table[row, :count] for row, count in enumerate(pages.tolist())])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_cuda_graph=True, paged_kv_indptr_buffer=indptr.to(DEVICE), paged_kv_indices_buffer=indices.clone(),
        paged_kv_last_page_len_buffer=length.to(DEVICE), use_tensor_cores=False, backend="fa2",
    )  # fmt: skip

    def plan() -> None:
        last = length - (pages - 1) * PAGE
        wrapper.plan(indptr, indices, last, HEADS, KV_HEADS, DIM, PAGE, q_data_type=DTYPE, kv_data_type=DTYPE, sm_scale=DIM**-0.5)

    plan()
    begin = time.perf_counter()
    for _ in range(10):
        plan()
    host = (time.perf_counter() - begin) / 10 * 1e6
    q = case.qkv[:, : HEADS * DIM].unflatten(1, (HEADS, DIM)).contiguous()

    def launch() -> None:
        for layer in range(case.layers):
            wrapper.run(q, tuple(case.cache[:, layer].unbind(2)))

    return f"{bench.graph_us(launch, case.layers):.1f}, plan {host:.0f}"


def bench_decode(kinds: dict[str, type[AttentionBackend]]) -> None:
    kinds = {name: kind for name, kind in kinds.items() if name != "flash_attention3"}  # decodes as paged
    for rows, length in DECODE.items():
        spread = np.random.default_rng(rows).integers(length * 3 // 4, length * 5 // 4 + 1, rows).tolist() if rows > 1 else [length]
        lengths = [20] * min(rows, 3) if DRY else spread
        case = make_case([(n - 1, 1) for n in lengths], [], bench.decode_layers(len(lengths), length), BOUND)
        floor = sum(lengths) * 2 * KV_HEADS * DIM * 2 / bench.BYTES_PER_S * 1e6
        compare(f"decode {rows} x {length}, floor {floor:.1f}", case, kinds, bench.graph_us)
        if "flashinfer" in kinds and not DRY:
            try:
                print(f"    FlashInfer's decode wrapper, attention alone: {wrapper_us(case)}", flush=True)
            except Exception as error:
                print(f"    FlashInfer's decode wrapper: {type(error).__name__} {str(error)[:200]}", flush=True)


def bench_prompts(kinds: dict[str, type[AttentionBackend]]) -> None:
    for name, rows in PROMPTS.items():
        case = make_case([], [(done // 100, query // 100) for done, query in rows[:2]] if DRY else rows, 4)
        floor = bench.prefill_flops(rows) / bench.FLOPS_PER_S * 1e6
        compare(f"prompts {name}, floor {floor:.0f}", case, kinds, eager_us)


def bench_mixed(kinds: dict[str, type[AttentionBackend]]) -> None:
    for name, (decode, prompts) in MIXED.items():
        if DRY:
            decode, prompts = [(20, 1)] * 2, [(3, 12)]
        compare(f"mixed {name}", make_case(decode, prompts, 4), kinds, eager_us)


def main() -> None:
    kinds = backends()
    check(kinds)
    parts = {"decode": bench_decode, "prompts": bench_prompts, "mixed": bench_mixed}
    for name in [name for name in sys.argv[1:] if name in parts] or parts:
        parts[name](kinds)


if __name__ == "__main__":
    main()

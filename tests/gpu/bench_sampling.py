"""Checks and times the kernels for sampling and log-probs on a GPU: `python tests/gpu/bench_sampling.py [--dry] [--logprobs] [--masks]`.

Times are of CUDA graphs with several copies of the operation over different logits, in microseconds a call; GB/s: one read of the logits
over that time. --dry: in Triton's interpreter, with small sizes and no times. --logprobs: log-probs alone. --masks:
masks of structured output alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402

from modelrunner.kernels.logits import gpu as logits_gpu  # noqa: E402
from modelrunner.kernels.logits import reference as logits_reference  # noqa: E402
from modelrunner.kernels.logprobs import gpu as logprobs_gpu  # noqa: E402
from modelrunner.kernels.logprobs import reference as logprobs_reference  # noqa: E402
from modelrunner.kernels.sampling import gpu, reference, scan  # noqa: E402

VOCAB = 331 if DRY else 151936
ROWS = (1, 3) if DRY else (1, 8, 32, 128, 256, 1024)
DTYPE = torch.float32 if DRY else torch.bfloat16
DEVICE = "cpu" if DRY else "cuda"
greedy, sample = gpu.OVERRIDES["greedy"], gpu.OVERRIDES["sample"]


def columns(n: int, top_k: int | None, top_p: float | None, temperature: float) -> dict[str, torch.Tensor | None]:
    """Arguments of `sample` beside the logits."""

    def full(value: float | None, dtype: torch.dtype) -> torch.Tensor | None:
        return None if value is None else torch.full((n,), value, dtype=dtype, device=DEVICE)

    return {
        "temperature": full(temperature, torch.float32),
        "top_k": full(top_k, torch.int32),
        "top_p": full(top_p, torch.float32),
        "min_p": None,
        "seed": torch.randint(-(2**62), 2**62, (n,), device=DEVICE),
        "position": torch.randint(0, 9999, (n,), dtype=torch.int32, device=DEVICE),
        "choice": torch.zeros(n, dtype=torch.int32, device=DEVICE),
    }


KINDS: dict[str, tuple[int | None, float | None] | None] = {
    "greedy": None,
    "plain": (None, None),
    "k20 p.95": (20, 0.95),
    "k200": (200, None),
    "p.95": (None, 0.95),
}
# What the logits look like: spread of normal numbers, and how far ten tokens stand out.
SHAPES = {"flat": (0.6, 0.0), "real": (2.5, 12.0)}


def logits_of(n: int, shape: str) -> torch.Tensor:
    spread, ahead = SHAPES[shape]
    made = torch.randn(n, VOCAB, device=DEVICE) * spread
    chosen = torch.randint(0, VOCAB, (n, 10), device=DEVICE)
    return made.scatter_add_(1, chosen, ahead + torch.randn(n, 10, device=DEVICE) * 2 * (ahead > 0)).to(DTYPE)


def call_of(kind: str, n: int, temperature: float) -> tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]:
    found = KINDS[kind]
    if found is None:
        return greedy, reference.greedy, {}
    return sample, reference.sample, columns(n, *found, temperature)


def check(n: int, shape: str, temperature: float) -> list[str]:
    """Lines about rows that differ from the reference."""
    lines, logits = [], logits_of(n, shape)
    for kind in KINDS:
        ours, theirs, arguments = call_of(kind, n, temperature)
        (tokens, ok), (want, want_ok) = ours(logits, **arguments), theirs(logits, **arguments)
        wrong = int((tokens != want).sum())
        if wrong or not torch.equal(ok, want_ok):
            lines.append(f"{kind} {shape} n={n} T={temperature}: {wrong} tokens differ, ok equal {torch.equal(ok, want_ok)}")
    return lines


def time_of(kind: str, n: int, shape: str, temperature: float) -> float:
    """Microseconds a call. Large batches read memory that the L2 cache does not hold; small ones find it there, as behind the head."""
    ours, _, arguments = call_of(kind, n, temperature)
    given = [logits_of(n, shape) for _ in range(2)]
    return microseconds(lambda i: ours(given[i % 2], **arguments), 20 if n <= 32 else 5)


def microseconds(call: Callable[[int], Any], copies: int) -> float:
    for i in range(2):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            call(i)
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / copies)
    return statistics.median(times[2:])


def sweep() -> None:
    """Times of the scan alone, by groups at a time and how often."""
    shapes = [(tile, steps) for tile in (8, 16, 32) for steps in (1, 2, 4)]
    print("scan alone, us: " + " ".join(f"{s!s:>9}" for s in shapes))
    for n in (1, 32, 256, 1024):
        for noise in (False, True):
            times = [microseconds(scan_of(n, noise, shape), 20 if n <= 32 else 5) for shape in shapes]
            print(f"{n:5} {'masses' if noise else 'peaks':>9} " + " ".join(f"{t:9.1f}" for t in times), flush=True)


def scan_of(n: int, noise: bool, shape: tuple[int, int]) -> Callable[[int], None]:
    """A call of the scan with so many groups at a time and steps."""
    given, drawn = [logits_of(n, "flat") for _ in range(2)], columns(n, None, None, 0.6)
    inputs = scan.Columns(**drawn) if noise else None  # type: ignore[arg-type]
    tile, steps = shape

    def call(i: int) -> None:
        own = scan.TILE, scan.scan_steps
        scan.TILE, scan.scan_steps = tile, lambda n, groups: steps
        scan.scan(given[i % 2], inputs)
        scan.TILE, scan.scan_steps = own

    return call


def masked_of(n: int, share: float) -> tuple[Any, ...]:
    """Arguments of `mask_logits` behind the logits: masks in the seats of a share of the rows, each of its own."""
    rows = torch.arange(n, dtype=torch.int32, device=DEVICE)
    seats = torch.where(torch.arange(n, device=DEVICE) < share * n, rows, -1)
    masks = torch.randint(-(2**31), 2**31 - 1, (n + 1, -(-VOCAB // 32)), dtype=torch.int64, device=DEVICE).to(torch.int32)
    return rows, (seats, masks), None


def masks() -> None:
    """Masks of structured output: what laying them on costs, beside the scan, which reads the logits once."""
    lay = logits_gpu.OVERRIDES["mask_logits"]

    def masked(logits: torch.Tensor, arguments: tuple[Any, ...]) -> torch.Tensor:
        lay(logits, *arguments)
        return logits

    for n in ROWS[:3] if DRY else (1, 32, 256):
        for share in (1.0, 0.1):
            given, arguments = [logits_of(n, "flat") for _ in range(2)], masked_of(n, share)
            want = given[0].clone()
            logits_reference.mask_logits(want, *arguments)
            assert torch.equal(masked(given[0], arguments), want), (n, share)
            if DRY:
                continue
            copies = 20 if n <= 32 else 5
            mask = microseconds(lambda i, given=given, more=arguments: masked(given[i % 2], more), copies)
            read = microseconds(scan_of(n, False, (16, 2)), copies)
            whole = microseconds(lambda i, given=given, more=arguments: greedy(masked(given[i % 2], more)), copies)
            plain = microseconds(lambda i, given=given: greedy(given[i % 2]), copies)
            ratio = f"{mask / read:.2f} reads of the logits ({read:.1f} us)"
            print(f"masks on {share:.0%} of {n} rows: {mask:.1f} us, {ratio}; greedy {plain:.1f} us, with masks {whole:.1f} us", flush=True)


def asks(n: int, top: int) -> tuple[torch.Tensor, ...]:
    """Arguments of `token_logprobs` behind the logits: every row wants `top`."""
    rows = torch.arange(n, dtype=torch.int32, device=DEVICE)
    return torch.randint(0, VOCAB, (n,), device=DEVICE), rows, torch.full((n,), top, dtype=torch.int32, device=DEVICE)


def logprobs() -> None:
    """Checks log-probs against the reference, and times them beside one read of the logits (their largest, by torch)."""
    ours, theirs, tops = logprobs_gpu.OVERRIDES["token_logprobs"], logprobs_reference.token_logprobs, (0, 5, 20)
    wrong, most = 0, 0.0
    for n in ROWS[:4]:
        for shape in SHAPES:
            logits, given = logits_of(n, shape), asks(n, tops[-1])
            (ranks, ids, values), want = ours(logits, *given, tops[-1]), theirs(logits, *given, tops[-1])
            wrong += int((ranks != want[0]).sum()) + int((ids != want[1]).sum())
            most = max(most, float((values - want[2]).abs().max()))
    print(f"log-probs: {wrong} ranks and ids differ, log-probs by {most:.1e} at most", flush=True)
    if DRY:
        return
    for shape in SHAPES:
        for n in (1, 32, 256, 1024):
            pair, read = [logits_of(n, shape) for _ in range(2)], n * VOCAB * 2
            peak = microseconds(lambda i, pair=pair: pair[i % 2].amax(1), 5)
            cells = [f"amax {peak:.1f} us"]
            for top in tops:
                given = asks(n, top)
                time = microseconds(lambda i, pair=pair, given=given: ours(pair[i % 2], *given, tops[-1]), 5)
                cells.append(f"top {top} {time:.1f} us ({read / time / 1e3:.0f} GB/s, {time * 4.8e6 / read:.2f} x a read at 4.8 TB/s)")
            print(f"log-probs {shape} {n:5} rows: " + ", ".join(cells), flush=True)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_known_args()
    torch.manual_seed(0)
    if "--masks" in sys.argv:
        return masks()
    logprobs()
    if "--logprobs" in sys.argv:
        return
    masks()
    lines, rows = [], 0
    for n in ROWS[:5]:
        for shape in SHAPES:
            for temperature in (0.6, 1.0):
                lines += check(n, shape, temperature)
                rows += n * len(KINDS)
    print(f"checked {rows} rows, {len(lines)} cases differ", *lines, sep="\n", flush=True)
    if DRY:
        return
    print(f"{'us (GB/s)':>14}" + "".join(f"{n:>15}" for n in ROWS))
    for shape in SHAPES:
        for kind in KINDS:
            times = [time_of(kind, n, shape, 0.6) for n in ROWS]
            cells = [f"{t:8.1f} ({n * VOCAB * 2 / t / 1000:4.0f})" for n, t in zip(ROWS, times, strict=True)]
            print(f"{shape + ' ' + kind:>14}" + "".join(f"{cell:>15}" for cell in cells), flush=True)
    KINDS["k600"] = (600, None)
    print("k600, flat, 1 and 32 rows: " + " ".join(f"{time_of('k600', n, 'flat', 0.6):.1f} us" for n in (1, 32)))
    sweep()


if __name__ == "__main__":
    main()

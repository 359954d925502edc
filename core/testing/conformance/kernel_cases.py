"""Cases for the built-in operations: awkward sizes, padding, dead rows, strided views, NaN wherever nothing may be read.

A case is a function of an `Ops`, a `Draw` and sizes. It makes its arguments, calls one operation, and returns what is to be compared:
tensors, arguments changed in place among them, or nestings of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from modelrunner.testing.conformance.automata_cases import AUTOMATA_CASES
from modelrunner.testing.conformance.logits_cases import LOGITS_CASES
from modelrunner.testing.conformance.logprobs_cases import LOGPROBS_CASES
from modelrunner.testing.conformance.speculation_cases import SPECULATION_CASES
from modelrunner.testing.conformance.step_cases import DIM, STEP_CASES, VOCAB
from modelrunner.testing.conformance.verification_cases import VERIFICATION_CASES

Case = Callable[..., Any]


@dataclass
class Draw:
    """Random arguments, the same for every device and for every call with the same seed."""

    generator: torch.Generator
    dtype: torch.dtype
    device: torch.device

    def noise(self, *shape: int) -> torch.Tensor:
        """Normal numbers of the case's dtype."""
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def uniform(self, *shape: int) -> torch.Tensor:
        """float32 numbers in [0, 1)."""
        return torch.rand(*shape, generator=self.generator).to(self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Numbers in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator).to(self.device, dtype)

    def unwritten(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Memory for a result: NaN, or -9."""
        dtype = dtype or self.dtype
        return torch.full(shape, torch.nan if dtype.is_floating_point else -9, dtype=dtype, device=self.device)


def cases_of(op: str) -> list[tuple[Case, tuple[Any, ...]]]:
    """(case, sizes) for a built-in operation. Raises KeyError for another: a plugin brings cases for its own operations."""
    if op not in CASES:
        raise KeyError(f"no cases for operation {op!r}: define cases() in the test class. There are cases for {', '.join(sorted(CASES))}")
    case, sizes = CASES[op]
    return [(case, size) for size in sizes]


# ---- layers ------------------------------------------------------------------------------------------------------------


def silu_mul(ops: Any, draw: Draw, *shape: int) -> Any:
    x = draw.noise(*shape)
    kept = x.clone()
    return ops.silu_mul(x), x - kept


def gelu_tanh_mul(ops: Any, draw: Draw, *shape: int) -> Any:
    x = draw.noise(*shape)
    kept = x.clone()
    return ops.gelu_tanh_mul(x), x - kept


def rms_norm(ops: Any, draw: Draw, rows: int, size: int) -> Any:
    x, weight = draw.noise(rows, 3 * size), draw.noise(size)
    return ops.rms_norm(x[:, size : 2 * size], weight, 1e-5), ops.rms_norm(x.view(rows, 3, size), weight, 1e-6)


def add_rms_norm(ops: Any, draw: Draw, rows: int, size: int) -> Any:
    x, residual, weight = draw.noise(rows, size), draw.noise(rows, size), draw.noise(size)
    kept = x.clone(), residual.clone()
    return ops.add_rms_norm(x, residual, weight, 1e-5), x - kept[0], residual - kept[1]


def apply_rope(ops: Any, draw: Draw, tokens: int, rotary: int) -> Any:
    fused = draw.noise(tokens, 8 * DIM)
    q, k = fused[:, : 5 * DIM].unflatten(-1, (5, DIM)), fused[:, 5 * DIM : 7 * DIM].unflatten(-1, (2, DIM))
    angle = draw.uniform(100, rotary // 2) * 7
    table = torch.cat((angle.cos(), angle.sin()), 1)
    positions = draw.integers(0, 100, tokens)
    return ops.apply_rope(q, k, None, table[positions]), ops.apply_rope(q, k, positions, table)


def embedding(ops: Any, draw: Draw, tokens: int) -> Any:
    weight, ids = draw.noise(VOCAB, 24), draw.integers(0, VOCAB, tokens)
    out, wide = draw.unwritten(tokens + 2, 24), draw.unwritten(tokens + 2, 24, dtype=torch.float32)
    ops.embedding(ids, weight, out[:tokens])
    ops.embedding(ids, weight, wide[:tokens])
    return out, wide


def arena_of(draw: Draw, tokens: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An arena of media, NaN in the lines that nobody may read, and a line for about half of the tokens."""
    slots = torch.where(draw.uniform(tokens) > 0.5, draw.integers(0, 50, tokens, dtype=torch.int32), -1)
    arena = draw.noise(50, width)
    unread = torch.ones(50, dtype=torch.bool, device=draw.device).index_fill_(0, slots[slots >= 0].long(), False)
    return arena.masked_fill_(unread[:, None], torch.nan), slots


def place_media(ops: Any, draw: Draw, tokens: int, width: int) -> Any:
    arena, slots = arena_of(draw, tokens, 3 * width)
    out = draw.noise(tokens + 2, width)
    ops.place_media(out[:tokens], arena, slots)
    return out


def add_media(ops: Any, draw: Draw, tokens: int, width: int) -> Any:
    arena, slots = arena_of(draw, tokens, 3 * width)
    out = draw.noise(tokens + 2, width)
    ops.add_media(out[:tokens], arena, slots, 2 * width)
    return out


def media_positions(ops: Any, draw: Draw, tokens: int, lines: int) -> Any:
    given = draw.integers(-9, 9, lines, tokens + 5, dtype=torch.int32)
    positions = draw.integers(0, 2**40, tokens) * (draw.uniform(tokens) > 0.3)
    token_row, rows = draw.integers(0, 3, tokens), torch.tensor([4, 0, 2], dtype=torch.int32, device=draw.device)
    delta, out = draw.integers(-99, 9, 5, dtype=torch.int32), draw.unwritten(lines, tokens + 5, dtype=torch.int64)
    ops.media_positions(given[:, :tokens], positions, token_row, rows, delta, out[:, :tokens])
    return out


def matmul(ops: Any, draw: Draw, rows: int, inner: int, outer: int) -> Any:
    return ops.matmul(draw.noise(rows, inner), draw.noise(outer, inner) / inner**0.5)


def int8_matmul(ops: Any, draw: Draw, rows: int, inner: int, outer: int) -> Any:
    weight = draw.integers(-127, 128, outer, inner, dtype=torch.int8)
    return ops.int8_matmul(draw.noise(rows, inner), weight, draw.uniform(outer) / (127 * inner**0.5))


def norm_matmul(ops: Any, draw: Draw, rows: int, inner: int, outer: int) -> Any:
    x, weight = draw.noise(rows, 2 * inner)[:, inner:], draw.noise(outer, inner) / inner**0.5
    kept = x.clone()
    return ops.norm_matmul(x, 1 + draw.noise(inner) / 4, 1e-5, weight), x - kept


def matmul_add(ops: Any, draw: Draw, rows: int, inner: int, outer: int) -> Any:
    x, weight, residual = draw.noise(rows, 2 * inner)[:, :inner], draw.noise(outer, inner) / inner**0.5, draw.noise(rows, outer)
    kept = x.clone(), residual.clone()
    return ops.matmul_add(x, weight, residual), ops.matmul_add(x, weight, residual[0]), x - kept[0], residual - kept[1]


def matmul_add_in_place(ops: Any, draw: Draw, rows: int, inner: int, outer: int) -> Any:
    x, weight, residual = draw.noise(rows, 2 * inner)[:, :inner], draw.noise(outer, inner) / inner**0.5, draw.noise(rows, outer)
    kept = x.clone()
    return ops.matmul_add_in_place(x, weight, residual), x - kept


def norm_gated_matmul(ops: Any, draw: Draw, rows: int, inner: int, outer: int) -> Any:
    x, weight, norm = draw.noise(rows, inner), draw.noise(2 * outer, inner) / inner**0.5, 1 + draw.noise(inner) / 4
    kept = x.clone()
    return [ops.norm_gated_matmul(x, norm, 1e-6, weight, name) for name in ("silu_mul", "gelu_tanh_mul")], x - kept


# ---- sampling ----------------------------------------------------------------------------------------------------------


def logits(draw: Draw, rows: int, vocab: int) -> torch.Tensor:
    """With ties, masked entries, and rows in which nothing is finite."""
    made = draw.noise(rows, vocab) * 3
    made[:, :: max(vocab // 7, 2)] = -torch.inf
    made[0, -3:] = 40.0  # a tie: the lowest id wins
    if rows > 3:
        made[1], made[2, 0], made[3, 0] = -torch.inf, torch.nan, torch.inf
    return made


def greedy(ops: Any, draw: Draw, rows: int, vocab: int) -> Any:
    given = logits(draw, rows, vocab)
    kept = given.clone()
    tokens, ok = ops.greedy(given)
    return tokens[ok], ok, (tokens >= 0).all() & (tokens < vocab).all(), given.nan_to_num() - kept.nan_to_num()


def sample(ops: Any, draw: Draw, rows: int, vocab: int, filtered: bool) -> Any:
    temperature = draw.uniform(rows) * 1.5 * (draw.uniform(rows) > 0.2)
    filters: Sequence[torch.Tensor | None] = (None, None, None)
    if filtered:
        filters = (draw.integers(0, vocab, rows, dtype=torch.int32), draw.uniform(rows) * 0.98 + 0.02, draw.uniform(rows) * 0.2)
    seed, position, choice = draw.integers(-(2**62), 2**62, rows), draw.integers(0, 9999, rows), draw.integers(0, 9, rows)
    tokens, ok = ops.sample(logits(draw, rows, vocab), temperature, *filters, seed, position, choice)
    return tokens[ok], ok, (tokens >= 0).all() & (tokens < vocab).all()


def greedy_rows(ops: Any, draw: Draw, rows: int, vocab: int) -> Any:
    """`greedy`, and counts for rows of which some do not sample and some are not ok."""
    given, samples = logits(draw, rows, vocab), draw.uniform(rows) > 0.3
    tokens, counts, ok = ops.greedy_rows(given, samples)
    return tokens[ok], counts, ok, (tokens >= 0).all() & (tokens < vocab).all()


def sample_rows(ops: Any, draw: Draw, rows: int, vocab: int, filtered: bool) -> Any:
    """`sample` with the values of its rows in columns of a longer table, in another order; a row's position is in two parts."""
    lines = rows + 3
    own = torch.randperm(lines, generator=draw.generator)[:rows].to(draw.device, torch.int32)
    columns: dict[str, torch.Tensor | None] = {
        "temperature": draw.uniform(lines) * 1.5 * (draw.uniform(lines) > 0.2),
        "top_k": draw.integers(0, vocab, lines, dtype=torch.int32) if filtered else None,
        "top_p": draw.uniform(lines) * 0.98 + 0.02 if filtered else None,
        "min_p": draw.uniform(lines) * 0.2 if filtered else None,
        "seed": draw.integers(-(2**62), 2**62, lines),
        "choice": draw.integers(0, 9, lines, dtype=torch.int32),
    }
    samples, computed = draw.uniform(rows) > 0.3, draw.integers(0, 9999, rows, dtype=torch.int32)
    query_len = draw.integers(0, 5, rows, dtype=torch.int32)
    tokens, counts, ok = ops.sample_rows(logits(draw, rows, vocab), own, samples, computed, query_len, **columns)
    return tokens[ok], counts, ok, (tokens >= 0).all() & (tokens < vocab).all()


def gumbel_noise(ops: Any, draw: Draw, rows: int, vocab: int) -> Any:
    seed, position, choice = draw.integers(-(2**62), 2**62, rows), draw.integers(0, 9999, rows), draw.integers(0, 9, rows)
    return ops.gumbel_noise(seed, position, choice, 1, vocab)


PAIRS = ((1, 1), (5, 63), (2, 500), (3, 1000))
PRODUCTS = ((1, 1, 1), (3, 63, 7), (17, 64, 500), (40, 1000, 33))
VOCABULARIES = ((1, 5), (7, 331), (4, 5000))
DRAWS = ((1, 5, True), (9, 331, False), (9, 331, True), (5, 5000, True))
CASES: dict[str, tuple[Case, Sequence[tuple[Any, ...]]]] = {
    "silu_mul": (silu_mul, ((1, 2), (5, 126), (2, 3, 1000))),
    "gelu_tanh_mul": (gelu_tanh_mul, ((1, 2), (5, 126), (2, 3, 1000))),
    "rms_norm": (rms_norm, PAIRS),
    "add_rms_norm": (add_rms_norm, PAIRS),
    "apply_rope": (apply_rope, ((1, DIM), (63, DIM), (9, 8))),
    "embedding": (embedding, ((1,), (63,), (500,))),
    "place_media": (place_media, ((1, 24), (63, 1), (500, 1030))),
    "add_media": (add_media, ((1, 24), (63, 1), (500, 1030))),
    "media_positions": (media_positions, ((1, 1), (63, 3), (500, 3))),
    "matmul": (matmul, PRODUCTS),
    "int8_matmul": (int8_matmul, PRODUCTS),
    "norm_matmul": (norm_matmul, PRODUCTS),
    "matmul_add": (matmul_add, PRODUCTS),
    "matmul_add_in_place": (matmul_add_in_place, PRODUCTS),
    "norm_gated_matmul": (norm_gated_matmul, PRODUCTS),
    "greedy": (greedy, VOCABULARIES),
    "greedy_rows": (greedy_rows, VOCABULARIES),
    "sample": (sample, DRAWS),
    "sample_rows": (sample_rows, DRAWS),
    "gumbel_noise": (gumbel_noise, ((1, 1), (7, 331))),
    **AUTOMATA_CASES,
    **LOGITS_CASES,
    **LOGPROBS_CASES,
    **SPECULATION_CASES,
    **STEP_CASES,
    **VERIFICATION_CASES,
}

"""B51: row times stride overflowed 32 bits in kernels: an illegal access, or wrong numbers without an error.

Each kernel reads and writes beyond 2^31 elements; what it makes of the last rows is what it makes of them in small tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

FAR = 2**31
LAST = 4
HEADS, KV_HEADS, DIM, PAGE = 64, 8, 128, 16
TOKENS = 262_145  # x 8,192 of query width


@pytest.fixture(autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def op(area: str, name: str) -> Any:
    return import_module(f"modelrunner.kernels.{area}.gpu").OVERRIDES[name]


def tall(rows: int, *shape: int) -> torch.Tensor:
    """Zeros but for the last rows, in bfloat16."""
    tensor = torch.zeros(rows, *shape, dtype=torch.bfloat16, device="cuda")
    assert tensor.numel() > FAR
    tensor[-LAST:].normal_()
    return tensor


def same_last(got: torch.Tensor, alone: torch.Tensor) -> None:
    assert alone.any()
    assert torch.equal(got[-LAST:], alone)


def test_tokens_of_the_last_rows_of_many_logits() -> None:
    logits = tall(16_500, 131_072)
    rows, few = len(logits), logits[-LAST:].clone()
    same_last(op("sampling", "greedy")(logits)[0], op("sampling", "greedy")(few)[0])
    seeds, numbers = torch.arange(rows, device="cuda"), torch.zeros(rows, dtype=torch.int64, device="cuda")
    ones = torch.ones(rows, device="cuda")
    top_k = torch.full((rows,), 40, dtype=torch.int32, device="cuda")
    for given in [(None, None, None), (top_k, ones * 0.9, ones * 0.01)]:
        columns = (ones, *given, seeds, numbers, numbers)
        last = [None if column is None else column[-LAST:].clone() for column in columns]
        same_last(op("sampling", "sample")(logits, *columns)[0], op("sampling", "sample")(few, *last)[0])


def test_edits_of_the_last_rows_of_many_logits() -> None:
    """Allow list, bias, least length, bad word and penalties, each of one row and all of the last."""
    logits, table = tall(16_500, 131_072), 8
    rows, vocab = torch.arange(len(logits), dtype=torch.int32, device="cuda") % table, logits.shape[1]

    def lines(values: torch.Tensor) -> torch.Tensor:
        return values.to("cuda", torch.int32)

    def seats(row: int) -> torch.Tensor:
        return torch.where((torch.arange(table) % LAST == row) | (torch.arange(table) == LAST - 1), 0, -1).to("cuda", torch.int32)

    fives = torch.full((table,), 5, dtype=torch.int32, device="cuda")
    token_ids = lines(torch.arange(table * 8).view(table, 8))
    token_ids[:, 4] = vocab - 3  # the output so far
    masks = lines(torch.stack([torch.full((vocab // 32,), -2), torch.full((vocab // 32,), -1)]))
    bias = torch.stack([torch.tensor([vocab - 1, -1]), torch.full((2,), -1)])
    values = torch.tensor([[1.5, 0.0], [0.0, 0.0]]).view(torch.int32)
    counts = lines(torch.zeros(2, vocab))
    counts[0, -7:] = 5
    factors = [torch.full((table,), value, device="cuda") for value in (1.3, 0.5, 0.25)]
    edits = (
        (seats(0), masks),
        (seats(1), torch.cat([lines(bias), values.cuda()], 1)),
        (seats(1), lines(torch.tensor([[vocab - 2], [-1]])), fives + 4),
        (seats(2), lines(torch.tensor([[[vocab - 3, vocab - 5]], [[-1, -1]]]))),
        (seats(2), counts, *factors),
    )
    common = (fives, fives - 1, token_ids, *edits)
    got = op("logits", "edit_logits")(logits, rows, *common)
    alone = op("logits", "edit_logits")(logits[-LAST:].clone(), rows[-LAST:].clone(), *common)
    assert (alone != logits[-LAST:].float()).any(1).all()
    same_last(got, alone)


def test_logprobs_of_the_last_rows_of_many_logits() -> None:
    logits = tall(16_500, 131_072)
    logits[-1, :4] = -torch.inf
    rows = torch.arange(len(logits), dtype=torch.int32, device="cuda") % 8
    wanted = torch.tensor([-1, 0, 1, 5, 20, 20, 3, 20], dtype=torch.int32, device="cuda")
    chosen = torch.arange(len(logits), device="cuda") * 7 % logits.shape[1]
    last = [tensor[-LAST:].clone() for tensor in (logits, chosen, rows)]
    for got, alone in zip(
        op("logprobs", "token_logprobs")(logits, chosen, rows, wanted, 20), op("logprobs", "token_logprobs")(*last, wanted, 20), strict=True
    ):
        same_last(got, alone)


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "silu_mul", "gelu_tanh_mul", "embedding", "apply_rope"])
def test_the_last_rows_of_layers(name: str) -> None:
    x = tall(TOKENS, HEADS * DIM)
    if name == "embedding":
        ids = torch.arange(TOKENS, device="cuda") % 7
        weight, out = torch.randn(7, HEADS * DIM, device="cuda").bfloat16(), torch.empty_like(x)
        op("embedding", name)(ids, weight, out)
        same_last(out, weight[ids[-LAST:]])
        same_last(out[:LAST].flip(0), weight[ids[:LAST]].flip(0))
    elif name == "apply_rope":
        table = torch.randn(TOKENS, DIM, device="cuda")
        positions = torch.arange(TOKENS, device="cuda")
        q, k = x.view(TOKENS, HEADS, DIM), x[:, : KV_HEADS * DIM].reshape(TOKENS, KV_HEADS, DIM)
        got, _ = op("rope", name)(q, k, positions, table)
        same_last(got, op("rope", name)(q[-LAST:].clone(), k[-LAST:].clone(), positions[-LAST:].clone(), table)[0])
    elif name.endswith("_mul"):
        same_last(op("activation", name)(x), op("activation", name)(x[-LAST:].clone()))
    else:
        weight = torch.randn(HEADS * DIM, device="cuda").bfloat16()
        added = (x.flip(0),) if name == "add_rms_norm" else ()
        few = tuple(tensor[-LAST:].clone() for tensor in added)
        got, alone = op("norm", name)(x, *added, weight, 1e-6), op("norm", name)(x[-LAST:].clone(), *few, weight, 1e-6)
        for part, small in zip(*([got], [alone]) if name == "rms_norm" else (got, alone), strict=True):
            same_last(part, small)


def attend(q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, computed: int, decode: bool) -> torch.Tensor:
    """One row's attention: q [T, H, D], its queries, after `computed` tokens; table: its pages."""
    queries = len(q)
    numbers = [torch.tensor(value, dtype=torch.int32, device="cuda") for value in ([0, queries], [queries], [computed + queries])]
    token_row = torch.zeros(queries, dtype=torch.int64, device="cuda")
    positions = torch.arange(computed, computed + queries, device="cuda")
    limits = {"num_decode": int(decode), "decode_query": 1, "max_query": queries, "max_seq_len": computed + queries}
    pages = table.to("cuda", torch.int32).view(1, -1)
    return op("attention", "paged_attention")(q, cache, pages, *numbers, token_row, positions, scale=DIM**-0.5, **limits)


@pytest.mark.parametrize("queries", [1, 24])
def test_the_last_page_of_a_large_cache(queries: int) -> None:
    pages = FAR // (PAGE * 2 * KV_HEADS * DIM) + 8
    cache = torch.zeros(pages, PAGE, 2, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    assert cache.numel() > FAR
    small, length = torch.zeros_like(cache[:4]), 3 * PAGE
    q, k, v = (torch.randn(length, heads, DIM, device="cuda").bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS))
    for target, first in ((cache, pages - 3), (small, 1)):
        op("attention", "write_cache")(target, k, v, torch.arange(first * PAGE, first * PAGE + length, device="cuda"))
    assert torch.equal(cache[-3:], small[1:])
    got = attend(q[:queries], cache, torch.arange(pages - 3, pages), length - queries, queries == 1)
    same_last(got, attend(q[:queries], small, torch.arange(1, 4), length - queries, queries == 1)[-LAST:])


def test_a_prompt_whose_queries_go_beyond() -> None:
    """Its last queries, beside the same as a chunk of their own."""
    pages = -(-TOKENS // PAGE)
    cache = torch.randn(pages + 1, PAGE, 2, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    q, table = tall(TOKENS, HEADS, DIM), torch.arange(1, pages + 1)
    got, alone = attend(q, cache, table, 0, False)[-LAST:], attend(q[-LAST:].clone(), cache, table, TOKENS - LAST, False)
    assert alone.any()
    torch.testing.assert_close(got, alone, atol=1e-3, rtol=2e-2)

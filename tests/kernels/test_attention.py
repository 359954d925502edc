"""Paged attention against a loop over tokens, with poison wherever nothing may be read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from modelrunner.kernels.attention import attention_index, indexed_attention, indexed_write, paged_attention, write_cache
from modelrunner.kernels.attention import index as index_module
from modelrunner.kernels.attention.index import choose_tile_query

HEADS, KV_HEADS, DIM, LAYERS, LAYER = 6, 2, 16, 3, 1
SCALE = 0.3


@dataclass
class Step:
    """A step over rows of (computed, query) tokens; a query of 0 is a dead row."""

    q: torch.Tensor
    cache: torch.Tensor
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    arguments: dict[str, torch.Tensor]
    limits: dict[str, int]
    rows: list[tuple[int, int]]


def make_step(
    rows: list[tuple[int, int]],
    tokens_per_page: int,
    *,
    num_decode: int,
    decode_query: int = 1,
    padding: int = 0,
    window: int | None = None,
) -> Step:
    """Pages in random order; NaN in every slot past a row's length, in every page nobody owns, and in every slot that the window left."""
    lengths = [done + query for done, query in rows]
    max_pages = max(-(-max(lengths) // tokens_per_page), 1)
    num_pages = 1 + len(rows) * max_pages + 2
    arena = torch.full((num_pages, LAYERS, tokens_per_page, 2, KV_HEADS, DIM), math.nan)
    arena[0] = 0.0
    cache = arena[:, LAYER]
    free = (torch.randperm(num_pages - 1) + 1).tolist()
    table = torch.zeros(len(rows), max_pages, dtype=torch.int32)
    keys, values = [], []
    for i, (done, query) in enumerate(rows):
        k, v = torch.randn(lengths[i], KV_HEADS, DIM), torch.randn(lengths[i], KV_HEADS, DIM)
        keys.append(k)
        values.append(v)
        for page in range(-(-lengths[i] // tokens_per_page)):
            table[i, page] = free.pop()
        for p in range(lengths[i]):
            if query and (window is None or p > done - window):
                cache[int(table[i, p // tokens_per_page]), p % tokens_per_page] = torch.stack((k[p], v[p]))
    slots_of = [decode_query if i < num_decode else max(query, 1) for i, (_, query) in enumerate(rows)]
    start = torch.tensor([0, *slots_of]).cumsum(0).to(torch.int32)
    total = int(start[-1]) + padding
    query_len = torch.tensor([query for _, query in rows], dtype=torch.int32)
    seq_len = torch.tensor([n if q else 0 for n, (_, q) in zip(lengths, rows, strict=True)], dtype=torch.int32)
    token_row = torch.searchsorted(start[1:].contiguous(), torch.arange(total, dtype=torch.int32), right=True).clamp(max=len(rows) - 1)
    positions = torch.zeros(total, dtype=torch.int64)
    for i, (done, query) in enumerate(rows):
        for j in range(query):
            positions[int(start[i]) + j] = done + j
    arguments = {
        "block_table": table,
        "query_start": start,
        "query_len": query_len,
        "seq_len": seq_len,
        "token_row": token_row,
        "positions": positions,
    }
    prefill = [max(q, 1) for i, (_, q) in enumerate(rows) if i >= num_decode]
    limits = {
        "num_decode": num_decode,
        "decode_query": decode_query,
        "max_query": max([decode_query, padding, *prefill]),
        "max_seq_len": max(max(lengths), 1),
    }
    return Step(torch.randn(total, HEADS, DIM), cache, keys, values, arguments, limits, rows)


def expected(step: Step, window: int | None, softcap: float | None, sinks: torch.Tensor | None = None) -> dict[int, torch.Tensor]:
    """Token -> output, one token and head at a time."""
    found = {}
    for i, (done, query) in enumerate(step.rows):
        for j in range(query):
            token, position = int(step.arguments["query_start"][i]) + j, done + j
            first = 0 if window is None else max(0, position - window + 1)
            out = torch.empty(HEADS, DIM)
            for h in range(HEADS):
                kv = h // (HEADS // KV_HEADS)
                scores = step.k[i][first : position + 1, kv] @ step.q[token, h] * SCALE
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                values = step.v[i][first : position + 1, kv]
                if sinks is not None:
                    scores, values = torch.cat((scores, sinks[h : h + 1])), torch.cat((values, torch.zeros(1, DIM)))
                out[h] = torch.softmax(scores, 0) @ values
            found[token] = out
    return found


def check(
    step: Step,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> None:
    options = {"scale": SCALE, "window": window, "softcap": softcap, "sinks": sinks, "scales": scales}
    out = paged_attention(step.q, step.cache, **step.arguments, **step.limits, **options)  # type: ignore[arg-type]
    assert out.shape == step.q.shape
    assert torch.isfinite(out).all(), "invalid tokens must come out finite"
    want = expected(step, window, softcap, sinks)
    assert len(want) == sum(query for _, query in step.rows)
    for token, value in want.items():
        torch.testing.assert_close(out[token], value, rtol=2e-5, atol=2e-5, msg=lambda m, token=token: f"token {token}: {m}")


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("window", [None, 1, 7, 64], ids=lambda w: f"window-{w}")
@pytest.mark.parametrize("tokens_per_page", [1, 5, 16])
def test_decode(tokens_per_page: int, window: int | None, softcap: float | None) -> None:
    rows = [(62, 1), (0, 1), (0, 0), (31, 1), (16, 1)]
    check(make_step(rows, tokens_per_page, num_decode=5, window=window), window, softcap)


@pytest.mark.parametrize("window", [None, 6], ids=lambda w: f"window-{w}")
def test_several_query_tokens_a_decode_row(window: int | None) -> None:
    """Rows that draft: four query slots each, of which some or all are unused."""
    rows = [(20, 4), (33, 1), (5, 0), (47, 3)]
    check(make_step(rows, 16, num_decode=4, decode_query=4, window=window), window)


@pytest.mark.parametrize("window", [None, 9], ids=lambda w: f"window-{w}")
@pytest.mark.parametrize("padding", [0, 13])
def test_mixed_batch(window: int | None, padding: int) -> None:
    """Decode rows, a fresh prompt, a later chunk, a finished row, and tokens that belong to nobody."""
    rows = [(40, 1), (3, 0), (0, 23), (30, 11), (9, 0), (0, 1)]
    check(make_step(rows, 16, num_decode=2, padding=padding, window=window), window)


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("window", [None, 6], ids=lambda w: f"window-{w}")
def test_sinks(window: int | None, softcap: float | None) -> None:
    """A mixed batch whose heads have sinks from far below to far above all scores."""
    step = make_step([(40, 1), (3, 0), (0, 1), (0, 23), (30, 11)], 16, num_decode=3, window=window)
    check(step, window, softcap, torch.tensor([-40.0, -1.0, 0.0, 1.5, 4.0, 40.0]))


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("scales", [None, torch.tensor([[0.3, 5.0], [0.07, 1.7]])], ids=["ones", "scaled"])
def test_keys_and_values_in_8_bits(scales: torch.Tensor | None, softcap: float | None) -> None:
    step = make_step([(40, 1), (3, 0), (0, 23), (30, 11), (9, 0), (0, 1)], 16, num_decode=2)
    factors = torch.ones(2, KV_HEADS) if scales is None else scales

    def kept(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return (x / factor.unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn)

    step.cache = kept(step.cache, factors)
    step.k = [kept(k, factors[0]).float() * factors[0].unsqueeze(-1) for k in step.k]
    step.v = [kept(v, factors[1]).float() * factors[1].unsqueeze(-1) for v in step.v]
    check(step, None, softcap, torch.linspace(-2, 2, HEADS), scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_8_bits_do_not_reach(dtype: torch.dtype) -> None:
    """It becomes the largest number; NaN stays, and so does whatever is not written. The null page is zeros."""
    numbers = torch.tensor([448.0, 449.0, 3e4, -6e4, math.inf, -math.inf, math.nan, 1.06, 2**-9, 2**-11, -0.0], dtype=dtype)
    as_kept = torch.tensor([448.0, 448.0, 448.0, -448.0, 448.0, -448.0, math.nan, 1.0, 2**-9, 0.0, -0.0])
    k = numbers.repeat(3, 2, 1)
    scales = torch.tensor([[1.0, 0.25], [4.0, 1.0]])
    for given in (None, scales):
        cache = torch.full((3, 4, 2, 2, numbers.numel()), 7.0).to(torch.float8_e4m3fn)
        cache[0] = 0.0
        factors = torch.ones(2, 2) if given is None else given
        write_cache(
            cache, k * factors[0].unsqueeze(-1).to(dtype), k * factors[1].unsqueeze(-1).to(dtype), torch.tensor([5, -1, 8]), scales=given
        )
        for page, slot in ((1, 1), (2, 0)):
            torch.testing.assert_close(cache[page, slot].float(), as_kept.expand(2, 2, -1), rtol=0, atol=0, equal_nan=True)
        rest = cache.float().flatten(0, 1)[[4, 6, 7, 9, 10, 11]]
        assert (rest == 7).all()
        assert (cache[0].float() == 0).all()


@pytest.mark.parametrize("length", [63, 500])
def test_one_long_prompt(length: int) -> None:
    check(make_step([(0, length)], 16, num_decode=0))


@pytest.mark.parametrize("window", [None, 20], ids=lambda w: f"window-{w}")
def test_ragged_prefill_is_cut_into_tiles(window: int | None) -> None:
    """One long row among short ones: tiles, not one padded product."""
    rows = [(7, 1), *[(i, 2) for i in range(12)], (11, 150), (0, 3)]
    assert choose_tile_query(12 * 2 + 153, 14, 150) < 150
    check(make_step(rows, 16, num_decode=1, window=window), window)


def test_scratch_memory_is_bounded_by_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same step, cut into many small products, gives the same values."""
    step = make_step([(40, 1), (12, 1), (0, 23), (30, 11), (0, 5)], 16, num_decode=2)
    whole = paged_attention(step.q, step.cache, **step.arguments, **step.limits, scale=SCALE)
    monkeypatch.setattr(index_module, "MAX_KEYS", 50)
    arguments = {name: value for name, value in step.arguments.items() if name != "positions"}
    slots = torch.zeros(step.q.shape[0], dtype=torch.int64)
    index = attention_index(step.cache, **arguments, slots=slots, num_heads=HEADS, **step.limits)
    assert len(index.tiles) == 5
    torch.testing.assert_close(indexed_attention(step.q, step.cache, index, scale=SCALE), whole, rtol=1e-6, atol=1e-6)


def test_a_step_without_live_rows() -> None:
    check(make_step([(4, 0), (9, 0)], 16, num_decode=2))
    check(make_step([(4, 0), (9, 0)], 16, num_decode=0))


def test_a_row_is_not_changed_by_its_neighbours() -> None:
    step = make_step([(62, 1), (10, 1), (31, 1)], 16, num_decode=3)
    together = paged_attention(step.q, step.cache, **step.arguments, **step.limits, scale=SCALE)
    one = {name: step.arguments[name][1:2] for name in ("block_table", "query_len", "seq_len", "positions")}
    alone = paged_attention(
        step.q[1:2],
        step.cache,
        **one,
        query_start=torch.tensor([0, 1], dtype=torch.int32),
        token_row=torch.zeros(1, dtype=torch.int64),
        num_decode=1,
        decode_query=1,
        max_query=1,
        max_seq_len=11,
        scale=SCALE,
    )
    torch.testing.assert_close(alone[0], together[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("indexed", [False, True])
def test_write_cache(indexed: bool) -> None:
    """Each token lands in its slot and nothing else moves: other layers, other slots, the null page."""
    tokens_per_page, num_tokens = 5, 7
    arena = torch.randn(6, LAYERS, tokens_per_page, 2, KV_HEADS, DIM)
    arena[0] = 0.0
    before, cache = arena.clone(), arena[:, LAYER]
    slots = torch.tensor([5, -1, 29, 7, -1, 13, 6])
    k, v = torch.randn(num_tokens, KV_HEADS, DIM), torch.randn(num_tokens, KV_HEADS, DIM)
    k[1] = v[4] = math.nan
    if indexed:
        start = torch.arange(num_tokens + 1, dtype=torch.int32)
        ones = torch.ones(num_tokens, dtype=torch.int32)
        table = torch.zeros(num_tokens, 1, dtype=torch.int32)
        limits = {"num_heads": HEADS, "num_decode": num_tokens, "decode_query": 1, "max_query": 1, "max_seq_len": 1}
        indexed_write(cache, k, v, attention_index(cache, table, start, ones, ones, start[:-1].long(), slots, **limits))
    else:
        write_cache(cache, k, v, slots)
    want = before.clone()
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want[slot // tokens_per_page, LAYER, slot % tokens_per_page] = torch.stack((k[t], v[t]))
    assert torch.equal(arena, want)


def test_a_cache_that_cannot_be_seen_by_tokens_is_refused() -> None:
    cache = torch.zeros(4, 2, 16, KV_HEADS, DIM).transpose(1, 2)
    k = torch.zeros(1, KV_HEADS, DIM)
    with pytest.raises(ValueError, match="must be contiguous"):
        write_cache(cache, k, k, torch.tensor([3]))


def test_half_precision() -> None:
    step = make_step([(40, 1), (0, 9)], 16, num_decode=1)
    want = expected(step, None, None)
    cache, q = step.cache.to(torch.bfloat16), step.q.to(torch.bfloat16)
    out = paged_attention(q, cache, **step.arguments, **step.limits, scale=SCALE)
    assert out.dtype == torch.bfloat16
    for token, value in want.items():
        torch.testing.assert_close(out[token].float(), value, rtol=5e-2, atol=5e-2)

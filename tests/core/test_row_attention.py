"""Attention that knows how long each row is, against the reference, with NaN wherever nothing may be read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from modelrunner.assemble import resolve_ops, settle
from modelrunner.attention import AttentionMeta, Rotary
from modelrunner.backends import rows as rows_backend
from modelrunner.backends.paged import PagedAttention
from modelrunner.backends.rows import RowAttention
from modelrunner.model_state import FullAttention, SlidingWindow
from modelrunner.plugin_manager import PluginManager

HEADS, KV_HEADS, DIM, LAYERS, PAGE = 6, 2, 16, 3, 4
NULL = 0


def ops() -> Any:
    manager = PluginManager.load()
    settings = settle({"device.name": "cpu"}, manager)
    return resolve_ops(manager, manager.choose("device", pin="cpu", settings=settings).load()(settings))


def group(window: int | None) -> FullAttention:
    shape = ("g", tuple(range(LAYERS)), HEADS, KV_HEADS, DIM, 0.3)
    return FullAttention(*shape) if window is None else SlidingWindow(*shape, window_size=window)


def step(rows: list[tuple[int, int]], num_decode: int, window: int | None, padding: int = 0) -> tuple[torch.Tensor, AttentionMeta]:
    """A cache and a step of rows of (computed, query) tokens, a query of 0 for a dead row; each row has one slot at least."""
    lengths = [done + query if query else 0 for done, query in rows]
    width = max(-(-max(lengths) // PAGE), 1)
    cache = torch.full((1 + len(rows) * width, LAYERS, PAGE, 2, KV_HEADS, DIM), math.nan)
    cache[NULL] = 0.0
    free = (torch.randperm(len(rows) * width) + 1).tolist()
    table, slots, token_row, positions = torch.zeros(len(rows), width, dtype=torch.int32), [], [], []
    for i, (done, query) in enumerate(rows):
        for page in range(-(-lengths[i] // PAGE)):
            table[i, page] = free.pop()
        for p in range(done if query else 0):
            if window is None or p > done - window:
                cache[int(table[i, p // PAGE]), :, p % PAGE] = torch.randn(LAYERS, 2, KV_HEADS, DIM)
        for p in range(done, done + max(query, 1)):
            slots.append(int(table[i, p // PAGE]) * PAGE + p % PAGE if query else -1)
            token_row.append(i)
            positions.append(p if query else 0)
    slots += [-1] * padding
    token_row += [len(rows) - 1] * padding
    positions += [0] * padding
    sizes = torch.tensor([max(query, 1) for _, query in rows])
    start = torch.cat((torch.zeros(1, dtype=torch.int64), sizes.cumsum(0))).int()
    queries = torch.tensor([query for _, query in rows], dtype=torch.int32)
    meta = AttentionMeta(
        num_rows=len(rows),
        num_tokens=len(slots),
        num_decode=num_decode,
        decode_query=1,
        max_query=max(int(sizes.max()), padding),
        max_seq_len=max(lengths) + 5,  # a bound
        query_start=start,
        query_len=queries,
        seq_len=torch.tensor(lengths, dtype=torch.int32),
        token_row=torch.tensor(token_row),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        block_table=table,
    )
    return cache, meta


STEPS = {
    "one decode row": ([(9, 1)], 1),
    "rows of one length": ([(9, 1)] * 3, 3),
    "two runs of one length with a dead row between": ([(9, 1), (0, 0), (9, 1), (9, 1), (4, 1), (4, 1)], 6),
    "a whole prompt": ([(0, 13)], 0),
    "a later chunk": ([(6, 9)], 0),
    "rows, a prompt, a chunk": ([(9, 1), (17, 1), (0, 0), (0, 7), (5, 6), (0, 1)], 3),
    "two prompts of one length": ([(0, 5), (0, 5)], 0),
    "nobody": ([(0, 0), (0, 0)], 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("name", STEPS)
def test_it_gives_what_the_reference_gives(name: str, padding: int, window: int | None, dtype: torch.dtype) -> None:
    torch.manual_seed(len(name))
    rows, num_decode = STEPS[name]
    cache, meta = step(rows, num_decode, window, padding)
    if padding and num_decode == len(rows):
        pytest.skip("decode steps are padded by whole rows")
    registered = ops()
    caches = cache.to(dtype), cache.to(dtype)
    mine, reference = (kind(group(window), c, registered, dtype) for kind, c in zip((RowAttention, PagedAttention), caches, strict=True))
    qkv = torch.randn(meta.num_tokens, (HEADS + 2 * KV_HEADS) * DIM).to(dtype)
    kept = qkv.clone()
    angles = torch.rand(meta.num_tokens, DIM // 2)
    for rotary in (Rotary(torch.cat((angles.cos(), angles.sin()), 1)), Rotary(torch.cat((angles.cos(), angles.sin()), 1)[:, 4:12])):
        got = mine.attend_qkv(qkv, rotary, 1, mine.begin(meta))
        want = reference.attend_qkv(qkv, rotary, 1, reference.begin(meta))
        valid = meta.slots >= 0
        close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
        torch.testing.assert_close(got[valid], want[valid], **close)
        assert got.shape == want.shape
        assert torch.isfinite(got).all(), "of tokens that belong to nobody too"
        torch.testing.assert_close(*caches, equal_nan=True, **close)
        assert torch.equal(qkv, kept)
        assert not caches[0][NULL].any()


def test_rows_attend_together_as_far_as_memory_and_padding_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    key = 2 * KV_HEADS * DIM * torch.float32.itemsize
    monkeypatch.setattr(rows_backend, "PIECE", 40 * key)
    monkeypatch.setattr(rows_backend, "PADDING", 3 * key)
    lengths = [9, 30, 12, 0, 10, 13, 12, 12]
    cache, meta = step([(max(length - 1, 0), min(length, 1)) for length in lengths], len(lengths), None)
    attention = RowAttention(group(None), cache, ops(), torch.float32)
    decode = attention.begin(meta).decode
    assert decode is not None
    assert decode.tokens.tolist() == [0, 2, 4, 5, 6, 7, 1], "9 to 12 keys, two of 12 with 13, for which there was no room, and 30"
    keys, masks = decode.lists[4], decode.lists[6]
    assert [tuple(each.shape) for each in keys] == [(3, KV_HEADS, 12, DIM), (3, KV_HEADS, 13, DIM), (1, KV_HEADS, 30, DIM)]
    assert masks[2] is None
    assert torch.isinf(masks[0]).sum((1, 2, 3)).tolist() == [3, 0, 2]
    assert not decode.whole, "a dead row is among them"


def test_it_is_what_a_cpu_takes_unless_the_group_wants_more() -> None:
    manager = PluginManager.load()
    settings = settle({"device.name": "cpu"}, manager)
    device = manager.choose("device", pin="cpu", settings=settings).load()(settings)

    def chosen(of: FullAttention) -> str:
        return manager.choose("attention_backend", group=of, device=device, settings=settings).offer.name

    assert chosen(group(None)) == chosen(group(4)) == "rows"
    shape = ("g", (0,), 2, 2, 8, 1.0)
    assert chosen(FullAttention(*shape, softcap=5.0)) == chosen(FullAttention(*shape, sinks=True)) == "paged"

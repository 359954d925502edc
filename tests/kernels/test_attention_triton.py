"""The Triton attention against its reference, with poison wherever nothing may be read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from triton_world import DEVICE, DTYPES, agree, close

from modelrunner.kernels.attention import prefill_list, reference, work_list
from modelrunner.kernels.attention.gpu import OVERRIDES, indexed_attention
from modelrunner.kernels.attention.prefill_list import GATHER_BYTES, GATHER_QUERIES, ITEM, PrefillConfig, choose_gathered
from modelrunner.kernels.attention.work_list import DecodeConfig, build_work

SCALE = 0.3
LAYERS = 3
Row = tuple[int, int]


@dataclass
class Step:
    """A step over rows of (computed, query) tokens: the arguments of `attention_index`, and which tokens are live."""

    q: torch.Tensor
    arena: torch.Tensor
    arguments: dict[str, torch.Tensor]
    limits: dict[str, int]
    live: torch.Tensor
    window: int | None

    def want(self, layer: int = 1, **options: Any) -> torch.Tensor:
        index = reference.attention_index(
            self.arena[:, layer], **self.arguments, num_heads=self.q.shape[1], window=self.window, dtype=self.q.dtype, **self.limits
        )
        return reference.indexed_attention(self.q, self.arena[:, layer], index, scale=SCALE, **options)

    def work(self, decode: DecodeConfig | None = None, prefill: PrefillConfig | None = None) -> work_list.AttentionWork:
        a, n = self.arguments, self.limits
        tensors = (a["block_table"], a["query_start"], a["query_len"], a["seq_len"], a["slots"])
        limits = (n["num_decode"], n["decode_query"], n["max_seq_len"], self.window)
        return build_work(self.arena[:, 0], *tensors, self.q.shape[1], limits, self.q.dtype, decode, prefill)

    def got(self, work: work_list.AttentionWork, layer: int = 1, **options: Any) -> torch.Tensor:
        return indexed_attention(self.q, self.arena[:, layer], work, scale=SCALE, **options)

    def check(self, decode: DecodeConfig | None = None, prefill: PrefillConfig | None = None, **options: Any) -> None:
        out = self.got(self.work(decode, prefill), **options)
        assert out.shape == self.q.shape
        assert out.dtype == self.q.dtype
        assert (out[~self.live] == 0).all()
        close(out[self.live], self.want(**options)[self.live], "paged_attention")


def make_step(
    rows: list[Row],
    page: int = 16,
    num_decode: int = 0,
    decode_query: int = 1,
    window: int | None = None,
    padding: int = 0,
    heads: tuple[int, int, int] = (6, 2, 16),
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
) -> Step:
    """Pages in random order; NaN in every slot past a row's length, in every page nobody owns, and in every slot that the window left."""
    lengths = [done + query for done, query in rows]
    max_pages = max(-(-max(lengths) // page), 1)
    arena = torch.full((1 + len(rows) * max_pages, LAYERS, page, 2, *heads[1:]), math.nan)
    arena[0] = 0.0
    free = (torch.randperm(arena.shape[0] - 1) + 1).tolist()
    table = torch.zeros(len(rows), max_pages, dtype=torch.int32)
    for i, (done, query) in enumerate(rows):
        for p in range(-(-lengths[i] // page)):
            table[i, p] = free.pop()
        for p in range(lengths[i]):
            if query and (window is None or p > done - window):
                arena[int(table[i, p // page]), :, p % page] = torch.randn(LAYERS, 2, *heads[1:])
    slots_of = [decode_query if i < num_decode else max(query, 1) for i, (_, query) in enumerate(rows)]
    start = torch.tensor([0, *slots_of]).cumsum(0).int()
    total = int(start[-1]) + padding
    query_len = torch.tensor([query for _, query in rows], dtype=torch.int32)
    seq_len = torch.tensor([n if q else 0 for n, (_, q) in zip(lengths, rows, strict=True)], dtype=torch.int32)
    token_row = torch.searchsorted(start[1:].contiguous(), torch.arange(total, dtype=torch.int32), right=True).clamp(max=len(rows) - 1)
    live = torch.arange(total) - start[token_row] < query_len[token_row]
    arguments = {
        "block_table": table,
        "query_start": start,
        "query_len": query_len,
        "seq_len": seq_len,
        "token_row": token_row,
        "slots": torch.full((total,), -1),
    }
    prefill = [max(q, 1) for i, (_, q) in enumerate(rows) if i >= num_decode]
    limits = {"num_decode": num_decode, "decode_query": decode_query, "max_query": max([decode_query, padding, *prefill])}
    limits["max_seq_len"] = max(max(lengths), 1)
    q = torch.randn(total, heads[0], heads[2]).to(DEVICE, dtype)
    on_device = {name: value.to(DEVICE) for name, value in arguments.items()}
    return Step(q, arena.to(DEVICE, cache_dtype or dtype), on_device, limits, live.to(DEVICE), window)


ONE_BLOCK = DecodeConfig(chunk=16, block_keys=16, num_warps=4, num_stages=1, programs=2)
CHUNKS = DecodeConfig(chunk=32, block_keys=16, num_warps=4, num_stages=5, programs=2)
WHOLE = DecodeConfig(chunk=256, block_keys=32, num_warps=4, num_stages=3, programs=2)
DECODE = [(62, 1), (0, 1), (0, 0), (31, 1), (16, 1)]
MIXED = [(40, 1), (3, 0), (0, 23), (30, 11), (9, 0), (0, 1)]
TILES = PrefillConfig(block_queries=16, block_keys=16, num_warps=4, num_stages=3, programs=2)
GATHERED = PrefillConfig(block_queries=64, block_keys=32, num_warps=4, num_stages=3, programs=2, gathered=True)


CONFIGS = {"one-block": ONE_BLOCK, "chunks": CHUNKS, "whole": WHOLE}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("page", "window", "softcap"), [(1, None, 2.0), (7, None, None), (7, 40, 2.0), (16, 1, None), (16, 7, None)])
def test_decode(page: int, window: int | None, softcap: float | None, config: str) -> None:
    make_step(DECODE, page, num_decode=5, window=window).check(CONFIGS[config], softcap=softcap)


@pytest.mark.parametrize("config", [ONE_BLOCK, CHUNKS, None], ids=["one_block", "chunks", "shipped"])
@pytest.mark.parametrize("window", [None, 6], ids=lambda w: f"window-{w}")
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_query_tokens_a_decode_row(dtype: torch.dtype, window: int | None, config: DecodeConfig | None) -> None:
    """Rows that draft: three query slots each, of which some or all are unused. Nine rows of a product are not a power of two."""
    rows = [(20, 3), (33, 1), (5, 0), (46, 2), (15, 2)]
    make_step(rows, num_decode=5, decode_query=3, window=window, dtype=dtype).check(config)


@pytest.mark.parametrize("config", [TILES, None], ids=["small", "shipped"])
@pytest.mark.parametrize("window", [None, 9], ids=lambda w: f"window-{w}")
@pytest.mark.parametrize("padding", [0, 13])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_batch(dtype: torch.dtype, padding: int, window: int | None, config: PrefillConfig | None) -> None:
    """Decode rows, a fresh prompt, a later chunk, a finished row, and tokens that belong to nobody."""
    make_step(MIXED, 16, num_decode=2, padding=padding, window=window, dtype=dtype).check(CHUNKS, config)


@pytest.mark.parametrize("padding", [0, 13])
@pytest.mark.parametrize("page", [1, 7, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gathered_keys(dtype: torch.dtype, page: int, padding: int) -> None:
    """Rows that end within a block of keys, beside one that is finished; neither reads what lies after another's keys."""
    rows = [(7, 1), (0, 70), (40, 33), (9, 0), (100, 64), (0, 1), (31, 1)]
    make_step(rows, page, num_decode=1, padding=padding, dtype=dtype).check(CHUNKS, GATHERED)


@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 32), (5, 1, 128)], ids=lambda h: "-".join(map(str, h)))
def test_gathered_keys_with_softcap_and_sinks(heads: tuple[int, int, int]) -> None:
    step = make_step([(0, 70), (40, 33)], heads=heads)
    step.q /= heads[2] ** 0.5 / 4
    step.check(prefill=GATHERED)
    step.check(prefill=GATHERED, softcap=2.0, sinks=torch.linspace(-3, 3, heads[0], device=DEVICE))


def test_which_keys_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of long prompts on Hopper, in 16 bits and without a window, if their memory suffices."""
    monkeypatch.setattr(prefill_list, "dependent_launch", lambda device: True)
    cache = torch.zeros(1, 16, 2, 8, 128, dtype=torch.float16)
    rows = GATHER_BYTES // (4096 * 2 * 8 * 128 * 2)

    def chosen(
        num_rows: int = rows,
        max_query: int = GATHER_QUERIES,
        window: int | None = None,
        dtype: torch.dtype = torch.float16,
        cache: torch.Tensor = cache,
    ) -> PrefillConfig | None:
        return choose_gathered(cache, 16, num_rows, max_query, 4096, window, dtype)

    config = chosen()
    assert config is not None
    assert config.gathered
    no = [chosen(rows + 1), chosen(0), chosen(max_query=GATHER_QUERIES - 1), chosen(window=100), chosen(dtype=torch.float32)]
    assert no == [None] * 5
    assert chosen(dtype=torch.float32, cache=cache.float()) is None
    assert chosen(cache=cache[..., :96]) is None
    monkeypatch.setattr(prefill_list, "dependent_launch", lambda device: False)
    assert chosen() is None


@pytest.mark.parametrize("page", [1, 7])
@pytest.mark.parametrize("window", [None, 20, 33], ids=lambda w: f"window-{w}")
def test_ragged_prefill(window: int | None, page: int) -> None:
    rows = [(7, 1), *[(i, 2) for i in range(5)], (11, 70), (0, 3)]
    make_step(rows, page, num_decode=1, window=window).check(prefill=TILES, softcap=5.0)


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("window", [None, 6], ids=lambda w: f"window-{w}")
@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.float16])
def test_sinks(sink_dtype: torch.dtype, window: int | None, softcap: float | None) -> None:
    """Heads with sinks from far below to far above all scores, in rows of one chunk and of several."""
    step = make_step([(40, 1), (3, 0), (0, 1), (0, 23), (30, 11)], num_decode=3, window=window)
    step.check(CHUNKS, TILES, softcap=softcap, sinks=torch.tensor([-40.0, -1.0, 0.0, 1.5, 4.0, 40.0], dtype=sink_dtype, device=DEVICE))


@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 96), (5, 1, 128), (2, 2, 256), (40, 1, 16)], ids=lambda h: "-".join(map(str, h)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_shapes(dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    """Groups that are no power of two or larger than a tile, head sizes that are padded. The scale keeps scores of all sizes alike."""
    step = make_step([(40, 1), (70, 1), (0, 19), (20, 5)], num_decode=2, heads=heads, dtype=dtype)
    step.q /= heads[2] ** 0.5 / 4
    step.check(CHUNKS)
    step.check()


def test_a_cache_of_another_type() -> None:
    make_step(MIXED, num_decode=2, dtype=torch.float32, cache_dtype=torch.float16).check(ONE_BLOCK)
    make_step(MIXED, num_decode=2, dtype=torch.float16, cache_dtype=torch.float32).check(CHUNKS)


@pytest.mark.parametrize("config", [ONE_BLOCK, CHUNKS], ids=["one_block", "chunks"])
def test_all_layers_share_a_work_list(config: DecodeConfig) -> None:
    """The counters of finished chunks are ready for the next layer."""
    step = make_step(MIXED, num_decode=2)
    work = step.work(config)
    for layer in (0, 1, 2, 0):
        close(step.got(work, layer)[step.live], step.want(layer)[step.live], "paged_attention")
    assert work.decode is not None
    assert not work.decode.arrivals.any()


def test_a_loose_bound_on_lengths_changes_nothing() -> None:
    """A captured step gives the largest possible bound, and a block table of as many pages."""
    step = make_step([*DECODE, (3, 30)], num_decode=5)
    exact = step.got(step.work(CHUNKS))
    step.limits["max_seq_len"] = 4096
    table = step.arguments["block_table"]
    step.arguments["block_table"] = torch.cat((table, table.new_full((table.shape[0], 300), 1 << 30)), 1)
    assert torch.equal(step.got(step.work(CHUNKS)), exact)


def test_a_row_is_not_changed_by_its_neighbours() -> None:
    step = make_step([(62, 1), (10, 1), (131, 1)], num_decode=3)
    together = step.got(step.work(CHUNKS))
    for i in range(3):
        alone = Step(step.q[i : i + 1], step.arena, dict(step.arguments), step.limits | {"num_decode": 1}, step.live[:1], None)
        for name in ("block_table", "query_len", "seq_len", "slots"):
            alone.arguments[name] = step.arguments[name][i : i + 1]
        alone.arguments["query_start"] = step.arguments["query_start"][:2]
        assert torch.equal(alone.got(alone.work(CHUNKS))[0], together[i])


@pytest.mark.parametrize("window", [None, 100], ids=lambda w: f"window-{w}")
def test_chunks_grow_where_partial_results_would_not_fit(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """150 tokens in chunks of 16 are 10 partial results a row; there is room for 12 of three rows."""
    monkeypatch.setattr(work_list, "PARTIAL_BYTES", 12 * 6 * 16 * 4)
    step = make_step([(149, 1), (120, 1), (15, 1), (140, 1)], num_decode=4, window=window)
    work = step.work(ONE_BLOCK)
    assert work.decode is not None
    items = work.decode.items[: int(work.decode.count)]
    assert int(items[:, 5].max()) < 12 <= work.decode.partial.shape[0]
    step.check(ONE_BLOCK)


@pytest.mark.parametrize("rows", [5, 40])
def test_decode_items(rows: int) -> None:
    """Items cover each row's keys once, chunks start at multiples of the chunk size, and last chunks come last, the longest first."""
    lengths = torch.randint(1, 100, (rows,)).tolist()
    step = make_step([(n - 1, 1) for n in lengths], num_decode=rows)
    work = step.work(CHUNKS)
    assert work.decode is not None
    items = work.decode.items[: int(work.decode.count)].tolist()
    assert len(items[0]) == ITEM
    for row, length in enumerate(lengths):
        mine = sorted(item for item in items if item[0] == row)
        assert [item[1:3] for item in mine] == [[s, min(s + 32, length)] for s in range(0, length, 32)]
        assert [item[3:5] for item in mine] == [[length, 1]] * len(mine)
        assert [item[6:] for item in mine] == [[i, len(mine)] for i in range(len(mine))]
    slots = [item[5] for item in items if item[7] > 1]
    assert sorted(slots) == list(range(len(slots)))
    assert all(item[5] == -1 for item in items if item[7] == 1)
    late = [item[6] == item[7] - 1 for item in items]
    assert late == sorted(late)
    if rows > 16:
        sizes = [(item[2] - item[1]) * work_list.BINS // 33 for item, last in zip(items, late, strict=True) if last]
        assert sizes == sorted(sizes, reverse=True)


def test_prefill_tiles_come_longest_first() -> None:
    step = make_step([(40, 1), (0, 50), (200, 9), (0, 0), (17, 33)], num_decode=1, padding=20, heads=(2, 2, 16))
    prefill = step.work(prefill=TILES).prefill
    assert prefill is not None
    assert prefill.tile_query == 16
    tiles = prefill.tiles[: int(prefill.count)].tolist()
    keys = [tile[6] for tile in tiles]
    assert keys == sorted(keys, reverse=True)
    tokens = [t for tile in tiles for t in range(tile[4], tile[4] + tile[5])]
    assert sorted(tokens) == list(range(1, step.q.shape[0]))


def test_queries_that_are_a_view() -> None:
    step = make_step(MIXED, num_decode=2)
    wide = torch.full((step.q.shape[0], 9, 16), math.nan, device=DEVICE)
    wide[:, 2:8] = step.q
    step.q = wide[:, 2:8]
    step.check(CHUNKS)


def test_steps_without_live_rows() -> None:
    make_step([(4, 0), (9, 0)], num_decode=2).check()
    make_step([(4, 0), (9, 0)]).check()


@pytest.mark.parametrize("op", ["write_cache", "gather_pages", "paged_attention"])
def test_conformance_cases(op: str) -> None:
    agree(op, OVERRIDES, {name: getattr(reference, name) for name in ("write_cache", "gather_pages", "paged_attention")})

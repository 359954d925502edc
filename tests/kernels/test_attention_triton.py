"""The Triton attention against its reference, with poison wherever nothing may be read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from triton_world import DEVICE, DTYPES, agree, close, close_in_8_bits

from modelrunner.kernels.attention import gpu, prefill_list, reference, work_list
from modelrunner.kernels.attention.gpu import OVERRIDES, indexed_attention, qkv_attention
from modelrunner.kernels.attention.parts import MOST_PARTS
from modelrunner.kernels.attention.prefill_list import GATHER_BYTES, GATHER_QUERIES, ITEM, PrefillConfig, choose_gathered
from modelrunner.kernels.attention.work_list import DecodeConfig, build_work
from modelrunner.kernels.norm.reference import rms_norm
from modelrunner.kernels.rope.reference import apply_rope

SCALE = 0.3
LAYERS = 3
E4M3 = torch.float8_e4m3fn
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


ONE_BLOCK = DecodeConfig(chunk=16, block_keys=16, num_warps=4, num_stages=1, programs=2, hold=True, fused=True)
CHUNKS = DecodeConfig(chunk=32, block_keys=16, num_warps=4, num_stages=5, programs=2, fused=True)
HELD = DecodeConfig(chunk=32, block_keys=16, num_warps=4, num_stages=2, programs=2, hold=True, fused=True)
STREAM = DecodeConfig(chunk=32, block_keys=16, num_warps=4, num_stages=3, programs=2, stream=True)
WHOLE = DecodeConfig(chunk=256, block_keys=32, num_warps=4, num_stages=3, programs=2)
DECODE = [(62, 1), (0, 1), (0, 0), (31, 1), (16, 1)]
MIXED = [(40, 1), (3, 0), (0, 23), (30, 11), (9, 0), (0, 1)]
TILES = PrefillConfig(block_queries=16, block_keys=16, num_warps=4, num_stages=3, programs=2)
PARTS = PrefillConfig(block_queries=16, block_keys=16, num_warps=4, num_stages=3, programs=20, part_keys=32)
GATHERED = PrefillConfig(block_queries=64, block_keys=32, num_warps=4, num_stages=3, programs=2, gathered=True)


CONFIGS = {"one-block": ONE_BLOCK, "chunks": CHUNKS, "held": HELD, "whole": WHOLE, "stream": STREAM}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("page", "window", "softcap"), [(1, None, 2.0), (7, None, None), (7, 40, 2.0), (16, 1, None), (16, 7, None)])
def test_decode(page: int, window: int | None, softcap: float | None, config: str) -> None:
    make_step(DECODE, page, num_decode=5, window=window).check(CONFIGS[config], softcap=softcap)


@pytest.mark.parametrize("config", [ONE_BLOCK, CHUNKS, STREAM, None], ids=["one_block", "chunks", "stream", "shipped"])
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


@pytest.mark.parametrize("config", [ONE_BLOCK, CHUNKS, STREAM], ids=["one_block", "chunks", "stream"])
def test_all_layers_share_a_work_list(config: DecodeConfig) -> None:
    """The counters of finished chunks are ready for the next layer."""
    step = make_step(MIXED, num_decode=2)
    work = step.work(config)
    for layer in (0, 1, 2, 0):
        close(step.got(work, layer)[step.live], step.want(layer)[step.live], "paged_attention")
    assert not work.decode.arrivals.any()


def test_a_loose_bound_on_lengths_changes_nothing() -> None:
    """A captured step gives the largest possible bound, and a block table of as many pages."""
    step = make_step([*DECODE, (3, 30)], num_decode=5)
    exact = step.got(step.work(CHUNKS))
    step.limits["max_seq_len"] = 4096
    table = step.arguments["block_table"]
    step.arguments["block_table"] = torch.cat((table, table.new_full((table.shape[0], 300), 1 << 30)), 1)
    assert torch.equal(step.got(step.work(CHUNKS)), exact)


@pytest.mark.parametrize("rows", [[*DECODE, (3, 30)], [(40, 1), (3, 0), (0, 23), (9, 1)], [(0, 9), (7, 1)], [(5, 1), (5, 2), (0, 0)]])
@pytest.mark.parametrize("window", [None, 9], ids=lambda w: f"window-{w}")
def test_decode_rows_are_found_on_the_device(rows: list[Row], window: int | None) -> None:
    """A captured step with prompts does not say how many rows decode, and has rows of nobody at its end."""
    num_decode = next((i for i, (_, query) in enumerate(rows) if query > 1), len(rows))
    step = make_step(rows, num_decode=num_decode, padding=4, window=window)
    work = step.work(CHUNKS, TILES)
    told = {item[0] for item in work.decode.items[: int(work.decode.count)].tolist()}
    assert told == set(range(num_decode))
    exact = step.got(work)
    step.limits["num_decode"] = 0
    assert torch.equal(step.got(step.work(CHUNKS, TILES)), exact)
    tokens = step.arguments["slots"].shape[0]
    for name, value in (("query_start", tokens), ("query_len", 0), ("seq_len", 0)):
        step.arguments[name] = torch.cat((step.arguments[name], step.arguments[name].new_full((5,), value)))
    table = step.arguments["block_table"]
    step.arguments["block_table"] = torch.cat((table, table.new_zeros(5, table.shape[1])))
    assert torch.equal(step.got(step.work(CHUNKS, TILES))[step.live], exact[step.live])


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
    monkeypatch.setattr(work_list, "PARTIAL_BYTES", 12 * 6 * 16 * 8)
    step = make_step([(149, 1), (120, 1), (15, 1), (140, 1)], num_decode=4, window=window)
    work = step.work(ONE_BLOCK)
    items = work.decode.items[: int(work.decode.count)]
    assert int(items[:, 5].max()) < 12 <= work.decode.partial.shape[0]
    step.check(ONE_BLOCK)


@pytest.mark.parametrize("rows", [5, 40])
def test_decode_items(rows: int) -> None:
    """Items cover each row's keys once, chunks start at multiples of the chunk size, and last chunks come last, the longest first."""
    lengths = torch.randint(1, 100, (rows,)).tolist()
    step = make_step([(n - 1, 1) for n in lengths], num_decode=rows)
    work = step.work(CHUNKS)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(6, 2, 16), (2, 2, 48)])
def test_tiles_share_out_their_keys(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Two layers over one list: what counts ended parts is zero again."""
    step = make_step([(40, 1), (150, 20), (0, 7), (70, 5), (90, 0)], 7, num_decode=1, padding=9, heads=heads, dtype=dtype)
    work = step.work(prefill=PARTS)
    assert work.prefill is not None
    words = [tile[7] for tile in work.prefill.tiles[: int(work.prefill.count)].tolist()]
    assert max(word % 16 for word in words) > 2
    sinks = torch.linspace(-3, 3, heads[0], device=DEVICE)
    for layer in (1, 2):
        close(step.got(work, layer, sinks=sinks)[step.live], step.want(layer, sinks=sinks)[step.live], "paged_attention")
    assert (step.got(work)[~step.live] == 0).all()


def test_parts_of_a_tile_are_all_its_keys_and_as_many_as_there_is_room_for() -> None:
    rows = [(0, 30), (3000, 40), (90, 10)]
    step = make_step(rows, num_decode=0, heads=(2, 2, 16))
    prefill = step.work(prefill=PARTS).prefill
    assert prefill is not None
    assert prefill.parts is not None
    tiles = prefill.tiles[: int(prefill.count)].tolist()
    assert len(tiles) <= prefill.parts.slots
    places = sorted((tile[0], tile[1], tile[7] // 16 % 16, tile[7] % 16, tile[7] // 256) for tile in tiles)
    for row, first, part, parts, slot in places:
        assert parts == (1, min(prefill.parts.slots // 6, MOST_PARTS), 3)[row]  # 6 tiles share the slots; 100 keys are 3 parts
        assert slot + part < prefill.parts.slots
        assert [p for r, f, p, *_ in places if (r, f) == (row, first)] == list(range(parts))


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


class Fused:
    """A decode step from the projection's output: the step's own keys and values are not in the cache yet."""

    def __init__(self, step: Step, rotary: int, norm: bool) -> None:
        self.step, self.heads, self.kv_heads, self.dim = step, step.q.shape[1], step.arena.shape[4], step.arena.shape[5]
        a, tokens, page = step.arguments, step.q.shape[0], step.arena.shape[2]
        offset = torch.arange(tokens, device=DEVICE) - a["query_start"][a["token_row"]]
        position = (a["seq_len"] - a["query_len"])[a["token_row"]] + offset
        place = a["block_table"][a["token_row"], (position // page).clamp(max=a["block_table"].shape[1] - 1)].long() * page
        a["slots"] = torch.where(step.live, place + position % page, -1)
        for slot in a["slots"][step.live].tolist():
            step.arena[slot // page, :, slot % page] = math.nan
        self.qkv = torch.randn(tokens, (self.heads + 2 * self.kv_heads) * self.dim, device=DEVICE).to(step.q.dtype)
        self.norms = [torch.randn(self.dim, device=DEVICE).to(step.q.dtype) if norm else None for _ in range(2)]
        angle = position.float().unsqueeze(1) / (1 + torch.arange(rotary // 2, device=DEVICE))
        self.cos_sin = torch.cat((angle.cos(), angle.sin()), 1)

    def want(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The output and the arena, by the references."""
        step = Step(self.step.q, self.step.arena.clone(), self.step.arguments, self.step.limits, self.step.live, self.step.window)
        sizes = (self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim)
        q, k, v = (part.unflatten(-1, (-1, self.dim)) for part in self.qkv.split(sizes, -1))
        if self.norms[0] is not None:
            q, k = (rms_norm(x, weight, 1e-5) for x, weight in zip((q, k), self.norms, strict=True))
        step.q, k = apply_rope(q, k, None, self.cos_sin)
        reference.write_cache(step.arena[:, 1], k, v, step.arguments["slots"], scales=options.get("scales"))
        return step.want(**options), step.arena

    def check(self, config: DecodeConfig | None, **options: Any) -> None:
        step, (out, arena) = self.step, self.want(**options)
        got = qkv_attention(
            self.qkv, self.heads, self.kv_heads, *self.norms, 1e-5, self.cos_sin, step.arena[:, 1], step.arguments["slots"],
            step.work(config), scale=SCALE, **options,
        )  # fmt: skip
        close(got[step.live], out[step.live], "paged_attention")
        assert got.isfinite().all()
        if arena.dtype == E4M3:
            close_in_8_bits(step.arena, arena)
        else:
            close(step.arena, arena, "qkv_rope_write")


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("rotary", "norm", "window"), [(16, True, None), (16, False, 20), (8, True, 1)])
def test_fused_decode(rotary: int, norm: bool, window: int | None, config: str) -> None:
    """Rows whose last chunk is new from its first key on (17, 33), rows of one token, dead rows."""
    rows = [(62, 1), (0, 1), (0, 0), (31, 1), (16, 1), (32, 1)]
    for dtype in DTYPES:
        Fused(make_step(rows, 7, num_decode=6, window=window, dtype=dtype), rotary, norm).check(CONFIGS[config])


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("window", [None, 6], ids=lambda w: f"window-{w}")
def test_fused_drafts_with_sinks_and_softcap(window: int | None, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """New keys on both sides of a chunk's edge; in one launch, and in two."""
    sinks = torch.tensor([-40.0, -1.0, 0.0, 1.5, 4.0, 40.0], device=DEVICE)
    for most in (0, 18):
        monkeypatch.setattr(gpu, "FUSED_TOKENS", most)
        monkeypatch.setattr(gpu, "FUSED_HEADS", most)
        step = make_step([(20, 3), (31, 3), (5, 0), (46, 2), (15, 2), (0, 3)], num_decode=6, decode_query=3, window=window)
        Fused(step, 16, True).check(CONFIGS[config], softcap=2.0, sinks=sinks)


@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 96)], ids=lambda h: "-".join(map(str, h)))
def test_fused_head_shapes(heads: tuple[int, int, int]) -> None:
    Fused(make_step([(40, 1), (70, 1)], num_decode=2, heads=heads), heads[2], True).check(None)
    Fused(make_step([(40, 2), (70, 1)], num_decode=2, decode_query=2, heads=heads), heads[2] // 2, heads[2] == 64).check(None)


def test_a_fused_mixed_step_takes_two_launches() -> None:
    Fused(make_step(MIXED, num_decode=2, padding=3), 16, True).check(CHUNKS)

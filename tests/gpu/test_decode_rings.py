"""Decode attention by rings, which no interpreter runs, against float32, with NaN wherever nothing may be read or was not written."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton")
from modelrunner.kernels.attention import gpu, ring_rows
from modelrunner.kernels.attention.ring_rows import FEWEST_ROWS, MOST_ROWS, RingConfig, RingWork, choose_rings, ring_work
from modelrunner.kernels.attention.work_list import AttentionWork

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9"),
    pytest.mark.skipif(not ring_rows.RINGS, reason="rings are not written for this Triton's Gluon"),
]
DIM, SCALE, EPS, BF16 = 128, 0.11, 1e-6, torch.bfloat16
ODD = [1, 2, 15, 16, 17, 18, 63, 64, 65, 66, 0, 129, 1000, 0, *range(40, 60)]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer of floats that a launcher takes is NaN."""
    empty = torch.empty

    def poisoned(*size: object, **kw: object) -> torch.Tensor:
        out = empty(*size, **kw)  # type: ignore[call-overload]
        return out.fill_(float("nan")) if out.is_floating_point() else out  # type: ignore[no-any-return]

    monkeypatch.setattr(torch, "empty", poisoned)


@dataclass
class Step:
    """Decode rows of one layer of three. A length of 0: a dead row, which writes nothing."""

    qkv: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor] | tuple[None, None]
    cos_sin: torch.Tensor
    heads: tuple[int, int]

    def index(self, config: RingConfig | None = None, window: int | None = None) -> AttentionWork:
        rows, live = self.lengths.shape[0], (self.lengths > 0).int()
        start = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
        work = gpu.attention_index(
            self.cache, self.table, start, live, self.lengths, start[:-1].long(), self.slots, num_heads=self.heads[0],
            num_decode=rows, decode_query=1, max_query=1, max_seq_len=int(self.lengths.max()), window=window, dtype=self.qkv.dtype,
        )  # fmt: skip
        return work if config is None else replace(work, rings=ring_work(config, self.cache, self.heads[0], self.table, live, self.lengths))

    def attend(self, work: AttentionWork, **options: object) -> torch.Tensor:
        return gpu.qkv_attention(
            self.qkv, *self.heads, *self.norms, EPS, self.cos_sin, self.cache, self.slots, work, scale=SCALE, **options
        )  # type: ignore[arg-type]

    def want(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs in float32, and the cache with the new keys and values."""
        (heads, num_kv), rows, page, cache = self.heads, self.lengths.shape[0], self.cache.shape[1], self.cache.clone()
        q, k, v = self.qkv.view(rows, -1, DIM).split((heads, num_kv, num_kv), 1)
        q, k = (self._turned(x, norm) for x, norm in zip((q, k), self.norms, strict=True))
        out = torch.zeros(rows, heads, DIM, device="cuda")
        for row, length in enumerate(self.lengths.tolist()):
            if not length:
                continue
            cache[int(self.table[row, (length - 1) // page]), (length - 1) % page] = torch.stack((k[row], v[row]))
            kept = cache[self.table[row, : -(-length // page)].long()].flatten(0, 1)[:length].float()
            kept = kept.repeat_interleave(heads // num_kv, 2)
            weights = (torch.einsum("hd,shd->hs", q[row].float(), kept[:, 0]) * SCALE).softmax(1)
            out[row] = torch.einsum("hs,shd->hd", weights, kept[:, 1])
        return out, cache

    def _turned(self, x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        wide = x.float()
        if norm is not None:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
            wide = (wide * norm if norm.dtype == torch.float32 else wide.to(x.dtype).float() * norm.float()).to(x.dtype).float()
        cos, sin = self.cos_sin[:, None].chunk(2, 2)
        a, b = wide.chunk(2, 2)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), 2).to(x.dtype)

    def check(self, work: AttentionWork, times: int = 2) -> None:
        """Each time from what the time before left of the counts of parts."""
        want, cache = self.want()
        for _ in range(times):
            out = self.attend(work)
            assert torch.equal(out[self.lengths == 0], torch.zeros_like(out[self.lengths == 0]))
            torch.testing.assert_close(out.float(), want, rtol=1.6e-2, atol=1.6e-2)
            torch.testing.assert_close(self.cache.float(), cache.float(), rtol=1e-2, atol=1e-2, equal_nan=True)


def make_step(
    lengths: list[int], heads: tuple[int, int] = (16, 8), page: int = 16, dtype: torch.dtype = BF16, norm: torch.dtype | None = BF16
) -> Step:
    """Pages in random order; NaN in every slot past a row's old tokens, and in pages that nobody owns."""
    rows, num_kv = len(lengths), heads[1]
    columns = max(-(-max(lengths) // page), 1)
    arena = torch.full((1 + rows * columns, 3, page, 2, num_kv, DIM), float("nan"), dtype=dtype, device="cuda")
    cache, table = arena[:, 1], (torch.randperm(rows * columns, device="cuda") + 1).int().view(rows, columns)
    slots = torch.full((rows,), -1, dtype=torch.int64, device="cuda")
    for row, length in enumerate(lengths):
        if length:
            tokens = torch.arange(length, device="cuda")
            place = table[row, tokens // page].long()
            cache[place[:-1], tokens[:-1] % page] = torch.randn(length - 1, 2, num_kv, DIM, device="cuda").to(dtype)
            slots[row] = place[-1] * page + (length - 1) % page
    width = (heads[0] + 2 * num_kv) * DIM
    qkv = torch.randn(rows, width + 64, device="cuda").to(dtype)[:, :width]
    qkv[torch.tensor(lengths, device="cuda") == 0] = float("nan")
    norms = (None, None) if norm is None else tuple((1 + torch.randn(DIM, device="cuda") / 4).to(norm) for _ in range(2))
    angle = torch.rand(rows, DIM // 2, device="cuda") * 7
    cos_sin = torch.cat((angle.cos(), angle.sin()), 1)
    return Step(qkv, cache, table, torch.tensor(lengths, dtype=torch.int32, device="cuda"), slots, norms, cos_sin, heads)  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [RingConfig(2, 3, 128, 1), RingConfig(1, 4, 128, 2), RingConfig(1, 2, 168, 1)], ids=str)
@pytest.mark.parametrize(
    "lengths",
    [ODD, [1], [3000], [0, 0], [700, 5, 1300], [*range(300, 428)], [1] * 40, [4500] + [3] * 200, [903] * 32],
    ids=["odd", "one token", "one row", "dead", "few", "many", "no old keys", "long and short", "equal"],
)
def test_rings(lengths: list[int], config: RingConfig) -> None:
    """Rows without keys and dead ones, ends of pages and buffers, rows that many programs share and programs that have many rows."""
    step = make_step(lengths)
    step.check(step.index(config))


@pytest.mark.parametrize(("heads", "page"), [((32, 8), 16), ((8, 1), 32), ((4, 4), 64), ((14, 2), 16)], ids=str)
def test_heads_and_pages(heads: tuple[int, int], page: int) -> None:
    step = make_step(ODD, heads, page)
    step.check(step.index())


@pytest.mark.parametrize(("dtype", "norm"), [(torch.float16, torch.float16), (BF16, None), (BF16, torch.float32)], ids=str)
def test_types_and_norms(dtype: torch.dtype, norm: torch.dtype | None) -> None:
    step = make_step(ODD, dtype=dtype, norm=norm)
    step.check(step.index())


def test_where_rings_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what they do not serve is as before: other options of a step that has a ring's list, windows, few rows."""
    step, calls = make_step(ODD), []
    monkeypatch.setattr(gpu, "ring_rows", lambda *_: calls.append(1))
    work = step.index()
    assert isinstance(work.rings, RingWork)
    step.attend(work)
    assert calls == [1]
    for options in ({"softcap": 30.0}, {"sinks": torch.zeros(16, device="cuda", dtype=BF16)}):
        assert torch.isfinite(step.attend(work, **options)).all()
    assert calls == [1]
    assert step.index(window=64).rings is None
    for few_or_many in (ODD[: FEWEST_ROWS - 1], [5] * (MOST_ROWS + 1)):
        assert make_step(few_or_many).index().rings is None
    assert choose_rings(step.cache.to(torch.float8_e4m3fn), 64, 16, BF16) is None
    assert choose_rings(step.cache[..., :64], 64, 16, BF16) is None


def test_a_chain_in_a_graph_is_the_same_each_time() -> None:
    """The next layer's keys are on their way while one still runs; its queries must have been written."""
    step = make_step([*range(100, 100 + MOST_ROWS)], (16, 8))
    work, weight = step.index(), torch.randn(2048, step.qkv.shape[1], device="cuda").to(BF16) * 0.05
    assert work.rings is not None
    result = torch.zeros(MOST_ROWS, 16, DIM, device="cuda", dtype=BF16)

    def chain() -> None:
        qkv = step.qkv.contiguous()
        for _ in range(8):
            out = replace(step, qkv=qkv).attend(work)
            qkv = out.flatten(1) @ weight
        result.copy_(out)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain()
    torch.cuda.synchronize()
    want, graph = result.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        chain()
    for _ in range(50):
        result.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, want)

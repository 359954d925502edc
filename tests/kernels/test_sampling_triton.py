"""The Triton sampling kernels choose the reference's tokens: exactly, but for noise that the two logarithms round apart to a near tie."""

from __future__ import annotations

import math

import pytest
import torch
from triton_world import DEVICE, DTYPES, ON_GPU, close

from modelrunner.kernels.sampling import philox, reference

pytest.importorskip("triton")
from modelrunner.kernels.sampling import launch, noise, scan

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy of infinities, in the interpreter

INF = math.inf
SIZES = [(1, 1), (2, 5), (5, 331), (3, 5000)]
Filters = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def same(out: tuple[torch.Tensor, ...], ref: tuple[torch.Tensor, ...]) -> None:
    assert out[0].tolist() == ref[0].tolist()
    assert out[1].tolist() == ref[1].tolist()
    assert [t.dtype for t in out] == [t.dtype for t in ref]


def made_logits(n: int, vocab: int, dtype: torch.dtype, scale: float = 3.0) -> torch.Tensor:
    """A view with a row stride of its own, masked entries, and ties on a coarse grid in every second row."""
    wide = torch.full((n, vocab + 7), math.nan)
    wide[:, :vocab] = torch.randn(n, vocab) * scale
    wide[::2, :vocab] = wide[::2, :vocab].mul(2).round().div(2)
    wide[:, : vocab - 1 : 9] = -INF
    return wide.to(DEVICE, dtype)[:, :vocab]


def made_columns(n: int) -> tuple[torch.Tensor, ...]:
    """temperature, seed, position, choice."""
    seed = torch.randint(-(2**62), 2**62, (n,))
    seed[0] = -1
    choice = torch.randint(0, 9, (n,), dtype=torch.int32)
    return tuple(t.to(DEVICE) for t in (torch.rand(n) * 1.5 + 0.05, seed, torch.randint(0, 9999, (n,)), choice))


def check_sample(logits: torch.Tensor, columns: tuple[torch.Tensor, ...], filters: Filters = (None, None, None)) -> torch.Tensor:
    kept = logits.clone()
    out = launch.sample(logits, columns[0], *filters, *columns[1:])
    same(out, reference.sample(logits, columns[0], *filters, *columns[1:]))
    assert torch.equal(logits.nan_to_num(), kept.nan_to_num())
    return out[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "vocab"), SIZES)
def test_greedy(n: int, vocab: int, dtype: torch.dtype) -> None:
    logits = made_logits(n, vocab, dtype)
    same(launch.greedy(logits), reference.greedy(logits))


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_of_strange_rows(dtype: torch.dtype) -> None:
    """All masked, NaN (the first one), infinite, equal tokens in two chunks, both zeros; and with a temperature."""
    logits = torch.full((8, 2500), -1.0)
    logits[0] = -INF
    logits[1, [7, 1300]] = math.nan
    logits[2, [1030, 40]] = INF
    logits[3, [2400, 1100]] = 5.0
    logits[4] = -0.0
    logits[4, 2000] = 0.0
    logits[5, 1500:] = math.nan
    logits[5, 3] = INF
    logits[6, :2499] = -INF
    logits[7, 0] = -INF
    logits = logits.to(DEVICE, dtype)
    same(launch.greedy(logits), reference.greedy(logits))
    temperature, *draw = made_columns(8)
    check_sample(logits, (temperature, *draw))
    check_sample(logits, (temperature * 0, *draw))


@pytest.mark.parametrize(("n", "vocab"), [(1, 1), (3, 331), (2, 5000)])
def test_gumbel_noise(n: int, vocab: int) -> None:
    _, *draw = made_columns(n)
    close(noise.gumbel_noise(*draw, philox.PURPOSE_DRAFT, vocab), philox.gumbel_noise(*draw, philox.PURPOSE_DRAFT, vocab), "gumbel_noise")


def test_given_uniforms() -> None:
    logits, (temperature, *draw) = made_logits(2, 50, torch.float32), made_columns(2)
    uniforms = torch.rand(2, 50, device=DEVICE)
    out = launch.sample(logits, temperature, None, None, None, *draw, uniforms)
    same(out, reference.sample(logits, temperature, None, None, None, *draw, uniforms))
    assert torch.equal(noise.gumbel_noise(*draw, 0, 50, uniforms), philox.gumbel_noise(*draw, 0, 50, uniforms))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "vocab"), SIZES)
def test_sample_without_filters(n: int, vocab: int, dtype: torch.dtype) -> None:
    check_sample(made_logits(n, vocab, dtype), made_columns(n))


@pytest.mark.parametrize("scale", [0.0, 0.01, 30.0, 1000.0])
def test_flat_and_peaked_rows(scale: float) -> None:
    """Equal logits leave the draw to the noise alone; far-off chunks and a small temperature may not overflow into it."""
    logits, (temperature, *draw) = made_logits(6, 4100, torch.float32, scale), made_columns(6)
    temperature[0], temperature[1], temperature[2] = 0.0, 2e-4, 50.0
    check_sample(logits, (temperature, *draw))


def made_filters(n: int, vocab: int, kind: str) -> Filters:
    top_k = torch.randint(1, max(vocab // 4, 2), (n,), dtype=torch.int32)
    top_k[0] = 0
    top_p, min_p = torch.rand(n) * 0.98 + 0.02, torch.rand(n) * 0.2
    top_p[-1], min_p[-1] = 1.0, 0.0
    found = {"k": top_k, "p": top_p, "m": min_p}
    return tuple(found[name].to(DEVICE) if name in kind else None for name in "kpm")  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["k", "p", "m", "kp", "kpm"])
@pytest.mark.parametrize(("n", "vocab"), SIZES)
def test_filters(n: int, vocab: int, kind: str) -> None:
    dtype = DTYPES[(n + len(kind)) % len(DTYPES)]
    check_sample(made_logits(n, vocab, dtype), made_columns(n), made_filters(n, vocab, kind))


@pytest.mark.parametrize("kind", ["k", "kp"])
def test_more_ties_than_the_list_holds(kind: str) -> None:
    """A row of equal logits, one with two values, one whose finite tokens are fewer than k; and a k beyond the list's reach."""
    logits = torch.full((4, 3000), -2.5, device=DEVICE)
    logits[1, 2000:] = 1.0
    logits[2, 5:] = -INF
    logits[3] = torch.randn(3000)
    filters = made_filters(4, 3000, kind)
    filters[0].copy_(torch.tensor([5, 20, 100, 900]))  # type: ignore[union-attr]
    check_sample(logits, made_columns(4), filters)


def test_top_p_draws_again_until_a_token_stays() -> None:
    """A small p drops most of what the unfiltered race finds."""
    logits, columns = made_logits(6, 3000, torch.float32, 1.5), made_columns(6)
    top_p = torch.tensor([1e-6, 0.01, 0.05, 0.1, 0.3, 0.5], device=DEVICE)
    check_sample(logits, columns, (None, top_p, None))
    check_sample(logits, columns, (None, top_p, torch.full_like(top_p, 0.02)))


def test_rows_of_columns() -> None:
    """`sample_rows` and `greedy_rows` equal their plain chains: gathered columns, the position, and which tokens count."""
    n, table, vocab = 5, 9, 400
    logits, columns = made_logits(n, vocab, torch.float32), made_columns(table)
    logits[3] = -INF
    temperature, seed, _, choice = columns
    temperature[4] = 0.0
    filters = made_filters(table, vocab, "kpm")
    rows = torch.tensor([7, 0, 8, 3, 4], dtype=torch.int32, device=DEVICE)
    samples = torch.tensor([True, True, False, True, True], device=DEVICE)
    computed, query_len = (torch.randint(1, 90, (n,), dtype=torch.int32, device=DEVICE) for _ in range(2))
    for given in (filters, (None, None, None)):
        taken = [None if t is None else t[rows.long()] for t in (temperature, *given, seed, choice)]
        tokens, ok = reference.sample(logits, *taken[:5], computed + query_len, taken[5])  # type: ignore[arg-type]
        out = launch.sample_rows(logits, rows, samples, computed, query_len, temperature, *given, seed, choice)
        close(out, (tokens, (samples & ok).to(torch.int32), ok), "sample")
    tokens, ok = reference.greedy(logits)
    close(launch.greedy_rows(logits, samples), (tokens, (samples & ok).to(torch.int32), ok), "greedy")


def test_every_shape_of_the_scan_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks and masses bit for bit, and so the tokens: shapes depend on how many rows there are."""
    logits, (temperature, seed, position, choice) = made_logits(3, 3000, torch.float32), made_columns(3)
    columns = scan.Columns(temperature, None, None, None, seed, choice, position)
    one, tokens = scan.scan(logits, columns), launch.sample(logits, temperature, None, None, None, seed, position, choice)
    for tile, steps in ((8, 2), (16, 2), (32, 1)):
        monkeypatch.setattr(scan, "TILE", tile)
        monkeypatch.setattr(scan, "scan_steps", lambda n, groups, steps=steps: steps)
        other = scan.scan(logits, columns)
        assert torch.equal(other.peaks, one.peaks)
        assert torch.equal(other.masses, one.masses)
        same(launch.sample(logits, temperature, None, None, None, seed, position, choice), tokens)


@pytest.mark.skipif(not ON_GPU, reason="too many rows for the interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [151936, 49152, 262144, 151937])
def test_real_vocabularies(vocab: int, dtype: torch.dtype) -> None:
    n = 48
    logits, columns = made_logits(n, vocab, dtype, 2.0), made_columns(n)
    same(launch.greedy(logits), reference.greedy(logits))
    check_sample(logits, columns)
    top_k = torch.randint(0, 200, (n,), dtype=torch.int32, device=DEVICE)
    check_sample(logits, columns, (top_k, torch.rand(n, device=DEVICE) * 0.5 + 0.5, torch.rand(n, device=DEVICE) * 0.01))

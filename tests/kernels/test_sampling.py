"""Sampling operations: the generator bit for bit, the filters against sorted loops, independence from neighbours."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from modelrunner.kernels.sampling import greedy, gumbel_noise, sample
from modelrunner.kernels.sampling import reference as sampling
from modelrunner.kernels.sampling.philox import PURPOSE_DRAFT, PURPOSE_SAMPLE, philox, uniform_noise

# Published with the paper's code (Random123, kat_vectors): counter, key, result of philox4x32-10.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def numpy_philox(counter: list[np.ndarray], key: list[int]) -> list[np.ndarray]:
    """The generator in unsigned 64-bit numpy, as the paper writes it."""
    c, (k0, k1) = [np.asarray(x, dtype=np.uint64) for x in counter], key
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(p1 >> shift) ^ c[1] ^ np.uint64(k0), p1 & low, (p0 >> shift) ^ c[3] ^ np.uint64(k1), p0 & low]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter: list[int], key: list[int], words: list[int]) -> None:
    out = philox((int64(key[0]), int64(key[1])), tuple(int64(c) for c in counter))
    assert [int(word) for word in out] == words


@pytest.mark.parametrize("vocab", [1, 63, 331, 1000])
def test_uniforms_equal_numpy_bit_for_bit(vocab: int) -> None:
    """Signed, extreme and small seeds; the layout of counters; every value exact in float32."""
    seeds, positions, choices = [0, -1, 2**63 - 1, -(2**63), 123456789012], [0, 5, 2**31 - 1, 77, 8191], [0, 3, 0, 1, 15]
    out = uniform_noise(int64(*seeds), int64(*positions), torch.tensor(choices, dtype=torch.int32), PURPOSE_DRAFT, vocab)
    block = np.arange(-(-vocab // 4))
    for row, (seed, position, choice) in enumerate(zip(seeds, positions, choices, strict=True)):
        key = [seed % 2**32, seed % 2**64 >> 32]
        words = np.stack(numpy_philox([block, position + 0 * block, choice + 0 * block, PURPOSE_DRAFT + 0 * block], key), 1).reshape(-1)
        want = ((words >> np.uint64(9)).astype(np.float64) + 0.5) / 2**23
        assert np.array_equal(out[row].double().numpy(), want[:vocab])


def test_noise_differs_by_seed_position_choice_and_purpose() -> None:
    base = gumbel_noise(int64(1), int64(2), int64(3), PURPOSE_SAMPLE, 64)
    for seed, position, choice, purpose in [(2, 2, 3, 0), (1, 3, 3, 0), (1, 2, 4, 0), (1, 2, 3, PURPOSE_DRAFT), (1 + 2**32, 2, 3, 0)]:
        assert (gumbel_noise(int64(seed), int64(position), int64(choice), purpose, 64) != base).all()
    assert torch.equal(gumbel_noise(int64(1), int64(2), int64(3), PURPOSE_SAMPLE, 63), base[:, :63])


def test_noise_is_gumbel() -> None:
    """Mean 0.5772, variance pi^2 / 6, and the distribution function at a few points."""
    noise = gumbel_noise(torch.arange(64), torch.zeros(64), torch.zeros(64), PURPOSE_SAMPLE, 8192).double()
    assert noise.mean().item() == pytest.approx(0.57722, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    for x in (-1.0, 0.0, 2.0):
        assert (noise <= x).double().mean().item() == pytest.approx(math.exp(-math.exp(-x)), abs=0.003)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_greedy(dtype: torch.dtype) -> None:
    inf, nan = math.inf, math.nan
    rows = [[1, 5, 5, 2], [-inf, -inf, -9, -inf], [-inf] * 4, [1, nan, 2, 3], [nan] * 4, [1, inf, 2, 3], [0, 0, 0, 0]]
    logits = torch.tensor(rows, dtype=dtype)
    before = logits.clone()
    tokens, ok = greedy(logits)
    assert ok.tolist() == [True, True, False, False, False, False, True]
    assert (tokens[0], tokens[1], tokens[6]) == (1, 2, 0)
    assert ((tokens >= 0) & (tokens < 4)).all()
    assert torch.equal(logits.nan_to_num(1e4), before.nan_to_num(1e4))


def slow_kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that may be drawn, by sorting and adding up in float64."""
    finite = {i for i in range(len(logits)) if logits[i] > -np.inf}
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    kept = {i for i in finite if p[i] >= min_p * (1 - 1e-7)}
    if 0 < top_k < len(kept):
        worst = sorted((p[i] for i in kept), reverse=True)[top_k - 1]
        kept = {i for i in kept if p[i] >= worst}
    if top_p < 1:
        total, mass, last = sum(p[i] for i in kept), 0.0, 0.0
        for i in sorted(kept, key=lambda i: -p[i]):
            if mass >= top_p * total and p[i] < last:
                break
            mass, last = mass + p[i], p[i]
        kept = {i for i in kept if p[i] >= last}
    return kept


FILTERS = [
    (1.0, 0, 1.0, 0.0),
    (1.0, -1, 0.9, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.0, 1, 0.5, 0.0),
    (1.3, 40, 0.6, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.0, 0, 1.0, 1.0),
    (0.5, 30, 0.95, 0.02),
    (2.0, 2000, 0.999, 0.001),
    (1.0, 3, 1e-6, 0.0),
]


@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "many-ties"])
@pytest.mark.parametrize("vocab", [1, 63, 500, 1000])
@pytest.mark.parametrize("sorts", [True, False], ids=["by-sort", "by-digits"])
def test_the_kept_set(vocab: int, rounded: bool, sorts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every filter alone and together, one row each, with masked tokens; `many-ties` has the logits on a coarse grid."""
    monkeypatch.setattr(sampling, "SORTED_VOCAB", vocab if sorts else 0)
    n = len(FILTERS)
    logits = torch.randn(n, vocab) * 3
    if rounded:
        logits = logits.round()
    logits[:, vocab // 2 + 1 :: 3] = -math.inf
    temperature, top_p, min_p = (torch.tensor([f[i] for f in FILTERS]) for i in (0, 2, 3))
    top_k = torch.tensor([f[1] for f in FILTERS], dtype=torch.int32)
    distance = sampling.scaled_distance(logits, logits.argmax(-1), temperature)
    cut = sampling.filter_cut(distance, top_k, top_p, min_p)
    for i, parameters in enumerate(FILTERS):
        kept = set(torch.nonzero((distance[i] <= cut[i]) & torch.isfinite(logits[i])).flatten().tolist())
        assert kept == slow_kept(logits[i].numpy(), *parameters), parameters


def test_equal_mass_at_the_nucleus_edge() -> None:
    """Four equal tokens and top_p 0.5: two would do, but all four tie."""
    distance = torch.tensor([[0.0, 0.0, 0.0, 0.0, 50.0]])
    cut = sampling.filter_cut(distance, None, torch.tensor([0.5]), None)
    assert (distance <= cut).tolist() == [[True, True, True, True, False]]


def parameters(n: int, **given: float) -> dict[str, torch.Tensor]:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0, "choice": 0, **given}
    kinds = {"top_k": torch.int32, "seed": torch.int64, "position": torch.int32, "choice": torch.int32}
    return {name: torch.full((n,), value, dtype=kinds.get(name, torch.float32)) for name, value in values.items()}


def test_a_row_does_not_depend_on_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, in a batch, in another order, in slices: the same token, with every filter on."""
    n, vocab = 64, 331
    logits = torch.randn(n, vocab) * 2
    args = parameters(n, top_k=50, top_p=0.95, min_p=0.01) | {"seed": torch.randint(-(2**63), 2**63 - 1, (n,)), "position": torch.arange(n)}
    args["temperature"][::5] = 0.0
    tokens, ok = sample(logits, **args)
    assert ok.all()
    assert torch.equal(tokens[::5], greedy(logits)[0][::5])
    for i in range(n):
        assert sample(logits[i : i + 1], **{k: v[i : i + 1] for k, v in args.items()})[0] == tokens[i]
    order = torch.randperm(n)
    assert torch.equal(sample(logits[order], **{k: v[order] for k, v in args.items()})[0], tokens[order])
    poisoned = logits.clone()
    poisoned[1::2] = math.nan
    assert torch.equal(sample(poisoned, **args)[0][::2], tokens[::2])
    monkeypatch.setitem(sampling.MAX_ELEMENTS, "cpu", 7 * vocab)
    assert torch.equal(sample(logits, **args)[0], tokens)


def test_filters_that_keep_everything_equal_no_filter() -> None:
    logits = torch.randn(200, 331) * 4
    args = parameters(200) | {"seed": torch.arange(200)}
    bare = args | {"top_k": None, "top_p": None, "min_p": None}
    assert torch.equal(sample(logits, **args)[0], sample(logits, **bare)[0])


def test_logits_are_left_alone() -> None:
    logits = torch.randn(4, 100).to(torch.bfloat16)
    before = logits.clone()
    sample(logits, **parameters(4, top_k=3, top_p=0.5, min_p=0.1))
    assert torch.equal(logits, before)

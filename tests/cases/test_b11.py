"""B11: two top-k implementations kept different sets when logits tied at the cut, and the batch size decided which one ran.

Our rule: all that tie with the k-th are kept (docs of the `sample` operation and of the top-k stage).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from modelrunner.kernels.sampling import reference as sampling

SEEDS, VOCAB = 5000, 331


def tied_at_the_cut(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    logits = torch.ones(VOCAB, dtype=dtype)
    logits[0], logits[1:4] = 9, 8
    return logits


Sample = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def draw(sample: Sample, logits: torch.Tensor, top_k: int, seeds: torch.Tensor) -> torch.Tensor:
    n = seeds.shape[0]
    kept, zeros = torch.full((n,), top_k, dtype=torch.int32), torch.zeros(n, dtype=torch.int64)
    tokens, ok = sample(logits.expand(n, -1), torch.ones(n), kept, torch.ones(n), torch.zeros(n), seeds, zeros, zeros)
    assert ok.all()
    return tokens


def in_batches(sample: Sample, logits: torch.Tensor, top_k: int, size: int, seeds: int = SEEDS) -> torch.Tensor:
    return torch.cat([draw(sample, logits, top_k, part) for part in torch.arange(seeds).split(size)])


def test_all_that_tie_are_kept_at_every_batch_size(sample: Sample) -> None:
    logits = tied_at_the_cut()
    single = in_batches(sample, logits, 2, 1)
    assert set(single.tolist()) == {0, 1, 2, 3}
    for size in (7, 8, 64):
        assert torch.equal(in_batches(sample, logits, 2, size), single), f"batches of {size}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_path_draws_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thresholds by sorting and by digits: which of them runs depends on the vocabulary's size alone."""
    logits = tied_at_the_cut(dtype)
    by_sort = in_batches(sampling.sample, logits, 2, 64)
    assert set(by_sort.tolist()) == {0, 1, 2, 3}
    monkeypatch.setattr(sampling, "SORTED_VOCAB", 0)
    assert torch.equal(in_batches(sampling.sample, logits, 2, 64), by_sort)
    for size in (1, 7):
        assert torch.equal(in_batches(sampling.sample, logits, 2, size, 300), by_sort[:300])


def test_top_1_over_a_two_way_tie(sample: Sample) -> None:
    """bf16, top_k 1, two best tokens: both are kept, at every batch size alike."""
    logits = tied_at_the_cut(torch.bfloat16)
    logits[17] = 9
    tokens = in_batches(sample, logits, 1, 64)
    counts = torch.bincount(tokens, minlength=VOCAB)
    assert counts[[0, 17]].sum() == SEEDS
    assert abs(int(counts[0]) - SEEDS / 2) < 200  # 5.6 standard deviations
    for size in (1, 7, 8):
        assert torch.equal(in_batches(sample, logits, 1, size, 800), tokens[:800]), f"batches of {size}"

"""The sampler: stages, their columns, and the choice between the greedy and the drawing tail."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import modelrunner.kernels.sampling.reference
from modelrunner.batch import Batch, Feature
from modelrunner.errors import RequestError
from modelrunner.ops import Ops, Registry
from modelrunner.plugins import reference_kernels
from modelrunner.request import Request, SamplingParams
from modelrunner.sampler import Sampler, Stage, default_stages
from modelrunner.sampler import sampler as sampler_module
from modelrunner.sampler.penalties import Penalties
from modelrunner.sampler.temperature import Temperature
from modelrunner.settings import load_settings

VOCAB = 331
SETTINGS = load_settings({"scheduler": {"max_rows": 12}, "sampler": {"max_stop_token_ids": 4}})


def reference_ops() -> Ops:
    registry = Registry()
    reference_kernels.kernels(registry, None)
    return registry.resolve("cpu")


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(reference_ops(), default_stages())


def request(eos: tuple[int, ...] = (2,), seed: int = 7, **params: Any) -> Request:
    return Request("r", [1, 5], SamplingParams(**params), arrival=0.0, limit=20, seed=seed, eos_token_ids=eos)


def batch_of(sampler: Sampler, requests: list[Request], **fields: Any) -> Batch:
    """A decode batch, one row each, in reversed table rows, with the sampler's columns filled as the table would."""
    n = len(requests)
    columns = {}
    for column in sampler.columns(SETTINGS, VOCAB):
        if column.seats is None:
            values = [sampler.row_values(r).get(column.name, column.default) for r in reversed(requests)]
            columns[column.name] = torch.tensor(values, dtype=column.dtype)
    features = Feature.GREEDY
    for r in requests:
        features |= sampler.features(r.params)
    count = torch.arange(n + 1, dtype=torch.int32)
    ones = torch.ones(n, dtype=torch.int32)
    tensors = {
        "rows": n - 1 - count[:n],
        "query_start": count,
        "query_len": ones,
        "computed": 4 * ones,
        "seq_len": 5 * ones,
        "num_accepted": ones,
        "samples": torch.ones(n, dtype=torch.bool),
        "sample_index": count[:n].long(),
        "input_ids": count[:n].long(),
        "positions": count[:n].long(),
        "token_row": count[:n].long(),
        "token_valid": torch.ones(n, dtype=torch.bool),
    }
    hosts = {"num_rows": n, "num_tokens": n, "num_decode": n, "max_query": 1, "max_seq_len": 5, "num_draft": 0}
    return Batch(**{**hosts, **tensors, "features": features, "slots": {}, "block_tables": {}, "columns": columns, **fields})


def test_columns(sampler: Sampler) -> None:
    found = {c.name: (c.dtype, c.width, c.default, c.seats) for c in sampler.columns(SETTINGS, VOCAB)}
    assert found == {
        "temperature": (torch.float32, 1, 0, None),
        "min_p": (torch.float32, 1, 0.0, None),
        "top_k": (torch.int32, 1, 0, None),
        "top_p": (torch.float32, 1, 1.0, None),
        "seed": (torch.int64, 1, 0, None),
        "choice": (torch.int32, 1, 0, None),
        "stop_ids": (torch.int32, 4, -1, 12),
        "allowed_ids": (torch.int32, 11, 0, 12),
        "logit_bias": (torch.int32, 1024, -1, 12),
        "min_total": (torch.int32, 1, 0, None),
        "bad_words": (torch.int32, 1024, -1, 12),
        "prompt_len": (torch.int32, 1, 0, None),
        "counted": (torch.int32, 1, 0, None),
        "repetition_penalty": (torch.float32, 1, 1.0, None),
        "presence_penalty": (torch.float32, 1, 0, None),
        "frequency_penalty": (torch.float32, 1, 0, None),
        "token_counts": (torch.int32, VOCAB, 0, 12),
        "logprobs": (torch.int32, 1, -1, None),
        "prompt_logprobs": (torch.int32, 1, -1, None),
    }


def test_row_values(sampler: Sampler) -> None:
    values = sampler.row_values(request(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, stop_token_ids=[9, 4, 9], seed=1))
    stop_ids = values.pop("stop_ids")
    assert stop_ids.dtype == np.int32
    assert sorted(stop_ids.tolist()) == [2, 4, 9]
    assert values == {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 1, "choice": 0, "prompt_len": 2}


def test_only_rows_that_ask_need_seats(sampler: Sampler) -> None:
    seated = {"allowed_ids", "logit_bias", "bad_words", "token_counts"}
    assert not seated & sampler.row_values(request()).keys()
    assert seated & sampler.row_values(request(presence_penalty=-0.5)).keys() == {"token_counts"}
    assert seated & sampler.row_values(request(logit_bias={3: 1}, allowed_token_ids=[3])).keys() == {"allowed_ids", "logit_bias"}


def test_penalty_seats_are_bounded_by_memory(sampler: Sampler) -> None:
    wide = load_settings({"scheduler": {"max_rows": 1024}})
    seats = {vocab: next(c.seats for c in sampler.columns(wide, vocab) if c.name == "token_counts") for vocab in (VOCAB, 151_936)}
    assert seats == {VOCAB: 1024, 151_936: (128 << 20) // (4 * 151_936)}


def test_ignoring_eos_leaves_the_stop_token_ids(sampler: Sampler) -> None:
    assert sampler.row_values(request(ignore_eos=True, stop_token_ids=[9]))["stop_ids"].tolist() == [9]
    assert "stop_ids" not in sampler.row_values(request(ignore_eos=True)), "a request without stop ids needs no seat"


def test_too_many_stop_ids_are_refused_with_the_limit(sampler: Sampler) -> None:
    sampler.check(request(stop_token_ids=[10, 11, 12, 2]), SETTINGS)
    with pytest.raises(RequestError, match=r"stop_token_ids: got 5 ids.* at most 4 .*max_stop_token_ids"):
        sampler.check(request(stop_token_ids=[10, 11, 12, 13]), SETTINGS)


@pytest.mark.parametrize(
    ("params", "features"),
    [
        ({"temperature": 0.0}, Feature.GREEDY),
        ({"temperature": 1e-5}, Feature.GREEDY),
        ({"temperature": 1e-4, "top_k": 5, "top_p": 0.5, "min_p": 0.1}, Feature.GREEDY),
        ({"temperature": 0.01}, Feature.PLAIN),
        ({"top_k": -1}, Feature.PLAIN),
        ({"top_k": 2}, Feature.PLAIN | Feature.FILTERED),
        ({"top_p": 0.99}, Feature.PLAIN | Feature.FILTERED),
        ({"min_p": 0.01}, Feature.PLAIN | Feature.FILTERED),
    ],
    ids=str,
)
def test_features(sampler: Sampler, params: dict[str, float], features: Feature) -> None:
    assert sampler.features(SamplingParams(**params)) == features


def test_greedy_rows_take_the_best_token_alone_and_beside_others(sampler: Sampler) -> None:
    logits = torch.randn(3, VOCAB)
    cold = [request(temperature=t) for t in (0.0, 1e-5, 1e-4)]
    tokens, num_tokens, ok = sampler.sample(logits, batch_of(sampler, cold))
    assert torch.equal(tokens[:, 0], logits.argmax(-1))
    assert tokens.shape == (3, 1)
    assert (num_tokens.tolist(), num_tokens.dtype, ok.tolist()) == ([1, 1, 1], torch.int32, [True] * 3)
    mixed = batch_of(sampler, [cold[0], request(temperature=5.0, top_p=0.9), cold[2]])
    assert mixed.features == Feature.PLAIN | Feature.FILTERED
    assert torch.equal(sampler.sample(logits, mixed)[0][::2], tokens[::2])


def test_a_row_draws_the_same_with_and_without_filtered_neighbours(sampler: Sampler) -> None:
    """The neighbour's bit switches the filters on for the step; a row that asked for none must not notice."""
    logits = torch.randn(40, VOCAB)
    plain = [request(seed=s) for s in range(40)]
    alone = sampler.sample(logits, batch_of(sampler, plain))[0]
    beside = batch_of(sampler, [*plain, request(top_k=1, top_p=0.1, min_p=0.5)])
    assert beside.features & Feature.FILTERED
    assert torch.equal(sampler.sample(torch.cat((logits, logits[:1])), beside)[0][:40], alone)
    assert (alone[:, 0] != logits.argmax(-1)).any()


def test_each_row_reads_its_own_columns(sampler: Sampler) -> None:
    """Rows that differ in one parameter each; the batch is in another order than the table."""
    logits = torch.randn(1, VOCAB).expand(5, -1)
    kinds: list[dict[str, float]] = [{}, {"top_k": 2}, {"top_p": 0.05}, {"min_p": 0.9}, {"temperature": 50.0}]
    allowed = logits[0].topk(2).indices.tolist()
    drawn: list[set[int]] = [set() for _ in kinds]
    for seed in range(60):
        rows = [request(seed=seed, **kind) for kind in kinds]
        for kind, token in zip(drawn, sampler.sample(logits, batch_of(sampler, rows))[0][:, 0].tolist(), strict=True):
            kind.add(token)
    assert drawn[1] == set(allowed)
    assert drawn[3] <= set(allowed)
    assert len(drawn[2]) < len(drawn[0]) <= len(drawn[4])


def test_the_noise_is_that_of_the_position_being_produced(sampler: Sampler) -> None:
    """However a row got there - one token after a long cache, or a whole prompt - the same position draws the same token."""
    logits = torch.randn(1, VOCAB)
    one = batch_of(sampler, [request()])
    decode = sampler.sample(logits, one)[0]
    prompt = batch_of(sampler, [request()], computed=torch.zeros(1, dtype=torch.int32), query_len=torch.full((1,), 5, dtype=torch.int32))
    assert torch.equal(sampler.sample(logits, prompt)[0], decode)
    later = [batch_of(sampler, [request()], computed=torch.full((1,), c, dtype=torch.int32)) for c in range(20)]
    assert len({int(sampler.sample(logits, b)[0]) for b in later}) > 10


def test_rows_that_do_not_sample_or_cannot_yield_no_token(sampler: Sampler) -> None:
    logits = torch.randn(3, VOCAB)
    logits[1] = -torch.inf
    samples = torch.tensor([True, True, False])
    for params in ({"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.9}):
        tokens, num_tokens, ok = sampler.sample(logits, batch_of(sampler, [request(**params)] * 3, samples=samples))
        assert num_tokens.tolist() == [1, 0, 0]
        assert ok.tolist() == [True, False, True]
        assert ((tokens >= 0) & (tokens < VOCAB)).all()


class Ban(Stage):
    """A later stage as a plugin would add it: bans a token for every row, when some row samples with noise."""

    feature = Feature.PLAIN

    def __init__(self, token: int) -> None:
        self.token = token
        self.calls = 0

    def edit(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        self.calls += 1
        edited = logits.clone()
        edited[:, self.token] = -torch.inf
        return edited


def test_a_new_stage_slots_in_without_touching_the_others() -> None:
    ban = Ban(3)
    sampler = Sampler(reference_ops(), (ban, *default_stages()))
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 50.0
    assert sampler.sample(logits, batch_of(sampler, [request(temperature=0.0)]))[0].item() == 3
    assert ban.calls == 0, "a stage that no row asks for costs nothing"
    assert sampler.sample(logits, batch_of(sampler, [request()]))[0].item() != 3
    assert ban.calls == 1
    assert logits[0, 3] == 50.0


def test_two_stages_cannot_supply_the_same_argument() -> None:
    stages = default_stages()
    for name, stage in (("temperature", Temperature()), ("penalties", Penalties())):
        with pytest.raises(ValueError, match=f"'{name}'"):
            Sampler(reference_ops(), (*stages, stage))


def test_what_counts_as_greedy_is_said_once() -> None:
    """The stage chooses the tail, the operation the token: with two numbers a row between them would be drawn by neither's rule."""
    root = Path(modelrunner.__file__).parent
    folders = (root, Path(modelrunner.kernels.__file__).parent)
    said = [path for folder in folders for path in folder.rglob("*.py") if re.search(r"^GREEDY_TEMPERATURE\b.*=", path.read_text(), re.M)]
    assert [path.name for path in said] == ["reference.py"]
    edge = modelrunner.kernels.sampling.reference.GREEDY_TEMPERATURE
    kinds = [Sampler(reference_ops(), default_stages()).features(SamplingParams(temperature=t)) for t in (edge, edge * 1.01)]
    assert kinds == [Feature.GREEDY, Feature.PLAIN]


def test_many_edited_rows_go_in_slices(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is that of all rows at once."""
    rows = [request(seed=seed, min_tokens=seed % 3, temperature=0.5 * (seed % 2)) for seed in range(11)]
    batch = batch_of(sampler, rows, features=Feature.PLAIN | Feature.KEPT_GOING)
    known = torch.full((11,), 3, dtype=torch.int32)
    stops = {"stop_ids": torch.arange(11, dtype=torch.int32), "stop_ids.seats": torch.randint(0, VOCAB, (12, 40), dtype=torch.int32)}
    batch.columns = {**batch.columns, **stops, "known": known, "token_ids": torch.zeros(11, 20, dtype=torch.int32)}
    logits = torch.randn(11, VOCAB)
    whole = sampler.sample(logits, batch)
    monkeypatch.setattr(sampler_module, "EDITED_LINES", 4)
    for got, want in zip(sampler.sample(logits, batch), whole, strict=True):
        assert torch.equal(got, want)
    banned = stops["stop_ids.seats"][:11]
    for place, token in enumerate(reversed(whole[0][:, 0].tolist())):
        assert rows[::-1][place].params.min_tokens < 2 or token not in banned[place]

"""Steps with drafts in the sampler: each place of a row is treated as the step that would come to it without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from draft_world import certain

from modelrunner import LogitsProcessor
from modelrunner.batch import Batch, Feature
from modelrunner.ops import Registry
from modelrunner.plugins import reference_kernels
from modelrunner.request import Request, SamplingParams
from modelrunner.sampler import Functions, ProcessorRegistry, Processors, Sampler, default_stages
from modelrunner.sampler import sampler as sampler_module
from modelrunner.settings import load_settings
from modelrunner.testing import Driver, EngineProbe, P, constant, scripted

VOCAB, LONGEST, K = 40, 24, 3
SETTINGS = load_settings({"scheduler": {"max_rows": 12}})
OUTPUT = [5, 6, 7, 5]


class Echo(LogitsProcessor):
    """Takes the newest tokens down; `drafts` as asked."""

    def __init__(self, name: str, drafts: bool) -> None:
        self.name, self.drafts = name, drafts

    def apply(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        newest = self.last_tokens(batch, 2)
        taken = torch.where(self.asking(batch).unsqueeze(1), 5.0, 0.0).expand(-1, 2)
        return logits.scatter_add(1, newest, -taken)


def make_sampler(typical: tuple[float, float] | None = None) -> Sampler:
    registry, processors = Registry(), ProcessorRegistry("tests")
    reference_kernels.kernels(registry, None)  # type: ignore[arg-type]
    processors(Echo("echo", True))
    processors(Echo("stateful", False))
    return Sampler(registry.resolve("cpu"), default_stages(Processors(processors), Functions()), typical)


def request(number: int, **params: Any) -> Request:
    words = params.pop("banned", ())
    made = Request("r", [1, 5, 9], SamplingParams(**params), arrival=0.0, limit=LONGEST, seed=number, eos_token_ids=(2,))
    made.bad_word_ids = words
    return made


ROWS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"repetition_penalty": 1.7, "temperature": 0.8},
    {"presence_penalty": 1.5, "frequency_penalty": -0.5, "temperature": 0.0},
    {"min_tokens": 6},
    {"banned": ((5, 6), (6, 6), (7,), (5, 6, 6))},
    {"logit_bias": {3: 4.0, 6: -2.0}, "frequency_penalty": 1.0},
    {"allowed_token_ids": list(range(2, 20)), "top_k": 3},
    {"logits_processors": {"echo": {}}, "top_p": 0.8},
    {"logits_processors": {"stateful": {}}, "temperature": 0.0},
]


def batch_of(sampler: Sampler, requests: Sequence[Request], output: Sequence[Sequence[int]], drafts: torch.Tensor) -> Batch:
    """Rows in the table's order, with columns and seats filled as the table would; the drafts lie behind the outputs.

    drafts: [n, k], -1 for none. With k > 0 the batch has a line for each place.
    """
    n, columns = len(requests), {}
    for column in sampler.columns(SETTINGS, VOCAB):
        values = [sampler.row_values(r).get(column.name, column.default) for r in requests]
        if column.seats is None:
            columns[column.name] = torch.tensor(values, dtype=column.dtype)
            continue
        lines = torch.full((n + 1, column.width), column.default, dtype=column.dtype)
        seats = torch.full((n,), -1, dtype=torch.int32)
        for row, value in enumerate(values):
            if not isinstance(value, int):
                lines[row, : len(value)], seats[row] = torch.from_numpy(value), row
        columns |= {column.name: seats, f"{column.name}.seats": lines}
    tokens = torch.full((n, LONGEST), 7, dtype=torch.int32)
    for row, (r, own) in enumerate(zip(requests, output, strict=True)):
        line = [*r.prompt_token_ids, *own, *drafts[row][drafts[row] >= 0].tolist()]
        tokens[row, : len(line)] = torch.tensor(line)
    known = torch.tensor([len(r.prompt_token_ids) + len(own) for r, own in zip(requests, output, strict=True)], dtype=torch.int32)
    features = Feature.GREEDY
    for r in requests:
        features |= sampler.features(r.params)
    slots, count = 1 + drafts.shape[1], torch.arange(n, dtype=torch.int32)
    ahead = torch.arange(slots, dtype=torch.int32).repeat(n)
    fields = dict.fromkeys(
        ("query_start", "seq_len", "num_accepted", "sample_index", "input_ids", "positions", "token_row", "token_valid"), count
    )
    return Batch(
        **fields,  # type: ignore[arg-type]
        **dict.fromkeys(("num_tokens", "num_decode"), n),
        **dict.fromkeys(("max_query", "max_seq_len"), 1),
        num_rows=n * slots,
        num_draft=slots - 1,
        features=features,
        rows=count.repeat_interleave(slots),
        query_len=1 + ahead,
        computed=(known - 1).repeat_interleave(slots),
        samples=torch.cat((torch.ones(n, 1, dtype=torch.bool), drafts >= 0), 1).flatten(),
        slots={},
        block_tables={},
        columns={**columns, "known": known, "token_ids": tokens},
        ahead=ahead if slots > 1 else None,
    )


NO_DRAFTS = torch.zeros(len(ROWS) * 4, 0, dtype=torch.int32)


def by_hand(
    sampler: Sampler, logits: torch.Tensor, requests: Sequence[Request], drafts: torch.Tensor
) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens of rows that go on one token at a time, as long as a token is the next draft; and the logits that they were drawn from."""
    found: list[list[int]] = [[] for _ in requests]
    edited = torch.zeros_like(logits, dtype=torch.float32)
    places = logits.unflatten(0, (-1, 1 + K))
    for j in range(1 + K):
        some = batch_of(sampler, requests, [[*OUTPUT, *own] for own in found], NO_DRAFTS)
        seen: list[torch.Tensor] = []
        tokens, _, ok = sampler.sample(places[:, j], some, lambda _, x, *__, seen=seen: seen.append(x.float()))
        assert ok.all()
        for row, own in enumerate(found):
            if len(own) == j and (j == 0 or own[-1] == drafts[row, j - 1]):
                own.append(int(tokens[row, 0]))
                edited[row * (1 + K) + j] = seen[0][row]
    return found, edited


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_each_place_is_sampled_as_without_drafts(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage, in slices, for drafts that hold to different lengths: tokens, and the processed logits that log-probs are made of."""
    sampler = make_sampler()
    sampler.columns(SETTINGS, VOCAB)
    sampler._logprobs.processed = True  # type: ignore[union-attr]
    requests = [request(10 * copy + i, **params) for copy in range(4) for i, params in enumerate(ROWS)]
    logits = torch.randn(len(requests) * (1 + K), VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5
    drafts = torch.full((len(requests), K), -1, dtype=torch.int32)
    for j in range(K):  # the rows' own tokens, of some of them, place after place
        own, _ = by_hand(sampler, logits, requests, drafts)
        for row, r in enumerate(requests):
            if len(own[row]) == j + 1 and not sampler.features(r.params) & sampler.undrafted:
                drafts[row, j] = own[row][j] if (row * 7 + j * 3) % 10 < 10 * share else (own[row][j] + 1) % VOCAB
    want, edited = by_hand(sampler, logits, requests, drafts)
    seen: list[torch.Tensor] = []
    batch = batch_of(sampler, requests, [OUTPUT] * len(requests), drafts)
    starts: list[int] = []

    def note(start: int, x: torch.Tensor, drawn: torch.Tensor, rows: torch.Tensor) -> None:
        assert x.shape[0] == drawn.shape[0] == rows.shape[0]
        starts.append(start)
        seen.append(x)

    monkeypatch.setattr(sampler_module, "EDITED_LINES", 60)
    tokens, counts, ok = sampler.sample(logits, batch, note)
    assert starts == [0, 60, 120]
    assert ok.all()
    assert [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)] == want
    assert {len(own) for own in want} >= ({1} if share < 1 else {1, 1 + K})
    counting = (torch.arange(1 + K) < counts.unsqueeze(1)).flatten()
    torch.testing.assert_close(torch.cat(seen)[counting], edited[counting])
    assert torch.equal(batch.columns["counted"], torch.where(batch.columns["token_counts"] >= 0, batch.columns["known"], 0))


def test_rows_that_must_not_draft() -> None:
    """Their bits are named, and their first place is edited though the step has drafts."""
    sampler = make_sampler()
    sampler.columns(SETTINGS, VOCAB)

    def function(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        assert (prompt, output) == ([1, 5, 9], OUTPUT)
        return logits - logits * (torch.arange(VOCAB) != 11) * 100

    for params, undrafted in (
        ({"logits_processors": {"stateful": {}}}, True),
        ({"logits_processors": {"echo": {}}}, False),
        ({"logits_processors": [function]}, True),
        ({"logprobs": -1}, True),
        ({"logprobs": 5, "prompt_logprobs": 3, "repetition_penalty": 2.0, "min_tokens": 3}, False),
    ):
        assert bool(sampler.features(SamplingParams(**params)) & sampler.undrafted) is undrafted
    requests = [request(0, temperature=0.0), request(1, logits_processors=[function], temperature=0.0)]
    for r in requests:
        sampler.row_values(r)
    drafts = torch.tensor([[3, 4, 5], [-1, -1, -1]], dtype=torch.int32)
    logits = torch.full((2 * (1 + K), VOCAB), 1.0)
    logits[[0, 1, 2], [3, 4, 5]] = 2.0
    tokens, counts, _ = sampler.sample(logits, batch_of(sampler, requests, [OUTPUT] * 2, drafts))
    assert (counts.tolist(), tokens[0, :3].tolist(), int(tokens[1, 0])) == ([4, 1], [3, 4, 5], 11)


def test_typical_acceptance_is_for_rows_that_draw() -> None:
    sampler = make_sampler((1e-6, 1e-6))
    sampler.columns(SETTINGS, VOCAB)
    requests = [request(0, temperature=0.0), request(1)]
    drafts = torch.full((2, K), 3, dtype=torch.int32)
    logits = torch.arange(VOCAB, 0, -1).float().div(10).expand(2 * (1 + K), -1)
    batch = batch_of(sampler, requests, [OUTPUT] * 2, drafts)
    assert sampler.sample(logits, batch)[1].tolist() == [1, 1 + K]
    greedy = replace(batch, features=Feature.GREEDY)
    assert sampler.sample(logits, greedy)[1].tolist() == [1, 1]


@pytest.mark.parametrize("acceptance", ["exact", "typical"])
def test_the_setting_keeps_more_drafts(acceptance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a token that has one chance in four, about a fourth, or all; greedy requests beside it are as ever."""
    monkeypatch.setenv("MODELRUNNER_SPECULATION__ACCEPTANCE", acceptance)
    logits = torch.full((331,), -1e4)
    logits[40:44] = torch.tensor([0.0, 0.0, 0.0, 0.001])
    subject = certain(41, scripted(constant(logits), "four"))
    driver = Driver(subject.engine(drafter="script", drafts=2, rows=64))
    params = SamplingParams(temperature=1.0, max_tokens=9, ignore_eos=True)
    driver.add("drawn", P(5, 1), params.model_copy(update={"n": 40, "seed": 3}))
    driver.add("greedy", P(5, 1), params.model_copy(update={"temperature": 0.0}))
    driver.finish()
    assert set(driver.result("greedy").token_ids) == {43}
    drafted, kept = (sum(getattr(each, name) for each in driver.final("drawn").outputs) for name in ("num_drafted", "num_accepted"))
    assert kept == drafted if acceptance == "typical" else 0.1 < kept / drafted < 0.4
    EngineProbe(driver).assert_clean()

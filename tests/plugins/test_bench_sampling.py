"""`modelrunner bench sampling`: what is timed does the work that it is named for, ours and the others alike."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modelrunner import cli
from modelrunner.assemble import resolve_ops, settle
from modelrunner.plugin_manager import PluginManager
from modelrunner.plugins.bench import sampling, sampling_rivals

ROWS, VOCAB = 16, 512
CPU = torch.device("cpu")
NAMES = ["greedy", "temperature", "top-k and top-p", "all penalties", "5 log-probs", "the same, processed", "grammar mask"]


@pytest.fixture(scope="module")
def given() -> sampling.Inputs:
    torch.manual_seed(3)
    return sampling.Inputs.made(ROWS, VOCAB, CPU)


@pytest.fixture(scope="module")
def ours(given: sampling.Inputs) -> dict[str, Any]:
    manager = PluginManager.load()
    device: Any = SimpleNamespace(type="cpu", name="cpu", torch_device=CPU, settings=settle({}, manager))
    return sampling.cases(resolve_ops(manager, device), given)


@pytest.fixture(scope="module", params=sampling.SHAPES)
def logits(request: pytest.FixtureRequest) -> torch.Tensor:
    torch.manual_seed(4)
    return sampling.logits_of(ROWS, VOCAB, request.param, CPU)


def test_the_ways_have_the_same_cases(ours: dict[str, Any], given: sampling.Inputs) -> None:
    assert list(ours) == NAMES
    assert [*sampling_rivals.torch_ways(given)] == [name for name in NAMES if name != "the same, processed"]


def test_what_is_not_drawn_is_equal(ours: dict[str, Any], given: sampling.Inputs, logits: torch.Tensor) -> None:
    theirs = sampling_rivals.torch_ways(given)
    for name in ("greedy", "grammar mask"):
        assert torch.equal(ours[name](logits.clone())[0], theirs[name](logits)), name
    ranks, ids, values = ours["5 log-probs"](logits)
    own, top, top_ids, before = theirs["5 log-probs"](logits)
    torch.testing.assert_close(values, torch.cat((own, top), 1), rtol=1e-5, atol=1e-5)
    assert torch.equal(ids[:, 1:], top_ids.to(torch.int32))
    assert torch.equal(ranks, (1 + before).to(torch.int32))


def test_what_is_drawn_stays_within_its_filters(ours: dict[str, Any], given: sampling.Inputs, logits: torch.Tensor) -> None:
    chance = (logits / sampling.TEMPERATURE).softmax(-1)
    ordered, place = chance.sort(-1, descending=True)
    ordered = ordered[:, : sampling.TOP_K] / ordered[:, : sampling.TOP_K].sum(-1, keepdim=True)
    kept = ordered.cumsum(-1) - ordered < sampling.TOP_P
    for _ in range(20):
        tokens = sampling_rivals.torch_ways(given)["top-k and top-p"](logits)
        assert ((place[:, : sampling.TOP_K] == tokens) & kept).any(-1).all()
    tokens = ours["top-k and top-p"](logits)[0].unsqueeze(1)
    assert ((place[:, : sampling.TOP_K] == tokens) & kept).any(-1).all()


def test_penalties_see_the_tokens(ours: dict[str, Any], given: sampling.Inputs) -> None:
    """Of equal logits, those of tokens that a row has become 272, and no draw finds them."""
    logits = torch.full((ROWS, VOCAB), 300.0)
    for tokens in (ours["all penalties"](logits)[0], sampling_rivals.torch_ways(given)["all penalties"](logits)):
        assert not (given.token_ids.long() == tokens.unsqueeze(1)).any()
    assert given.counted.eq(given.known).all()


def test_people_see_microseconds_and_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "sampling", "--dry", "--scale", "0.004"]) == 0
    text = capsys.readouterr().out
    assert "sampling, 1 rows of 608 float32 logits, flat: one read" in text
    assert "FlashInfer: runs on NVIDIA GPUs" in text
    assert all(f"  {name} " in text for name in NAMES)
    assert "sampling peaked" in text[text.index("scenario") :]


def test_records_are_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "sampling", "--dry", "--scale", "0.004", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["logits"] for record in found] == ["flat", "peaked"]
    for record in found:
        assert record["read_us"] == min(record["reads_us"].values()) > 0
        assert set(record["us"]) == {"modelrunner", "torch"}
        assert list(record["us"]["modelrunner"]) == NAMES

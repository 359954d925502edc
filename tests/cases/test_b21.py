"""B21: filtered tokens had a log-prob of -inf, which JSON has not, so legal requests failed."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from modelrunner import LLM, SamplingParams
from modelrunner.plugins.commands.generate import show_json
from modelrunner.testing import dense, options

FLOOR = -9999.0  # docs/sampling.md
ASKED = [
    SamplingParams(max_tokens=4, temperature=1, top_k=1, logprobs=5, prompt_logprobs=5, seed=1),
    SamplingParams(max_tokens=4, allowed_token_ids=[5], logprobs=5, seed=1),
    SamplingParams(max_tokens=4, top_p=0.01, logprobs=20, seed=1),
    SamplingParams(max_tokens=4, bad_words=[(7,)], logprobs=20, temperature=0),
]


def strict(text: str) -> Any:
    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_minus_infinity_stays_out_of_json(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = options(device="deferred_cpu") | {"sampler": {"logprobs_mode": mode}}
    with LLM(dense().model, plugins=dense().plugins, **settings) as llm:
        outputs = llm.generate(["One two three"] * len(ASKED), ASKED, use_tqdm=False)
    show_json(outputs, num_steps=4)
    lines = [strict(line) for line in capsys.readouterr().out.splitlines()]
    floors = 0
    for line, output in zip(lines, outputs, strict=True):
        assert len(line["logprobs"]) == len(line["token_ids"])
        for entries, token in zip(line["logprobs"], line["token_ids"], strict=True):
            assert entries[0]["token_id"] == token
            assert FLOOR < entries[0]["logprob"] <= 0
            assert all(math.isfinite(entry["logprob"]) for entry in entries)
            floors += sum(entry["logprob"] == FLOOR for entry in entries)
        assert output.outputs[0].cumulative_logprob == line["cumulative_logprob"]
    assert (lines[0]["prompt_logprobs"][0], len(lines[0]["prompt_logprobs"])) == (None, len(lines[0]["prompt_token_ids"]))
    assert bool(floors) == (mode == "processed")

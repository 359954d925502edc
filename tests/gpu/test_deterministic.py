"""`device.deterministic` on a GPU: a request has the same bits alone, beside others, in chunks, from the cache (B32), after preemption."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modelrunner import Engine, SamplingParams
from modelrunner.batch import Batch
from modelrunner.hookspecs import hookimpl
from modelrunner.model_state import StaticBuffer
from modelrunner.taps import Result, Tap
from modelrunner.testing import Driver, EngineProbe, P, options

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

HIDDEN = 512
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": HIDDEN,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
LENGTHS = (1, 5, 40, 129, 300, 17, 64)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
LOGGED = GREEDY.model_copy(update={"logprobs": 5})
PROMPT_LOGGED = GREEDY.model_copy(update={"logprobs": 1, "prompt_logprobs": 2})
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=11, max_tokens=24, ignore_eos=True, detokenize=False)


class LastHidden(Tap):
    """Reports the hidden states that tokens are sampled from."""

    name = "last_hidden"
    points = (f"layer.{CONFIG['num_hidden_layers']}",)
    edits = False
    results = (Result("last_hidden", (HIDDEN,), torch.float32),)
    buffers = (StaticBuffer("last_hidden.all", ("tokens", HIDDEN), torch.bfloat16),)

    def apply(self, point: str, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        batch.buffers["last_hidden.all"][: hidden.shape[0]].copy_(hidden)
        return hidden

    def outputs(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        return {"last_hidden": batch.buffers["last_hidden.all"].index_select(0, batch.sample_index[: batch.num_rows]).float()}


class BringsTap:
    MODELRUNNER_API = ">=1,<2"

    @hookimpl
    def taps(self) -> Sequence[Tap]:
        return [LastHidden()]


Bits = dict[str, tuple[list[int], bytes, Any, Any]]  # of each request: tokens, hidden states, log-probs of its output and prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3")
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


def start(folder: Path, **short: Any) -> Driver:
    model = {"name": str(folder), "dtype": "bfloat16", "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 512}
    settings = options(device="cuda", **{"pages": 256, **short})
    settings["device"]["deterministic"] = True
    return Driver(Engine({"model": model} | settings, plugins=[BringsTap()]))


def bits(driver: Driver, names: Sequence[int], params: SamplingParams, tap: bool) -> Bits:
    """What came of requests, by name: together if they are given together."""
    asking = params.model_copy(update={"extra_args": {"last_hidden": True}}) if tap else params
    run = driver.steps
    for k in names:
        driver.add(f"{run}-{k}", P(LENGTHS[k], k), asking)
    driver.finish()
    EngineProbe(driver).assert_clean()
    found = {}
    for k in names:
        result = driver.result(f"{run}-{k}")
        hidden = np.asarray(result.extra["last_hidden"]).tobytes() if tap else b""
        found[str(k)] = (list(result.token_ids), hidden, result.logprobs, driver.final(f"{run}-{k}").prompt_logprobs)
    return found


@pytest.mark.parametrize(
    ("params", "tap"),
    [(GREEDY, True), (SAMPLED, True), (SAMPLED, False), (LOGGED, False), (PROMPT_LOGGED, False)],
    ids=["hidden", "sampled-hidden", "sampled", "log-probs", "prompt-log-probs"],
)
def test_nothing_but_the_request_matters(folder: Path, params: SamplingParams, tap: bool) -> None:
    everyone = range(len(LENGTHS))
    one = start(folder, rows=1, prefix=False, depth=1)
    alone: Bits = {}
    for k in everyone:
        alone |= bits(one, [k], params, tap)
    together = start(folder, rows=8)
    assert bits(together, everyone, params, tap) == alone
    assert bits(together, everyone, params, tap) == alone, "with what the first time left in the cache"
    assert bits(start(folder, rows=8, tokens=37), everyone, params, tap) == alone, "in chunks"
    few = start(folder, rows=8, pages=36, tokens=64, depth=3)
    assert bits(few, everyone, params, tap) == alone, "with preemptions"
    assert few.engine.scheduler.stats.preemptions > 0


def test_without_the_mode_the_batch_shows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else these tests could not fail."""
    monkeypatch.setattr("modelrunner.plugins.triton_kernels.overrides", lambda area, deterministic: _plain(area))
    one, together = start(folder, rows=1, prefix=False), start(folder, rows=8)
    alone: Bits = {}
    for k in range(len(LENGTHS)):
        alone |= bits(one, [k], GREEDY, True)
    assert bits(together, range(len(LENGTHS)), GREEDY, True) != alone


def _plain(area: str) -> Mapping[str, Any]:
    from importlib import import_module

    found: Mapping[str, Any] = import_module(f"modelrunner.kernels.{area}.gpu").OVERRIDES
    return found

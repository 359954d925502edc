"""The steering example: hidden states are those of transformers, and vectors act as they would there, in any schedule."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from modelrunner import SamplingParams
from modelrunner.engine import Engine
from modelrunner.errors import PluginError, RequestError
from modelrunner.plugin_manager import PluginManager
from modelrunner.testing import Driver, EngineProbe, P, Subject, dense
from modelrunner.testing.subjects import options

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "examples" / "steering"
HIDDEN = 64
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def subject(importable: None) -> Subject:
    plain = dense()
    return Subject(plain.model, "steered", (*plain.plugins, "modelrunner_steering"))


def vector(seed: int, scale: float = 2.0) -> list[float]:
    return [float(x) for x in np.random.default_rng(seed).normal(size=HIDDEN) * scale]


def asking(steer: int | None = None, read: bool = False, **changes: Any) -> SamplingParams:
    arguments = {**({} if steer is None else {"steer": vector(steer)}), **({"hidden": True} if read else {})}
    return SamplingParams(**{**GREEDY.model_dump(), **changes, "extra_args": arguments})


class Oracle:
    """transformers' own model on the same weights, with the vector added to what enters layer 1."""

    def __init__(self, model: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def run(self, prompt: list[int], steer: int | None, count: int) -> tuple[list[int], np.ndarray[Any, Any]]:
        """(greedy tokens, hidden states [count, H] that enter layer 1 where each was sampled)."""
        added = torch.zeros(HIDDEN) if steer is None else torch.tensor(vector(steer))
        seen: list[torch.Tensor] = []

        def hook(module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            seen.append(arguments[0] + added)
            return (seen[-1], *arguments[1:])

        handle = self.model.model.layers[1].register_forward_pre_hook(hook)
        tokens, states = list(prompt), []
        with torch.inference_mode():
            for _ in range(count):
                logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
                states.append(seen[-1][0, -1])
                tokens.append(int(logits.argmax()))
        handle.remove()
        return tokens[len(prompt) :], torch.stack(states).numpy()


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(dense().model)


def engine(subject: Subject, **short: Any) -> Driver:
    settings = {"model": {"name": subject.model}, "plugin.steering.layer": 1, "plugin.steering.seats": 2}
    return Driver(Engine(settings | options(**{"pages": 64, **short}), plugins=subject.plugins))


REQUESTS = [(P(40, 1), None, False), (P(40, 1), 1, True), (P(9, 2), 2, False), (P(23, 3), None, True), (P(40, 1), 2, True)]


@pytest.mark.filterwarnings("ignore:.*max_model_len.*")
@pytest.mark.parametrize(
    "short",
    [
        {"depth": 1, "device": "cpu"},
        {"depth": 2},
        {"depth": 3, "tokens": 12},  # chunks
        {"depth": 2, "rows": 2, "tokens": 7, "device_seed": 3},
        {"depth": 2, "pages": 16, "page_size": 4, "device_seed": 5},  # preemptions
    ],
    ids=["plain", "overlapped", "chunked", "narrow", "crowded"],
)
def test_mixed_requests_give_what_transformers_gives(subject: Subject, oracle: Oracle, short: dict[str, Any]) -> None:
    driver = engine(subject, **{"device": "deferred_cpu", **short})
    for turn in range(2):  # the second time from the prefix cache
        for i, (prompt, steer, read) in enumerate(REQUESTS):
            driver.add(f"{turn}.{i}", prompt, asking(steer, read))
        driver.finish()
    for turn in range(2):
        for i, (prompt, steer, read) in enumerate(REQUESTS):
            result = driver.result(f"{turn}.{i}")
            tokens, states = oracle.run(prompt, steer, 8)
            assert list(result.token_ids) == tokens, f"request {i}"
            assert set(result.extra) == ({"hidden"} if read else set())
            if read:
                assert result.extra["hidden"].shape == (8, HIDDEN)
                np.testing.assert_allclose(result.extra["hidden"], states, atol=2e-4)
    EngineProbe(driver).assert_clean()


def test_steering_changes_tokens(oracle: Oracle) -> None:
    """Otherwise the tests here could not fail."""
    outputs = [oracle.run(P(40, 1), steer, 8)[0] for steer in (None, 1, 2)]
    assert outputs[0] != outputs[1] != outputs[2] != outputs[0]


def test_cached_prefixes_are_shared_by_equal_vectors_only(subject: Subject) -> None:
    driver = engine(subject)
    cached = {}
    for turn in range(2):
        for name, steer, read in (("plain", None, False), ("one", 1, False), ("two", 2, False), ("read", None, True)):
            driver.add(f"{name}{turn}", P(40, 1), asking(steer, read))
            driver.finish()
            cached[f"{name}{turn}"] = driver.final(f"{name}{turn}").num_cached_tokens
    assert cached == {"plain0": 0, "one0": 0, "two0": 0, "read0": 32, "plain1": 32, "one1": 32, "two1": 32, "read1": 32}


def test_streams_carry_the_entries_of_their_tokens(subject: Subject) -> None:
    driver = engine(subject)
    whole, parts = asking(read=True), asking(read=True, output_kind="delta")
    driver.add("whole", P(20, 4), whole)
    driver.add("parts", P(20, 4), parts)
    driver.finish()
    pieces = [output.outputs[0] for output in driver.outputs["parts"]]
    assert len(pieces) > 2
    assert all(len(piece.extra["hidden"]) == len(piece.token_ids) for piece in pieces)
    joined = np.concatenate([piece.extra["hidden"] for piece in pieces])
    np.testing.assert_allclose(joined, driver.result("whole").extra["hidden"], atol=1e-5)


def test_entries_end_where_a_stop_string_cuts_the_output(subject: Subject) -> None:
    driver = engine(subject)
    driver.add("free", P(20, 4), asking(read=True))
    driver.finish()
    free = driver.result("free")
    third = driver.engine.tokenizer.decode([free.token_ids[2]])  # type: ignore[union-attr]
    driver.add("stopped", P(20, 4), asking(read=True, stop=[third]))
    driver.finish()
    stopped = driver.result("stopped")
    assert (stopped.finish_reason, len(stopped.token_ids)) == ("stop", 3)
    np.testing.assert_allclose(stopped.extra["hidden"], free.extra["hidden"][:3], atol=1e-5)


def test_taps_run_only_in_steps_that_ask(subject: Subject) -> None:
    driver = engine(subject)
    calls: list[str] = []
    for tap in driver.engine.assembly.taps.taps:
        original = tap.apply
        tap.apply = lambda *a, original=original, name=tap.name: (calls.append(name), original(*a))[1]  # type: ignore[method-assign,misc]
    driver.add("plain", P(20, 4), GREEDY)
    driver.finish()
    assert calls == []
    driver.add("read", P(20, 4), asking(read=True))
    driver.finish()
    assert set(calls) == {"hidden"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steer": [1.0, 2.0]}, r"extra_args\['steer'\]: got an array of shape \[2\]; accepted: 64 finite numbers"),
        ({"steer": "no"}, r"extra_args\['steer'\]: could not convert"),
        ({"stear": vector(1)}, r"extra_args: no tap is named 'stear'; accepted: 'steer', 'hidden'"),
    ],
)
def test_wrong_arguments_are_refused(subject: Subject, arguments: dict[str, Any], message: str) -> None:
    driver = engine(subject)
    with pytest.raises(RequestError, match=message):
        driver.add("a", P(9, 1), SamplingParams(extra_args=arguments))
    EngineProbe(driver).assert_alive(dense())


def test_a_layer_that_is_not_there_is_named(subject: Subject) -> None:
    from modelrunner.engine import Engine

    with pytest.raises(
        PluginError, match=r"'steer' of plugin .* wants the tap points \['layer.7'\]; this model has layer.0, layer.1, layer.2"
    ):
        Engine({"model": {"name": subject.model}, "plugin.steering.layer": 7}, plugins=subject.plugins)


def test_the_entry_point_names_the_module() -> None:
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    (module,) = project["entry-points"]["modelrunner"].values()
    manager = PluginManager.load([module], discover=False)
    assert [set(info.hooks) for info in manager.describe()] == [{"settings_sections", "taps"}]

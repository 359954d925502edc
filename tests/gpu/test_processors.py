"""Logits processors, Python functions and several choices on CUDA: the CPU's tokens, in captured steps, without a synchronisation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from modelrunner import OutputKind, SamplingParams
from modelrunner.batch import PROCESSOR_BIT
from modelrunner.testing import Driver, EngineProbe, P, Subject, dense

DEVICE = "cuda"
FOLDER = Path(__file__).resolve().parents[2] / "docs/examples/no_repeat"

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.fixture(autouse=True)
def _float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELRUNNER_MODEL__DTYPE", "float32")
    monkeypatch.setenv("MODELRUNNER_GRAPHS__MAX_TOKENS", "64")  # steps with prompts of each size have kernels of their own to build
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in [name for name in sys.modules if name.startswith("modelrunner_no_repeat")]:
        monkeypatch.delitem(sys.modules, name)


def subject() -> Subject:
    plain = dense()
    return Subject(plain.model, "no-repeat", (*plain.plugins, "modelrunner_no_repeat"))


def asking(size: int, **more: Any) -> SamplingParams:
    common = {"temperature": 0, "max_tokens": 32, "ignore_eos": True, "output_kind": OutputKind.FINAL_ONLY} | more
    return SamplingParams(**common, **({"logits_processors": {"no_repeat": {"size": size}}} if size else {}))


REQUESTS = {str(i): (P(5 + 7 * i, i), asking(i % 4, **({"temperature": 1.0, "seed": 7, "top_k": 20} if i > 4 else {}))) for i in range(8)}


def run(driver: Driver, prefix: str = "") -> list[list[int]]:
    for name, (prompt, params) in REQUESTS.items():
        driver.add(prefix + name, prompt, params)
    driver.finish()
    return [list(driver.result(prefix + name).token_ids) for name in REQUESTS]


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        return run(Driver(subject().engine(depth=1, prefix=False)))


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("short", [{"depth": 3, "tokens": 32}, {"pages": 12, "rows": 5}], ids=str)
def test_processors_give_the_tokens_of_the_cpu(short: dict[str, Any], wanted: list[list[int]]) -> None:
    driver = Driver(subject().engine(device=DEVICE, **short))
    assert run(driver) == wanted
    assert any(int(key.features) & (PROCESSOR_BIT << 1) for key in driver.engine.runner.graphs.captured)
    EngineProbe(driver).assert_clean()


def test_steps_with_processors_do_not_synchronise(no_synchronisation: None) -> None:
    driver = Driver(subject().engine(device=DEVICE, prefix=False))
    first = run(driver, "a")
    torch.cuda.set_sync_debug_mode("error")
    assert run(driver, "b") == first


class NoRepeat:
    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        self.seen.append(list(output_ids))
        logits[output_ids] = -torch.inf
        return logits


def test_functions_see_the_true_tokens() -> None:
    outputs = []
    for device in ("cpu", DEVICE):
        driver, functions = Driver(dense().engine(device=device, depth=3)), [NoRepeat() for _ in range(4)]
        for i, function in enumerate(functions):
            driver.add(f"f{i}", P(15, i), asking(0, logits_processors=[function]))
            driver.add(f"p{i}", P(15, i), asking(0))
        driver.finish()
        got = [list(driver.result(f"{kind}{i}").token_ids) for i in range(4) for kind in "fp"]
        assert all(function.seen == [got[2 * i][:n] for n in range(32)] for i, function in enumerate(functions))
        outputs.append(got)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("short", [{"prefix": False, "depth": 3}, {"pages": 16}], ids=str)
def test_choices_are_those_of_the_cpu(short: dict[str, Any]) -> None:
    params = SamplingParams(n=6, temperature=1.0, seed=11, max_tokens=40, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
    outputs = []
    for device in ("cpu", DEVICE):
        driver = Driver(dense().engine(device=device, **short))
        driver.add("a", P(60, 5), params)
        driver.finish()
        outputs.append([list(choice.token_ids) for choice in driver.final("a").outputs])
        assert driver.engine.scheduler.stats.cached_tokens >= 5 * 48
        EngineProbe(driver).assert_clean()
    assert outputs[0] == outputs[1]
    assert len({tuple(choice) for choice in outputs[0]}) == 6

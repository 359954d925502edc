"""On a GPU: taps and their results without a synchronisation, weights replaced between steps, cache memory that is really given up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from modelrunner import OutputKind, Result, SamplingParams, Tap, hookimpl
from modelrunner.batch import Batch
from modelrunner.testing import Driver, P, Subject, assert_same, dense

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)


@pytest.fixture(autouse=True)
def _float32(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MODELRUNNER_MODEL__DTYPE", "float32")
    yield
    torch.cuda.set_sync_debug_mode("default")


class Nudge(Tap):
    """Adds 0.5 to hidden states and reports each sampled token's position."""

    name = "nudge"
    points = ("layer.1",)
    results = (Result("position", (), torch.int64),)

    def apply(self, point: str, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        return hidden + 0.5 * self.per_token(batch, "tap.nudge")[:, None]

    def outputs(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        return {"position": batch.positions.index_select(0, batch.sample_index)}


class Plugin:
    MODELRUNNER_API = ">=1,<2"

    @hookimpl
    def taps(self) -> Sequence[Tap]:
        return [Nudge()]


def test_taps_do_not_synchronise_and_give_the_cpus_results() -> None:
    subject = Subject(dense().model, "nudged", (*dense().plugins, Plugin()))
    asking = SamplingParams(**{**GREEDY.model_dump(), "extra_args": {"nudge": True}})
    results = {}
    for device in ("cpu", "cuda"):
        driver = Driver(subject.engine(device=device, depth=2, tokens=32))
        driver.add("warm", P(60, 9), asking)
        driver.finish()
        torch.cuda.set_sync_debug_mode("error")
        for i in range(4):
            driver.add(str(i), P(9 + 11 * i, i), asking if i % 2 else GREEDY)
        driver.finish()
        torch.cuda.set_sync_debug_mode("default")
        results[device] = [driver.result(str(i)) for i in range(4)]
    for i, (cpu, cuda) in enumerate(zip(results["cpu"], results["cuda"], strict=True)):
        assert list(cpu.token_ids) == list(cuda.token_ids)
        assert set(cuda.extra) == ({"position"} if i % 2 else set())
        if i % 2:
            assert np.array_equal(cuda.extra["position"], np.arange(8 + 11 * i, 32 + 11 * i))


def test_running_requests_get_the_new_weights() -> None:
    driver = Driver(dense(1).engine(device="cuda", depth=2))
    driver.add("old", P(20, 1), GREEDY)
    for _ in range(6):
        driver.step()
    driver.engine.update_weights(load_file(Path(dense(2).model) / "model.safetensors").items())
    driver.add("new", P(20, 1), GREEDY)
    driver.finish()
    assert_same(dense(2), P(20, 1), GREEDY, driver.result("new"))
    assert driver.final("old").weight_version == "1"


def test_sleeping_gives_the_memory_back() -> None:
    driver = Driver(dense(1).engine(device="cuda", depth=2, pages=65536))
    arena = driver.engine.assembly.arena.tensor
    driver.add("a", P(20, 1), GREEDY)
    for _ in range(6):
        driver.step()
    reserved = torch.cuda.memory_reserved()  # of this process: others may run on the GPU
    driver.engine.sleep()
    assert reserved - torch.cuda.memory_reserved() >= 0.9 * arena.numel()
    driver.engine.wake_up()
    driver.finish()
    assert_same(dense(1), P(20, 1), GREEDY, driver.result("a"))

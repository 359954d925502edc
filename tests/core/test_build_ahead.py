"""Start-up shows the device all that it will launch, and then starts as if it had not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from modelrunner import Engine, Offer, SamplingParams, hookimpl
from modelrunner.batch import Feature
from modelrunner.device import Device
from modelrunner.errors import PluginError
from modelrunner.graphs import BUILT, Key, StepGraphs
from modelrunner.kernels.speculation.reference import draft_inputs
from modelrunner.ops import Register
from modelrunner.step_buffers import PlanPacker
from modelrunner.step_work import StepWork
from modelrunner.testing import ByteTokenizerPlugin, Driver, P, assert_same, dense, options, tiny_dense
from modelrunner.testing.null_device import NullDevice
from tests.model_states.drafters import engines

SMALL = 32  # tokens


class Builder(NullDevice):
    """Runs what it is to build. built: how much that was. failing: places of what it leaves to the first run."""

    name = "builder"
    built = 0
    failing: frozenset[int] = frozenset()

    def build(self, work: Sequence[Callable[[], None]]) -> Sequence[bool]:
        for part in work:
            with torch.inference_mode():
                part()
        self.built += len(work)
        return [place not in self.failing for place in range(len(work))]


class BuilderPlugin:
    MODELRUNNER_API = ">=1,<2"
    kind: type[Builder] = Builder

    @hookimpl
    def device(self) -> Offer[type[Device]]:
        return Offer("builder", lambda: self.kind, fit="fallback", reason="for a test")


class Leaving(Builder):
    """Leaves one operation of small steps out while it builds, as a device does with kernels that are not there yet."""

    building = False

    def build(self, work: Sequence[Callable[[], None]]) -> Sequence[bool]:
        Leaving.building = True
        went = super().build(work)
        Leaving.building = False
        return went


class LeavingPlugin(BuilderPlugin):
    """What a drafter is told of a step is left out: it then finds what an earlier step, perhaps a larger one, was told."""

    kind = Leaving
    left_out = 0

    @hookimpl
    def kernels(self, register: Register, device: Device) -> None:
        def unless_left_out(*arguments: Any) -> None:
            positions = arguments[6]
            if positions.shape[0] < SMALL and Leaving.building:
                self.left_out += 1
            else:
                draft_inputs(*arguments)

        register.override("draft_inputs", unless_left_out, device_type=device.type)


def started() -> Engine:
    settings = {"model": {"name": str(tiny_dense())}, "graphs": {"bucket_rows": (1, 2, 4), "bucket_tokens": (16, 64)}} | options(
        device="builder", rows=4
    )
    return Engine(settings, plugins=[ByteTokenizerPlugin(), BuilderPlugin()])


def test_everything_that_start_up_runs_is_built_before() -> None:
    driver = Driver(started())
    device = driver.engine.assembly.device
    assert isinstance(device, Builder)
    # Tails that the warm-up tries, and log-probs alone; prompts, crowds; numbers of rows by kinds of tail, bodies; tails for few rows and
    # for many.
    beside = len(driver.engine.assembly.sampler.loading())
    assert device.built == 6 + 3 + 2 + 6 + 2 + 2 * len(BUILT) + beside
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for k in range(5):
        driver.add(str(k), P(3 + 9 * k, k), params)
    driver.finish()
    for k in range(5):
        assert_same(dense(), P(3 + 9 * k, k), params, driver.result(str(k)))


def test_what_was_built_is_captured_without_a_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be is run, and so are the steps that would have been shown by it."""
    ran: list[Key] = []
    run = StepGraphs.run

    def noted(self: StepGraphs, key: Key) -> None:
        ran.append(key)
        run(self, key)

    monkeypatch.setattr(StepGraphs, "run", noted)
    graphs = started().runner.graphs
    assert ran == []
    assert graphs.captured == graphs.first
    step, body = Key("step", 4), Key("body", 16)
    monkeypatch.setattr(Builder, "failing", frozenset(graphs.first.index(key) for key in (step, body)))
    graphs = started().runner.graphs
    assert ran == [key for key in graphs.first if key in (step, body, step._replace(features=Feature.PLAIN))]
    assert len(ran) == 3
    assert graphs.captured == graphs.first


def test_a_device_that_does_not_say_what_it_built_runs_all_of_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As devices written for an interface before 1.8 do."""
    monkeypatch.setattr(Builder, "build", lambda self, work: None)
    driver = Driver(started())
    graphs = driver.engine.runner.graphs
    assert graphs.captured == graphs.first
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    driver.add("a", P(9, 1), params)
    driver.finish()
    assert_same(dense(), P(9, 1), params, driver.result("a"))


def test_a_device_answers_for_each_piece_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Builder, "build", lambda self, work: [True])
    with pytest.raises(PluginError, match=r"build of device 'builder' answered for 1 pieces of work; it was given \d\d"):
        started()


def test_a_plan_is_not_written_over_while_it_may_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps that are built go through one pinned buffer, and the host is ahead of a device."""
    copying, packed = False, 0
    pack_rows, upload = PlanPacker.pack_rows, StepWork.upload

    def packing(self: PlanPacker, *arguments: Any) -> None:
        nonlocal packed
        packed += 1
        assert not copying
        pack_rows(self, *arguments)

    def uploading(self: StepWork, *arguments: Any) -> None:
        nonlocal copying
        copying = True
        upload(self, *arguments)

    def waited(self: Builder) -> None:
        nonlocal copying
        copying = False

    def build(self: Builder, work: Sequence[Callable[[], None]]) -> None:
        with monkeypatch.context() as patch, torch.inference_mode():
            patch.setattr(PlanPacker, "pack_rows", packing)
            patch.setattr(StepWork, "upload", uploading)
            patch.setattr(Builder, "synchronize", waited)
            for part in work:
                part()

    monkeypatch.setattr(Builder, "build", build)
    started()
    assert packed > 20


def test_places_of_a_larger_step_are_not_read_while_kernels_are_built() -> None:
    """Of a small step nobody says then where its last places lie, and those of a larger one lie outside of it."""
    settings = {"speculation": {"drafter": "mtp"}, "model": {"name": str(engines.target())}} | options(device="builder", rows=4, tokens=64)
    plugin = LeavingPlugin()
    driver = Driver(Engine(settings, plugins=[ByteTokenizerPlugin(), plugin]))
    assert plugin.left_out
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    driver.add("a", P(20, 1), params)
    driver.finish()
    assert_same(engines.subject(), P(20, 1), params, driver.result("a"))

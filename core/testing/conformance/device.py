"""The conformance suite of a device: order of work, copies after work, buffers, and an engine's results on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from modelrunner.assemble import settle
from modelrunner.device import Device, PinnedBuffer
from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Offer
from modelrunner.plugin_manager import PluginManager
from modelrunner.request import SamplingParams
from modelrunner.testing.drive import Driver
from modelrunner.testing.probe import EngineProbe
from modelrunner.testing.prompts import P
from modelrunner.testing.reference import assert_same
from modelrunner.testing.subjects import Subject, dense, options

STEPS = 200
SIZE = 64


def do(method: Callable[..., Any], *arguments: Any) -> Callable[[], None]:
    """Work: `method(*arguments)`."""

    def work() -> None:
        method(*arguments)

    return work


def give(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A source of a download."""
    return lambda: tensor


class DevicePlugin:
    """Offers one device class under its own name."""

    MODELRUNNER_API = ">=1,<2"

    def __init__(self, kind: type[Device]) -> None:
        self.kind = kind

    @hookimpl
    def device(self) -> Offer[type[Device]]:
        return Offer("conformance", lambda: self.kind, reason="the class under test")


class DeviceConformance:
    """Work runs in the order of its launch, and a copy sees all work launched before it. Subclass it in a test file:

        class TestMyDevice(DeviceConformance):
            device = MyDevice

    device: the class. settings: by dotted names, e.g. of its own section. plugins: more plugin objects or module names.
    """

    device: ClassVar[type[Device]]
    settings: ClassVar[Mapping[str, Any]] = {}
    plugins: ClassVar[Sequence[object]] = ()

    @pytest.fixture(autouse=True)
    def _device_is_there(self) -> None:
        if self.device.type == "cuda" and not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")

    def make(self) -> Device:
        return self.device(settle(self.settings, PluginManager.load(self.plugins)))

    def words(self, buffer: PinnedBuffer) -> Any:
        """The buffer as int32 numbers."""
        return buffer.array.view(np.int32)

    # ---- memory ----------------------------------------------------------------------------------------------------

    def test_a_pinned_buffer_is_one_memory(self) -> None:
        buffer = self.make().pinned(64)
        assert (buffer.tensor.dtype, tuple(buffer.tensor.shape), buffer.array.size) == (torch.uint8, (64,), 64)
        buffer.array[:] = 7
        assert buffer.tensor.eq(7).all(), "the tensor does not see what numpy wrote"
        buffer.tensor[3] = 9
        assert buffer.array[3] == 9, "numpy does not see what the tensor wrote"

    def test_memory(self) -> None:
        """Free and total bytes, and a budget that leaves room."""
        device = self.make()
        free, total = device.memory()
        assert 0 < free <= total
        small, large = device.cache_budget(0.5), device.cache_budget(0.9)
        assert small <= large <= free, f"cache_budget(0.5) is {small}, cache_budget(0.9) is {large}, free are {free} bytes"

    def test_peak(self) -> None:
        """What work takes at most is counted, and afterwards it is free again."""
        device = self.make()
        if not device.measures:
            pytest.skip("it does not measure")
        size, before = 64 << 20, device.memory()[0]

        def work() -> None:
            torch.zeros(size, dtype=torch.uint8, device=device.torch_device)
            torch.zeros(size // 2, dtype=torch.uint8, device=device.torch_device)

        peak = device.peak(lambda: device.launch(work))
        assert size <= peak < 2 * size, f"peak is {peak} bytes; {size} were taken, given back, and then half of it"
        kept = before - device.memory()[0]
        assert kept < size // 2, f"{kept} bytes are still taken afterwards"

    # ---- order -----------------------------------------------------------------------------------------------------

    def test_work_runs_in_order_and_all_of_it(self) -> None:
        """Each piece of work depends on all before it."""
        device = self.make()
        value = torch.zeros(1, dtype=torch.int64, device=device.torch_device)

        def work(number: int) -> None:
            value.mul_(31).add_(number).remainder_(1_000_003)

        want = 0
        for number in range(STEPS):
            device.launch(do(work, number))
            want = (want * 31 + number) % 1_000_003
        device.synchronize()
        assert int(value) == want, "work ran out of order, twice, or not at all"

    def test_a_download_has_all_work_before_it(self) -> None:
        """As the runner uses it: a ring of entries, of which each is written again only after its copy was waited for."""
        device = self.make()
        entries = 3
        ring = torch.zeros(entries, SIZE, dtype=torch.int32, device=device.torch_device)
        counter = torch.zeros(1, dtype=torch.int32, device=device.torch_device)
        buffers = [device.pinned(4 * SIZE) for _ in range(entries)]
        events: list[Any] = [None] * entries

        def check(step: int) -> None:
            event = events[step % entries]
            event.wait()
            got = self.words(buffers[step % entries])
            assert (got == step + 1).all(), f"download {step} brought {got[:4]}; the work before it wrote {step + 1}"
            device.release(buffers[step % entries])

        for step in range(STEPS):
            if step >= entries:
                check(step - entries)
            entry = step % entries
            device.launch(do(counter.add_, 1))
            device.launch(do(ring[entry].copy_, counter.expand(SIZE)))
            events[entry] = device.download(give(ring[entry]), buffers[entry])
        for step in range(STEPS - entries, STEPS):
            check(step)

    def test_a_download_fills_the_start_of_its_buffer(self) -> None:
        """Of any type, and no more than the source has."""
        device = self.make()
        for dtype in (torch.int32, torch.float32, torch.int64, torch.uint8, torch.bfloat16):
            source = torch.arange(6, device=device.torch_device).view(2, 3).to(dtype)
            device.synchronize()  # no work of the device's made it
            buffer = device.pinned(64)
            buffer.array[:] = 0xEE
            device.download(give(source), buffer).wait()
            assert torch.equal(buffer.tensor[: source.nbytes].view(dtype), source.cpu().flatten()), f"{dtype} was not copied"
            assert (buffer.array[source.nbytes :] == 0xEE).all(), f"{dtype}: bytes past the source were changed"

    def test_work_reads_pinned_memory_as_it_was_left(self) -> None:
        """The host writes a buffer, launches work that reads it, and writes it again only after that work's result has come."""
        device = self.make()
        total = torch.zeros(SIZE, dtype=torch.int32, device=device.torch_device)
        staged = torch.zeros_like(total)
        given, back = device.pinned(4 * SIZE), device.pinned(4 * SIZE)
        want = 0
        for step in range(30):
            self.words(given)[:] = step
            device.launch(do(staged.copy_, given.tensor.view(torch.int32), True))
            device.launch(do(total.add_, staged))
            device.download(give(total), back).wait()
            want += step
            assert (self.words(back) == want).all(), "work read a pinned buffer before it was written, or after it was given back"
            device.release(given)

    def test_side_work_runs_in_order_and_is_seen_by_later_steps(self) -> None:
        """What is launched once an event is done sees what its work wrote, whatever the compute stream did meanwhile."""
        device = self.make()
        side, seen = (torch.zeros(SIZE, dtype=torch.int32, device=device.torch_device) for _ in range(2))
        busy, back = torch.zeros_like(side), device.pinned(4 * SIZE)

        def work(given: torch.Tensor) -> None:
            side.mul_(3).add_(device.upload(given))

        want = 0
        for number in range(40):
            device.launch(do(busy.add_, 1))
            events = [device.launch_side(do(work, torch.full((SIZE,), number + i, dtype=torch.int32))) for i in range(2)]
            want = ((want * 3 + number) * 3 + number + 1) % 2**32
            events[1].wait()
            assert events[0].done(), "side work did not run in order"
            assert events[1].done(), "the event is waited for and not done"
            device.launch(do(seen.copy_, side))
            device.download(give(seen), back).wait()
            got = back.array.view(np.uint32)
            assert (got == want).all(), f"a step after side work {number} sees {got[:4]}; the work wrote {want}"

    def test_side_work_that_gives_way_stays_in_order(self) -> None:
        """Whatever share it has of the device, on a part of it or all over, with steps between its pieces."""
        device = self.make()
        if not device.paces:
            pytest.skip("the device paces no side work")
        side, busy = (torch.zeros(SIZE, dtype=torch.int32, device=device.torch_device) for _ in range(2))
        back = device.pinned(4 * SIZE)

        def work(number: int) -> None:
            for _ in range(3):
                side.mul_(3).add_(number)
                device.give_way()

        want = steps = 0
        for number in range(40):
            device.pace_side((1.0, 0.5, 0.9)[number % 3])
            events = [device.launch_side(do(work, number), narrow=narrow) for narrow in (True, False, True)]
            for _ in range(3):
                device.launch(do(busy.add_, 1))
            steps += 3
            for _ in range(9):
                want = (want * 3 + number) % 2**32
            device.give_way()  # outside of side work this is nothing
            events[-1].wait()
            device.pace_side(1.0)
            assert all(event.done() for event in events), "side work did not run in order"
            device.download(give(side), back).wait()
            got = back.array.view(np.uint32)
            assert (got == want).all(), f"after side work {number} there is {got[:4]}; {want} is right"
        device.download(give(busy), back).wait()
        assert (self.words(back) == steps).all(), "a step between two pieces of side work was lost"

    def test_side_work_that_raises_tells_who_asks_and_nobody_else(self) -> None:
        device = self.make()
        value, back = torch.zeros(4, dtype=torch.int32, device=device.torch_device), device.pinned(16)
        event = device.launch_side(do(int, "planted"))
        for ask in (event.wait, event.done, event.wait):
            with pytest.raises(ValueError, match="planted"):
                ask()
        device.launch_side(do(value.add_, 1)).wait()
        device.launch(do(value.add_, 1))
        device.download(give(value), back).wait()
        assert (self.words(back) == 2).all(), "work after one that raised did not run"

    def test_synchronize_waits_for_everything(self) -> None:
        device = self.make()
        value, buffer = torch.zeros(4, dtype=torch.int32, device=device.torch_device), device.pinned(16)
        for _ in range(20):
            device.launch(do(value.add_, 1))
        event = device.download(give(value), buffer)
        device.synchronize()
        got = self.words(buffer)
        assert (got == 20).all(), f"after synchronize some work or a copy has not happened: got {got}, want 20"
        event.wait()

    # ---- an engine ---------------------------------------------------------------------------------------------------

    def test_an_engine_gives_its_reference_results(self) -> None:
        """At every depth, with pages running out."""
        from modelrunner.engine import Engine

        subject: Subject = dense()
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        sampled = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=12, ignore_eos=True)
        requests = {str(s): (P(5 + 9 * s, s), sampled if s % 2 else params) for s in range(5)}
        for depth in (1, 2, 3):
            values = options(depth=depth, rows=4, tokens=24, pages=8) | {"model": {"name": subject.model, "dtype": "float32"}}
            del values["device"]
            own = {"pin.device": "conformance", "model.max_model_len": 96} | dict(self.settings)
            driver = Driver(Engine(values | own, plugins=(DevicePlugin(self.device), *subject.plugins, *self.plugins)))
            for name, (prompt, wish) in requests.items():
                driver.add(name, prompt, wish)
            driver.finish()
            for name, (prompt, wish) in requests.items():
                assert_same(subject, prompt, wish, driver.result(name))
            EngineProbe(driver).assert_clean()
            driver.engine.close()

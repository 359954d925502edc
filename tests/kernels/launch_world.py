"""An engine on a GPU that is not there: its tensors have shapes and no contents, and its kernels' launches are noted instead of made.

For a process of its own without TRITON_INTERPRET, as kernels are decorated for the compiler or for the interpreter once a process.
`python -P launch_world.py FOLDER [MODEL]` starts an engine of two layers of a model's shapes (Qwen3-0.6B's), whose configuration it
writes into the folder, runs steps of many kinds, and prints as a JSON object what was built, what start-up took for the same and Triton
does not, and what steps launched that was not built.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from modelrunner import Engine, Offer, SamplingParams, hookimpl, weights
from modelrunner.batch import Plan, Ticket
from modelrunner.device import Device, Event, PinnedBuffer
from modelrunner.plugins import triton_kernels
from modelrunner.plugins.bench.drive import abandon
from modelrunner.plugins.bench.models import MODELS
from modelrunner.runner import Runner
from modelrunner.settings import RunnerSettings
from modelrunner.testing.null_device import NullDevice

PROCESSORS, CAPABILITY = 132, (9, 0)  # of an H200
LAYERS = 2
ROWS = (1, 2, 3, 4, 7, 8, 12, 16, 24, 40, 70, 100, 200, 400, 700, 1024)
LENGTHS = ((100,), (1000,), (2500,), (8000,), (10, 3000))  # tokens of prompts
MOST_TOKENS = 60_000  # of all prompts
STEPS = 10


class Place:
    """Stands for a tensor where a kernel is launched: memory is aligned, and views begin in it where they do."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.shape, self._strides = tensor.dtype, tensor.shape, tensor.stride()
        self._at = 256 + tensor.storage_offset() * tensor.itemsize

    def data_ptr(self) -> int:
        return self._at

    def stride(self) -> tuple[int, ...]:
        return self._strides


@dataclass
class Seen:
    """Kinds of launches by Triton's keys of builds, each with the kernel's name, and the step that was the first to have it.

    ahead: shown to the device to be built. kinds: of those, by what `kernels.ahead` takes for one build. run: launched. last: key of the
    last launch.
    """

    ahead: dict[Any, str] = field(default_factory=dict)
    kinds: dict[Any, set[Any]] = field(default_factory=dict)
    run: dict[Any, tuple[str, str]] = field(default_factory=dict)
    building: bool = False
    step: str = ""
    last: Any = None

    def mistaken(self) -> list[str]:
        """The kernel of each kind of launch that is several builds."""
        return [self.ahead[min(keys)] for keys in self.kinds.values() if len(keys) > 1]

    def late(self) -> list[tuple[str, str]]:
        """The kernel and the step of each that was not built ahead."""
        return [found for key, found in self.run.items() if key not in self.ahead]

    def note(self, *, key: str, fn: Any, **_: Any) -> bool:
        """Triton's hook before it compiles. It then does not."""
        place = self.last = fn.name, key
        if self.building:
            self.ahead.setdefault(place, fn.name)
        else:
            self.run.setdefault(place, (fn.name, self.step))
        return True


SEEN = Seen()


class AbsentGpu(NullDevice):
    """An H200, as far as its operations are concerned. Every row samples the same token."""

    type, name = "cuda", "absent"

    def __init__(self, settings: RunnerSettings) -> None:
        super().__init__(settings)
        self.torch_device = torch.device("meta")
        self.hidden = True

    def launch(self, work: Callable[[], None]) -> None:
        work()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return lambda: None

    def download(self, source: Callable[[], torch.Tensor], target: PinnedBuffer) -> Event:
        source()
        return super().download(source, target)

    def build(self, work: Sequence[Callable[[], None]]) -> Sequence[bool]:
        SEEN.building = True
        try:
            for part in work:
                self.launch(part)
        finally:
            SEEN.building = False
        return [True] * len(work)


class AbsentPlugin:
    """Offers the device, and the operations that Triton kernels replace."""

    MODELRUNNER_API = ">=1,<2"

    @hookimpl
    def device(self) -> Offer[type[Device]]:
        return Offer("absent", lambda: AbsentGpu, fit="fallback", reason="for tests of what is launched")


def pretend() -> None:
    """Note launches from now on, and answer for the GPU what kernels' launchers ask of it."""
    from modelrunner.kernels import ahead, pdl
    from modelrunner.kernels.attention import device

    plain, kinds = JITFunction.run, [set[Any](), set[Any]()]

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        told = None
        if SEEN.building:  # tensors without contents do not say where they lie
            values = (*args, *options.values())
            places = tuple(Place(value).data_ptr() % 16 for value in values if isinstance(value, torch.Tensor))
            told = ahead._kind_of_launch(kernel, args, options), places
        args, options = tuple(map(_placed, args)), {name: name == "GPU" or _placed(value) for name, value in options.items()}
        kind = kernel, tuple(map(_kind, args)), tuple((name, _kind(value)) for name, value in options.items())
        if kind not in (seen := kinds[SEEN.building]):
            seen.add(kind)
            plain(kernel, *args, grid=grid, warmup=True, **options)
            if told is not None:
                SEEN.kinds.setdefault(told, set()).add(SEEN.last)

    JITFunction.run = run
    triton.knobs.runtime.jit_cache_hook = SEEN.note
    target = GPUTarget("cuda", CAPABILITY[0] * 10, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda index: 0, get_current_target=lambda: target)
    )
    weights.fill_dummy = lambda module, seed: None
    on: dict[str, Any] = {"PDL": True, "launch_pdl": True}
    answers = {pdl.pdl: on, pdl.hopper: True, device.processors: PROCESSORS, device.dependent_launch: True, device.launch_options: on}
    for area in triton_kernels.AREAS:
        triton_kernels.overrides(area, False)
    for name, module in list(sys.modules.items()):
        if name.startswith("modelrunner.kernels."):
            for each, value in list(vars(module).items()):
                if callable(value) and value in answers:
                    setattr(module, each, lambda *_, answer=answers[value]: answer)
    torch.Tensor.tolist = _zeros_to_list(torch.Tensor.tolist)  # type: ignore[method-assign, assignment]
    launch = Runner.launch

    def launched(self: Runner, plan: Plan) -> Ticket:
        self.device.plan = plan  # type: ignore[attr-defined]
        SEEN.step = (
            f"{plan.num_rows} rows, {plan.num_decode} decode, {plan.num_tokens} tokens, longest {plan.max_query}, up to {plan.max_seq_len}"
        )
        return launch(self, plan)

    Runner.launch = launched  # type: ignore[method-assign]


def _zeros_to_list(plain: Any) -> Any:
    return lambda tensor: plain(torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor)


def _placed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Place(value)
    if hasattr(value, "block_shape"):
        return _described(value)
    return value


def _described(value: Any) -> Any:
    value.base = Place(value.base)
    return value


def _kind(value: Any) -> Any:
    if isinstance(value, Place):
        return value.dtype, value.data_ptr() % 16
    if hasattr(value, "block_shape"):
        return type(value), value.base.dtype, tuple(value.block_shape)
    return value


def started(folder: Path, model: str) -> Engine:
    """An engine with room for many rows and long prompts."""
    (folder / "config.json").write_text(json.dumps({**MODELS[model], "num_hidden_layers": LAYERS}))
    settings: dict[str, Any] = {"model.name": str(folder), "model.load_format": "dummy", "model.skip_tokenizer_init": True}
    settings |= {"model.max_model_len": 8208, "model.dtype": "bfloat16", "cache.num_pages": 60_000, "device.name": "absent"}
    settings |= {"scheduler.max_rows": 1024, "scheduler.max_batched_tokens": 16384}
    return Engine(settings, plugins=[AbsentPlugin()])


def run_steps(engine: Engine, rows: int, lengths: Sequence[int]) -> None:
    """A few steps of so many requests with prompts of these lengths, in turn, and of those that then decode."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    for place in range(rows):
        length = lengths[place % len(lengths)]
        engine.add_request(str(place), {"prompt_token_ids": [(place * 7 + i) % 9000 for i in range(length)]}, params)
    for _ in range(STEPS):
        engine.step()
    abandon(engine)
    engine.scheduler.reset_prefix_cache()


def main(folder: str, model: str = "qwen3-0.6b") -> None:
    pretend()
    engine = started(Path(folder), model)
    at_start = SEEN.late()
    for rows in ROWS:
        for lengths in LENGTHS:
            run_steps(engine, rows, [min(length, MOST_TOKENS // rows) for length in lengths])
    late = [f"{kernel}: {step}" for kernel, step in SEEN.late()[len(at_start) :]]
    built = dict(Counter(SEEN.ahead.values()))
    print(json.dumps({"built": built, "mistaken": SEEN.mistaken(), "at_start": at_start, "late": late, "run": len(SEEN.run)}))


if __name__ == "__main__":
    main(*sys.argv[1:])

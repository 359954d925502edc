"""The plugin for FlashInfer: what it declines, and its backend over a double of the package that computes in plain torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from modelrunner import Decline, Engine, Offer, SamplingParams, hookimpl
from modelrunner.backends import flashinfer as flashinfer_backend
from modelrunner.backends.flashinfer import FlashInfer, Planner, Planners
from modelrunner.backends.paged import PagedAttention
from modelrunner.model_state import FullAttention, RecurrentState, SlidingWindow
from modelrunner.plugins import flashinfer
from modelrunner.settings import load_settings
from modelrunner.testing import ByteTokenizerPlugin, Driver, EngineProbe, P, assert_same, dense, options, tiny_dense
from tests.plugins.attention_steps import GPU, OPS, make_meta, prompts_of

DOUBLE = Path(__file__).parent / "flashinfer_double"
GROUP = FullAttention("full", (0, 1), 4, 2, 64, 0.3)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The double, in place of flashinfer-python; returns its module."""
    monkeypatch.syspath_prepend(str(DOUBLE))
    for name in ("flashinfer", "flashinfer.decode"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield import_module("flashinfer")
    for name in ("flashinfer", "flashinfer.decode"):
        sys.modules.pop(name, None)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def asked(group: Any = GROUP, device: Any = GPU, **changes: Any) -> Any:
    return flashinfer.attention_backend(group, device, load_settings(changes))


@pytest.mark.usefixtures("hopper", "package")
@pytest.mark.parametrize("types", [{}, {"model.dtype": "float16", "cache.dtype": "float16"}, {"cache.dtype": "bfloat16"}])
def test_it_offers_itself_for_those_who_pin_it(types: dict[str, str]) -> None:
    offer = asked(**types)
    assert isinstance(offer, Offer)
    assert offer.fit == "fallback"
    backend = offer.load()
    assert backend is FlashInfer
    assert backend.capturable
    assert not backend.needs_host_lengths


DECLINED = {
    "window": (SlidingWindow("local", (0,), 4, 2, 64, 0.3, window_size=64), {}, "no sliding windows"),
    "softcap": (replace(GROUP, softcap=30.0), {}, "no softcap"),
    "sinks": (replace(GROUP, sinks=True), {}, "no attention sinks"),
    "head": (replace(GROUP, head_dim=80), {}, "head_dim is 80; it takes 64, 128, 256"),
    "float32": (GROUP, {"model.dtype": "float32"}, "model.dtype is 'float32'; it takes bfloat16 and float16"),
    "cache": (GROUP, {"model.dtype": "bfloat16", "cache.dtype": "float16"}, "a cache of the model's type"),
    "auto": (GROUP, {"cache.dtype": "float16"}, "cache.dtype is 'float16' and model.dtype 'auto'"),
}


@pytest.mark.usefixtures("hopper", "package")
@pytest.mark.parametrize("case", DECLINED)
def test_it_declines_what_it_cannot_do(case: str) -> None:
    group, settings, reason = DECLINED[case]
    answer = asked(group, **settings)
    assert isinstance(answer, Decline)
    assert reason in answer.reason


@pytest.mark.usefixtures("package")
def test_it_declines_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "'cpu' is no NVIDIA GPU" in asked(device=SimpleNamespace(type="cpu", name="cpu")).reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 7.5; it runs from 8.0 on" in asked().reason


@pytest.mark.usefixtures("hopper")
def test_it_declines_without_the_package() -> None:
    assert "flashinfer-python is not installed; pip install 'modelrunner[flashinfer]'" in asked().reason


def test_groups_of_other_kinds_are_declined() -> None:
    assert "not RecurrentState" in asked(RecurrentState("state", (0,), (4,), 16)).reason


DECODE = [(40, 1, 1), (3, 0, 1), (15, 1, 1), (0, 1, 1)]
PROMPTS = [(0, 23, 23), (300, 41, 41), (0, 1, 1), (15, 33, 33), (31, 1, 1)]


@pytest.mark.parametrize(
    ("rows", "num_decode", "padding"),
    [(DECODE + PROMPTS, 4, 0), (DECODE + PROMPTS, 4, 50), (PROMPTS, 0, 3), (DECODE, 4, 0)],
    ids=["mixed", "padded", "prompts", "decode"],
)
def test_it_computes_what_the_paged_backend_does(package: ModuleType, rows: Any, num_decode: int, padding: int) -> None:
    """Fresh prompts, later chunks, finished rows, rows of padding and tokens that belong to nobody."""
    held = len(rows)
    meta, cache = make_meta(GROUP, [*rows, *[(0, 0, 0)] * bool(padding)], num_decode, padding)
    meta = replace(meta, prompts=prompts_of(rows, num_decode) if held > num_decode else None)
    q, k, v = torch.randn(meta.num_tokens, 4, 64), *torch.randn(2, meta.num_tokens, 2, 64)
    valid = meta.slots >= 0
    results = []
    for kind in (PagedAttention, FlashInfer):
        runner = kind(GROUP, cache.clone(), OPS, torch.float32)
        package.calls.clear()
        step = runner.begin(meta)
        outs = [runner.attend(q, k, v, layer, step) for layer in (0, 1)]
        assert all(out.isfinite().all() for out in outs)
        results.append([*(out[valid] for out in outs), runner.cache])
    torch.testing.assert_close(results[1], results[0], equal_nan=True)
    tokens = sum(query for _, query, _ in rows[num_decode:])
    assert package.calls == 2 * ([("prefill", tokens)] * (held > num_decode) + [("decode", num_decode)] * (num_decode > 0))


def test_what_the_host_does_not_know_runs_as_paged(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    meta, cache = make_meta(GROUP, DECODE + PROMPTS, 4, 0)
    known = replace(meta, prompts=prompts_of(DECODE + PROMPTS, 4))
    runner = FlashInfer(GROUP, cache, OPS, torch.float32)
    package.calls.clear()
    step = runner.begin(meta)
    assert step.prompts is step.decode is None
    out = runner.attend(torch.randn(meta.num_tokens, 4, 64), *torch.randn(2, meta.num_tokens, 2, 64), 0, step)
    assert out.isfinite().all()
    assert runner.begin(replace(known, captured=True)).prompts is None
    assert runner.begin(known).prompts is not None
    monkeypatch.setattr(flashinfer_backend, "PLAN_BYTES", 28 * 6 * 4 - 1)
    assert runner.begin(known).prompts is None
    assert not package.calls


def test_drafts_and_odd_pages_decode_as_paged(package: ModuleType) -> None:
    meta, cache = make_meta(GROUP, DECODE, 4, 0)
    runner = FlashInfer(GROUP, cache, OPS, torch.float32)
    assert runner.begin(meta).decode is not None
    assert runner.begin(replace(meta, decode_query=2, num_decode=2, num_rows=2)).decode is None
    runner = FlashInfer(GROUP, torch.zeros(3, 2, 24, 2, 2, 64), OPS, torch.float32)
    package.calls.clear()
    assert runner.begin(meta).decode is None
    assert not package.calls


def test_a_plan_waits_in_a_wrapper_of_its_own_until_it_was_copied(package: ModuleType) -> None:
    """Plans of steps in flight never share pinned memory, and none is waited for."""
    planners = Planners(torch.device("cpu"), torch.zeros(8, dtype=torch.uint8), "fa3")
    copied = [False, False]
    for index in range(2):
        planners.add().copied = SimpleNamespace(query=lambda index=index: copied[index])
    one = torch.zeros(2, dtype=torch.int32)
    arguments: dict[str, Any] = {
        "qo_indptr": one, "paged_kv_indptr": one, "paged_kv_indices": one[:0], "paged_kv_last_page_len": one[:1] + 1, "num_qo_heads": 1,
        "num_kv_heads": 1, "head_dim_qk": 64, "page_size": 16, "causal": True, "sm_scale": 1.0, "q_data_type": 1, "kv_data_type": 1,
    }  # fmt: skip
    third = planners.plan(**arguments)
    assert [planner.wrapper for planner in planners.all].index(third) == 2
    copied[1] = True
    assert planners.plan(**arguments) is planners.all[1].wrapper
    assert len(planners.all) == 3
    assert Planner(None).idle


class Pinned:
    """Offers the backend on any device."""

    MODELRUNNER_API = ">=1,<2"

    @hookimpl
    def attention_backend(self) -> Offer[Any]:
        return Offer("flashinfer_anywhere", flashinfer._load)


@pytest.mark.parametrize("depth", [1, 3])
def test_an_engine_gives_the_same_tokens(package: ModuleType, depth: int) -> None:
    """Prompts in chunks while others decode, on the device that runs its work late: lengths on the host are those of the device."""
    settings = {"model": {"name": str(tiny_dense())}, "pin": {"attention_backend": "flashinfer_anywhere"}}
    settings |= options(device="deferred_cpu", depth=depth, rows=4, tokens=33, pages=16)
    driver = Driver(Engine(settings, plugins=[ByteTokenizerPlugin(), Pinned()]))
    package.calls.clear()
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    requests = {str(k): P(5 + 9 * k, k) for k in range(6)}
    for name, prompt in requests.items():
        driver.add(name, prompt, greedy)
        driver.step()
    driver.finish()
    EngineProbe(driver).assert_clean()
    assert {kind for kind, _ in package.calls} == {"prefill", "decode"}
    for name, prompt in requests.items():
        assert_same(dense(), prompt, greedy, driver.result(name))


def test_a_plan_tells_the_exact_lengths_of_its_prompts() -> None:
    """Chunks, a prefix from the cache, and a request that comes back after it lost its pages."""
    settings = {"model": {"name": str(tiny_dense())}} | options(device="cpu", depth=2, rows=4, tokens=33, pages=40)
    engine = Engine(settings, plugins=[ByteTokenizerPlugin()])
    driver, plans = Driver(engine), []
    launch = engine.runner.launch
    engine.runner.launch = lambda plan: plans.append(plan) or launch(plan)  # type: ignore[method-assign]
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for name, prompt in {"a": P(70, 1), "b": P(50, 2), "c": P(70, 1)}.items():
        driver.add(name, prompt, greedy)
        driver.step()
    driver.finish()
    seen = np.concatenate([np.stack([plan.prompts.query, plan.prompts.length], 1) for plan in plans if plan.prompts])
    assert all(plan.prompts is None for plan in plans if plan.num_decode == plan.num_rows)
    assert sorted(length for _, length in seen.tolist() if length in (50, 70)) == [50, 70, 70]
    assert (seen[:, 0] <= seen[:, 1]).all()

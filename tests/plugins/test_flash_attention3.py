"""The plugin for FlashAttention 3: what it declines, and its backend over a double of the package that computes in plain torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from modelrunner import Decline, Engine, Offer, SamplingParams, hookimpl
from modelrunner.backends import flash_attention3 as flash_attention3_backend
from modelrunner.backends.flash_attention3 import FlashAttention3
from modelrunner.backends.paged import PagedAttention
from modelrunner.model_state import FullAttention, RecurrentState, SlidingWindow
from modelrunner.plugins import attention, flash_attention3
from modelrunner.settings import load_settings
from modelrunner.testing import ByteTokenizerPlugin, Driver, EngineProbe, P, assert_same, dense, options, tiny_dense
from tests.plugins.attention_steps import GPU, OPS, PAGE, make_meta, prompts_of

DOUBLE = Path(__file__).parent / "fa3_double"
GROUP = FullAttention("full", (0, 1), 4, 2, 16, 0.3)
GAP_PAGES = 12


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The double, in place of fa3-fwd; returns its module."""
    monkeypatch.syspath_prepend(str(DOUBLE))
    for name in ("fa3_fwd_config", "fa3_fwd_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield import_module("fa3_fwd_interface")
    for name in ("fa3_fwd_config", "fa3_fwd_interface"):
        sys.modules.pop(name, None)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def asked(group: Any = GROUP, device: Any = GPU, **changes: Any) -> Any:
    return flash_attention3.attention_backend(group, device, load_settings(changes))


@pytest.mark.usefixtures("hopper")
def test_it_comes_before_the_paged_backend(package: ModuleType) -> None:
    offer = asked()
    assert isinstance(offer, Offer)
    paged: Any = attention.attention_backend(GROUP, SimpleNamespace(type="cpu", name="cpu"), load_settings({}))
    assert offer.fit == paged.fit
    assert offer.replaces == {paged.name}
    backend = offer.load()
    assert issubclass(backend, PagedAttention)
    assert backend.capturable
    assert not backend.needs_host_lengths
    assert isinstance(asked(replace(GROUP, softcap=30.0)), Offer)
    assert isinstance(asked(**{"model.dtype": "bfloat16"}), Offer)


DECLINED = {
    "window": (SlidingWindow("local", (0,), 4, 2, 16, 0.3, window_size=64), {}, "no sliding windows"),
    "sinks": (replace(GROUP, sinks=True), {}, "no attention sinks"),
    "odd head": (replace(GROUP, head_dim=20), {}, "head_dim is 20; it takes multiples of 8 up to 256"),
    "large head": (replace(GROUP, head_dim=264), {}, "head_dim is 264"),
    "float32": (GROUP, {"model.dtype": "float32"}, "model.dtype is 'float32'; it takes bfloat16"),
    "float16": (GROUP, {"model.dtype": "float16"}, "model.dtype is 'float16'; it takes bfloat16"),
    "8 bits": (GROUP, {"cache.dtype": "fp8"}, "cache.dtype is 'float8_e4m3fn'; it takes bfloat16"),
    "cache": (GROUP, {"cache.dtype": "float16"}, "cache.dtype is 'float16'; it takes bfloat16"),
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
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "compute capability 8.0; it runs on Hopper, 9.0" in asked().reason


@pytest.mark.usefixtures("hopper")
def test_it_declines_without_the_package() -> None:
    assert "fa3-fwd is not installed; pip install 'modelrunner[fa3]'" in asked().reason


@pytest.mark.usefixtures("hopper")
def test_it_declines_softcap_that_was_not_built(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(import_module("fa3_fwd_config").CONFIG["build_flags"], "FLASHATTENTION_DISABLE_SOFTCAP", True)
    assert "built without softcap" in asked(replace(GROUP, softcap=30.0)).reason


def test_groups_of_other_kinds_are_declined() -> None:
    assert "not RecurrentState" in asked(RecurrentState("state", (0,), (4,), 16)).reason


MIXED = [(40, 1, 1), (3, 0, 1), (0, 23, 23), (300, 41, 41), (9, 0, 7), (0, 1, 1), (15, 30, 33)]


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "softcap"])
@pytest.mark.parametrize(("num_decode", "padding"), [(2, 0), (2, 50), (0, 3)])
def test_prompts_and_decode_rows(package: ModuleType, num_decode: int, padding: int, softcap: float | None) -> None:
    """Fresh prompts, later chunks, finished rows, unused query slots and tokens that belong to nobody."""
    meta, cache = make_meta(GROUP, MIXED, num_decode, padding)
    group = replace(GROUP, softcap=softcap)
    q, k, v = torch.randn(meta.num_tokens, 4, 16), *torch.randn(2, meta.num_tokens, 2, 16)
    valid = meta.slots >= 0
    results = []
    for kind in (PagedAttention, FlashAttention3):
        runner = kind(group, cache.clone(), OPS, torch.float32)
        step = runner.begin(meta)
        outs = [runner.attend(q, k, v, layer, step) for layer in (0, 1)]
        assert all(out.isfinite().all() for out in outs)
        results.append([*(out[valid] for out in outs), runner.cache])
    torch.testing.assert_close(results[1], results[0], equal_nan=True)
    assert len(package.calls) == 2
    package.calls.clear()


def test_steps_of_decode_rows_and_steps_too_large_run_as_paged(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    meta, cache = make_meta(GROUP, [(40, 1, 1), (7, 1, 1)], 2, 0)
    runner = FlashAttention3(GROUP, cache, OPS, torch.float32)
    assert runner.begin(meta).prompts is None
    meta, cache = make_meta(GROUP, MIXED, 2, 0)
    runner = FlashAttention3(GROUP, cache, OPS, torch.float32)
    assert runner.begin(meta).prompts is not None
    assert runner.begin(replace(meta, captured=True)).prompts is None
    row_bytes = (GAP_PAGES * PAGE + -(-meta.max_seq_len // PAGE) * PAGE) * 2 * 2 * 16 * 4
    monkeypatch.setattr(flash_attention3_backend, "SCRATCH_BYTES", 5 * row_bytes - 1)
    step = runner.begin(meta)
    assert step.prompts is None
    out = runner.attend(torch.randn(meta.num_tokens, 4, 16), *torch.randn(2, meta.num_tokens, 2, 16), 0, step)
    assert out.isfinite().all()
    assert not package.calls


def test_lengths_on_the_host_bound_the_gathered_keys(package: ModuleType) -> None:
    """A long decode row beside short prompts takes no room, and the longest prompt bounds the kernel's keys."""
    rows = [(700, 1, 1), (0, 23, 23), (30, 41, 41)]
    meta, cache = make_meta(GROUP, rows, 1, 0)
    q, k, v = torch.randn(meta.num_tokens, 4, 16), *torch.randn(2, meta.num_tokens, 2, 16)
    outs = []
    for known in (meta, replace(meta, prompts=prompts_of(rows, 1))):
        runner = FlashAttention3(GROUP, cache.clone(), OPS, torch.float32)
        step = runner.begin(known)
        outs.append((runner.attend(q, k, v, 0, step), step.prompts.kv.shape[0]))
    torch.testing.assert_close(outs[1][0], outs[0][0])
    assert outs[1][1] == (2 + 5 + 3 * GAP_PAGES) * PAGE
    assert package.calls[-1][2] == 71 < package.calls[0][2]
    package.calls.clear()


class Pinned:
    """Offers the backend on any device."""

    MODELRUNNER_API = ">=1,<2"

    @hookimpl
    def attention_backend(self) -> Offer[Any]:
        return Offer("flash_anywhere", flash_attention3._load)


@pytest.mark.parametrize("depth", [1, 3])
def test_an_engine_gives_the_same_tokens(package: ModuleType, depth: int) -> None:
    """Prompts in chunks while others decode, on the device that runs its work late."""
    settings = {"model": {"name": str(tiny_dense())}, "pin": {"attention_backend": "flash_anywhere"}}
    settings |= options(device="deferred_cpu", depth=depth, rows=4, tokens=33, pages=16)
    driver = Driver(Engine(settings, plugins=[ByteTokenizerPlugin(), Pinned()]))
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    requests = {str(k): P(5 + 9 * k, k) for k in range(6)}
    for name, prompt in requests.items():
        driver.add(name, prompt, greedy)
        driver.step()
    driver.finish()
    EngineProbe(driver).assert_clean()
    assert package.calls
    package.calls.clear()
    for name, prompt in requests.items():
        assert_same(dense(), prompt, greedy, driver.result(name))

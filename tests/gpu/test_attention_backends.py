"""The optional attention backends on a GPU, with their real packages, which a test without them skips."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from modelrunner import Engine, OutputKind, SamplingParams
from modelrunner.backends.paged import PagedAttention
from modelrunner.model_state import FullAttention
from modelrunner.ops import Ops, Registry
from modelrunner.plugins import reference_kernels, triton_kernels
from modelrunner.testing import ByteTokenizerPlugin, Driver, EngineProbe, P, options, tiny_dense
from tests.plugins.attention_steps import GPU, OPS, make_meta, prompts_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

GROUP = FullAttention("full", (0, 1), 4, 2, 128, 128**-0.5)
CLASSES = {"flash_attention3": "FlashAttention3", "flashinfer": "FlashInfer"}
PACKAGES = {"flash_attention3": "fa3_fwd_interface", "flashinfer": "flashinfer"}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
PROMPTS = {str(k): P(5 + 23 * k, k) for k in range(7)}


@pytest.fixture(params=PACKAGES)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if find_spec(PACKAGES[name]) is None:
        pytest.skip(f"package of {name} is not installed")
    return name


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def start(backend: str, **short: Any) -> Driver:
    """An engine whose steps run without graphs, so that prompts in chunks and rows that decode are together in the backend's hands."""
    model = tiny_dense(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=128)
    settings = options(device="cuda", **short) | {"graphs": {"eager": True}, "pin": {"attention_backend": backend}}
    return Driver(Engine({"model": {"name": str(model), "dtype": "bfloat16"}} | settings, plugins=[ByteTokenizerPlugin()]))


def tokens(driver: Driver) -> list[tuple[int, ...]]:
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt, GREEDY)
    driver.finish()
    EngineProbe(driver).assert_clean()
    return [tuple(driver.result(name).token_ids) for name in PROMPTS]


def test_depth_changes_nothing(backend: str) -> None:
    """Plans of steps in flight do not disturb each other; bit for bit."""
    want = tokens(start(backend, depth=1, tokens=48))
    assert tokens(start(backend, depth=2, tokens=48)) == want
    assert tokens(start(backend, depth=3, tokens=48)) == want


@pytest.mark.parametrize("num_decode", [4, 0], ids=["mixed", "prompts"])
def test_it_computes_what_the_reference_does(backend: str, num_decode: int) -> None:
    """Of a step's live tokens, in bfloat16 against float32 on the CPU; what dead rows get is finite, and NaN of nobody's pages nowhere."""
    decode, prompts = [(40, 1, 1), (3, 0, 1), (700, 1, 1), (0, 1, 1)], [(0, 23, 23), (300, 241, 241), (0, 1, 1), (15, 330, 330), (31, 1, 1)]
    rows = decode[:num_decode] + prompts
    meta, cache = make_meta(GROUP, rows, num_decode, 0)
    meta = replace(meta, prompts=prompts_of(rows, num_decode))
    cache = cache.bfloat16()
    parts = [torch.randn(meta.num_tokens, heads, 128).bfloat16() for heads in (4, 2, 2)]
    valid = meta.slots >= 0
    reference = PagedAttention(GROUP, cache.float(), OPS, torch.float32)
    step = reference.begin(meta)
    want = [reference.attend(*(part.float() for part in parts), layer, step)[valid] for layer in (0, 1)]
    kind = getattr(import_module(f"modelrunner.backends.{backend}"), CLASSES[backend])
    runner = kind(GROUP, cache.cuda(), gpu_operations(), torch.bfloat16)
    on_gpu = {f.name: v.cuda() for f in fields(meta) if isinstance(v := getattr(meta, f.name), torch.Tensor)}
    step = runner.begin(replace(meta, **on_gpu))
    assert step.prompts is not None
    for layer, expected in enumerate(want):
        out = runner.attend(*(part.cuda() for part in parts), layer, step).cpu()
        assert out.isfinite().all()
        torch.testing.assert_close(out[valid].float(), expected, rtol=1.6e-2, atol=1.6e-2)


def gpu_operations() -> Ops:
    registry = Registry()
    for plugin in (reference_kernels, triton_kernels):
        plugin.kernels(register=registry, device=GPU)
    return registry.resolve("cuda")


def test_steps_do_not_synchronise(backend: str, no_synchronisation: None) -> None:
    driver = start(backend, depth=2, tokens=48)
    driver.add("warm", P(60, 9), GREEDY)
    driver.finish()
    torch.cuda.set_sync_debug_mode("error")
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt, GREEDY)
    driver.finish()
    assert all(driver.is_finished(name) for name in PROMPTS)

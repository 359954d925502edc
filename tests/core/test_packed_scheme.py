"""Weights that are kept packed for the CPU's kernels only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from modelrunner import LLM, SamplingParams, packed_scheme
from modelrunner.assemble import resolve_ops, settle
from modelrunner.checkpoint import ModelCard
from modelrunner.choosing import Chooser
from modelrunner.kernels.linear import fbgemm, onednn
from modelrunner.kernels.linear.reference import int8_matmul, matmul
from modelrunner.linear import Int8Scheme, Linear, LinearFactory, LinearScheme, PlainScheme, quantised_rows
from modelrunner.ops import Ops
from modelrunner.packed_scheme import PackedFloatScheme, PackedHalfScheme, PackedInt8Scheme
from modelrunner.plugin_manager import PluginManager
from modelrunner.testing import P
from modelrunner.testing.tiny import tiny_dense

pytestmark = pytest.mark.skipif(fbgemm.problem() is not None, reason=str(fbgemm.problem()))
CPU = torch.device("cpu")
OPS = Ops({"matmul": matmul, "int8_matmul": int8_matmul}, {})
SCHEMES = [(PackedHalfScheme, torch.bfloat16), (PackedInt8Scheme, torch.float32), (PackedFloatScheme, torch.float32)]
needs_onednn = pytest.mark.skipif(onednn.problem() is not None, reason=str(onednn.problem()))


def all_ops() -> Ops:
    manager = PluginManager.load()
    settings = settle({"device.name": "cpu"}, manager)
    return resolve_ops(manager, manager.choose("device", pin="cpu", settings=settings).load()(settings))


def layer_of(scheme: type[LinearScheme], dtype: torch.dtype, inner: int, *parts: int) -> Linear:
    return LinearFactory(scheme(OPS, dtype, CPU))(inner, parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "outer", "inner"), [(1, 7, 33), (3, 69, 130), (1, 1, 1), (64, 40, 576), (2, 96, 1536)])
def test_half_products_are_of_the_models_weights(dtype: torch.dtype, rows: int, outer: int, inner: int) -> None:
    """Weights are rounded to the model's type, and to nothing else; sums are float32."""
    layer, weight, x = layer_of(PackedHalfScheme, dtype, inner, outer), torch.randn(outer, inner), torch.randn(rows, inner).to(dtype)
    layer.load(0, weight)
    want = x.double() @ weight.to(dtype).double().T
    torch.testing.assert_close(layer(x).double(), want, rtol=2.0 ** (-8 if dtype == torch.bfloat16 else -10), atol=1e-5 * inner**0.5)


def test_tiny_weights_lose_at_most_half_of_float16s_smallest_step() -> None:
    weight = (torch.rand(8, 64) * 2.0**-14).bfloat16().float()
    assert (fbgemm.unpack_half(fbgemm.pack_half(weight)) - weight).abs().max() <= 2.0**-25


@pytest.mark.parametrize("odd", [1e6, float("inf"), float("nan")])
def test_weights_that_float16_cannot_hold_stay_in_the_models_type(odd: float) -> None:
    layer, weight, x = layer_of(PackedHalfScheme, torch.bfloat16, 16, 4, 4), torch.randn(8, 16), torch.ones(2, 16, dtype=torch.bfloat16)
    weight[1, 3] = odd
    layer.load(0, weight[:4])
    layer.load(1, weight[4:])
    torch.testing.assert_close(layer(x), matmul(x, weight.bfloat16()), rtol=0.01, atol=0.05, equal_nan=True)
    weight[1, 3] = 1.0
    layer.load(0, weight[:4])
    torch.testing.assert_close(layer(x), matmul(x, weight.bfloat16()), rtol=0.01, atol=0.05)


@pytest.fixture
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_scheme, "LARGE", 1)
    monkeypatch.setattr(packed_scheme, "WIDE", 1)


@pytest.mark.usefixtures("small_is_large")
@pytest.mark.parametrize(("scheme", "dtype"), SCHEMES)
def test_new_weights_for_one_part_keep_the_others(scheme: type[LinearScheme], dtype: torch.dtype) -> None:
    """Bit for bit, however often; before and after the layer was used."""
    layer, fresh = (layer_of(scheme, dtype, 48, 32, 16, 16) for _ in range(2))
    parts = [torch.randn(rows, 48) for rows in (32, 16, 16)]
    x = torch.randn(5, 48).to(dtype)
    for part, weight in enumerate(parts):
        layer.load(part, weight)
    for seed in range(5):
        parts[1] = torch.randn(16, 48, generator=torch.Generator().manual_seed(seed))
        layer.load(1, parts[1])
        layer(x)
    for part, weight in enumerate(parts):
        fresh.load(part, weight)
    assert torch.equal(layer(x), fresh(x))


@pytest.mark.usefixtures("small_is_large")
@pytest.mark.parametrize(("scheme", "dtype"), SCHEMES)
def test_only_the_packed_weight_is_kept(scheme: type[LinearScheme], dtype: torch.dtype) -> None:
    layer = layer_of(scheme, dtype, 48, 32, 16)
    layer.load(0, torch.randn(32, 48))
    assert layer.__dict__["storage"].packed is None, "not before the last part is there"
    layer.load(1, torch.randn(16, 48))
    storage = layer.__dict__["storage"]
    assert storage.staged is None
    assert storage.packed is not None
    assert not layer.state_dict()


@pytest.mark.parametrize("rows", [1, 2, 40])
def test_int8_products_are_those_of_its_integers(rows: int) -> None:
    """Activations keep 14 bits of the row's largest: outliers, which models have, leave the others their precision."""
    layer, weight, x = layer_of(PackedInt8Scheme, torch.float32, 576, 960), torch.randn(960, 576), torch.randn(rows, 576)
    x[:, 7] *= 300
    weight[:, 7] *= 1e-3
    layer.load(0, weight)
    ((_, qweight, scale),) = quantised_rows(weight, CPU)
    want = x.double() @ (qweight.double() * scale.double()[:, None]).T
    # Half a step of 300 * max / 8192 in each of 576 activations of size 1.
    step = x.abs().amax(-1, keepdim=True).double() / 8192
    assert ((layer(x) - want).square().mean(-1).sqrt() <= 0.35 * step.squeeze(1) * 576**0.5 * 1.2).all()


def test_int8_rows_are_exact_whatever_stands_beside_them() -> None:
    layer, x = layer_of(PackedInt8Scheme, torch.float32, 576, 200), torch.randn(65, 576)
    layer.load(0, torch.randn(200, 576))
    together = layer(x)
    assert all(torch.equal(layer(x[i : i + n]), together[i : i + n]) for i, n in ((0, 1), (3, 2), (10, 33)))
    assert torch.equal(layer(torch.zeros(2, 576)), torch.zeros(2, 200))


def test_int8_weights_are_those_of_the_plain_scheme() -> None:
    weight = torch.randn(40, 64)
    plain, packed = layer_of(Int8Scheme, torch.float32, 64, 40), layer_of(PackedInt8Scheme, torch.float32, 64, 40)
    plain.load(0, weight)
    packed.load(0, weight)
    qweight, scale = fbgemm.unpack_int8(packed.__dict__["storage"].packed)
    assert torch.equal(qweight, plain.qweight)
    assert torch.equal(scale, plain.scale)


@needs_onednn
def test_float32_packs_large_wide_layers_and_keeps_their_weights_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_scheme, "LARGE", 64 * 48)
    monkeypatch.setattr(packed_scheme, "WIDE", 47)
    large, small = layer_of(PackedFloatScheme, torch.float32, 64, 40, 8), layer_of(PackedFloatScheme, torch.float32, 64, 40, 7)
    weight = torch.randn(48, 64)
    narrow = layer_of(PackedFloatScheme, torch.float32, 128, 46)
    for layer in (large, small):
        layer.load(0, weight[:40])
        layer.load(1, weight[40 : layer.out_features])
    assert not PackedFloatScheme.packs(narrow)
    assert torch.equal(onednn.unpack(large.__dict__["storage"].packed), weight)
    assert not large.state_dict()
    assert torch.equal(small.weight, weight[:47])


@needs_onednn
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="oneDNN's older kernels do not promise it")
@pytest.mark.usefixtures("small_is_large")
def test_float32_rows_are_the_same_whatever_stands_beside_them() -> None:
    layer, x = layer_of(PackedFloatScheme, torch.float32, 576, 2000), torch.randn(65, 576)
    layer.load(0, torch.randn(2000, 576))
    together = layer(x)
    assert layer.__dict__["storage"].packed is not None
    assert all(torch.equal(layer(x[i : i + n]), together[i : i + n]) for i, n in ((0, 1), (3, 2), (10, 33)))


class SmallNorm:
    weight = torch.nn.Parameter(torch.rand(64), requires_grad=False)
    eps = 1e-5


@needs_onednn
@pytest.mark.parametrize("large", [1, packed_scheme.LARGE])
def test_float32_products_with_what_stands_around_them_are_the_plain_schemes(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_scheme, "LARGE", large)
    monkeypatch.setattr(packed_scheme, "WIDE", 1)
    ops = all_ops()
    weight, x, residual = torch.randn(48, 64), torch.randn(5, 64), torch.randn(5, 48)
    mine, plain = (LinearFactory(scheme(ops, torch.float32, CPU))(64, (24, 24)) for scheme in (PackedFloatScheme, PlainScheme))
    for layer in (mine, plain):
        layer.load(0, weight[:24])
        layer.load(1, weight[24:])
    kept = residual.clone()
    for call in (
        lambda layer: layer(x),
        lambda layer: layer.normed(x, SmallNorm()),
        lambda layer: layer.added(x, residual),
        lambda layer: layer.gated(x, SmallNorm(), "silu_mul"),
        lambda layer: layer.gated(x, SmallNorm(), "gelu_tanh_mul"),
    ):
        torch.testing.assert_close(call(mine), call(plain), rtol=1e-4, atol=1e-4)
    assert torch.equal(residual, kept)


def test_a_cpu_packs_floats_of_every_type_unless_told_otherwise() -> None:
    manager = PluginManager.load()
    card = ModelCard("m", Path(), "safetensors", (), "m")

    def chosen(**given: str | int) -> type[LinearScheme]:
        settings = settle({"device.name": "cpu", **given}, manager)
        device = manager.choose("device", pin="cpu", settings=settings).load()(settings)
        scheme: type[LinearScheme] = Chooser(manager, settings)(
            "linear_scheme", setting="linear.scheme", card=card, device=device, settings=settings
        )
        return scheme

    assert chosen() is chosen(**{"model.dtype": "float32"}) is PackedFloatScheme
    assert chosen(**{"scheduler.max_rows": 1}) is PlainScheme
    assert chosen(**{"model.dtype": "bfloat16"}) is chosen(**{"model.dtype": "bfloat16", "scheduler.max_rows": 1}) is PackedHalfScheme
    assert chosen(**{"linear.scheme": "int8"}) is PackedInt8Scheme
    assert chosen(**{"linear.scheme": "plain"}) is PlainScheme


@needs_onednn
def test_an_engine_with_packed_float32_says_what_plain_weights_say_after_new_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_scheme, "LARGE", 1)
    monkeypatch.setattr(packed_scheme, "WIDE", 1)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    prompts = [P(length, length) for length in (3, 17, 40, 41)]
    first, second = (tiny_dense(seed, tie_word_embeddings=True) for seed in (1, 2))
    said = {}
    for scheme in ("plain", "auto"):
        settings = {"device.name": "cpu", "linear.scheme": scheme, "model.skip_tokenizer_init": True, "model.max_model_len": 64}
        with LLM(str(first), **settings) as llm:
            before = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
            llm.update_weights(str(second))
            said[scheme] = before, [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
            packed = [layer for layer in llm.engine.runner.state.module.modules() if "storage" in layer.__dict__]
            assert len(packed) == (0 if scheme == "plain" else 9), "four layers of each of two, and the head"
    assert said["auto"] == said["plain"]
    assert said["auto"][0] != said["auto"][1]

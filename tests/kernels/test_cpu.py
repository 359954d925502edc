"""What the CPU runs instead of the references, against them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from modelrunner.kernels import chain
from modelrunner.kernels.activation import reference as activation
from modelrunner.kernels.linear import fbgemm
from modelrunner.kernels.linear.cpu import matmul
from modelrunner.kernels.norm.reference import rms_norm
from modelrunner.kernels.sampling.reference import greedy
from modelrunner.plugin_manager import PluginManager
from modelrunner.testing.conformance import KernelConformance

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])


class TestRmsNorm(KernelConformance):
    op = "rms_norm"


class TestAddRmsNorm(KernelConformance):
    op = "add_rms_norm"


class TestApplyRope(KernelConformance):
    op = "apply_rope"


class TestMatmul(KernelConformance):
    op = "matmul"


class TestNormMatmul(KernelConformance):
    op = "norm_matmul"


class TestMatmulAdd(KernelConformance):
    op = "matmul_add"


class TestNormGatedMatmul(KernelConformance):
    op = "norm_gated_matmul"


@pytest.mark.parametrize("vocab", [1024, 1000])
def test_the_best_token_is_the_first_of_the_largest(vocab: int) -> None:
    """Equal ones in one block and in two, none that is finite, NaN and infinity anywhere."""
    logits = torch.randn(8, vocab)
    logits[0, [3, 700]] = logits[1, [600, 601]] = 9.0
    logits[2] = -torch.inf
    logits[3, 900], logits[4, 5], logits[5, 999] = torch.nan, torch.inf, -torch.inf
    logits[6] = 0.0
    for given in (logits, logits.bfloat16(), logits[:0]):
        tokens, ok = greedy(given)
        assert torch.equal(tokens, given.argmax(1))
        assert ok.tolist() == [True, True, False, False, False, True, True, True][: given.shape[0]]


def test_these_are_what_a_cpu_gets() -> None:
    from modelrunner.assemble import resolve_ops, settle

    manager = PluginManager.load()
    settings = settle({"device.name": "cpu"}, manager)
    reasons = resolve_ops(manager, manager.choose("device", pin="cpu", settings=settings).load()(settings)).explain()
    ours = {"rms_norm", "add_rms_norm", "apply_rope", "matmul", "norm_matmul", "matmul_add", "norm_gated_matmul"}
    ours |= {"draft_states", "mask_states", "walk_tokens"}
    assert {name for name, reason in reasons.items() if "modelrunner:cpu_kernels" in reason and "plain" not in reason} == ours


@pytest.mark.parametrize("rows", range(1, 11))
def test_few_rows_are_as_they_are_alone(rows: int) -> None:
    """Whichever way is taken for that number of rows; the result is contiguous, as `view` wants it."""
    x, weight = torch.randn(rows, 96), torch.randn(40, 96)
    out = matmul(x, weight)
    assert out.is_contiguous()
    torch.testing.assert_close(out, torch.cat([torch.mv(weight, row)[None] for row in x]), rtol=1e-5, atol=1e-5)
    out = matmul(x.view(rows, 1, 96), weight)
    assert tuple(out.shape) == (rows, 1, 40)


def test_what_cannot_be_compiled_runs_as_it_is() -> None:
    def uncommon(x: torch.Tensor) -> Any:
        return {index: value for index, value in enumerate(x.tolist()) if value}  # TorchScript knows no such thing

    assert chain.chained(uncommon) is uncommon
    assert chain.chained(uncommon)(torch.tensor([0, 3])) == {1: 3}


@pytest.mark.skipif(fbgemm.problem() is not None, reason=str(fbgemm.problem()))
@HALVES
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("form", ["half", "int8"])
def test_packed_products_with_what_stands_around_them(form: str, gelu: bool, dtype: torch.dtype) -> None:
    """Each is the chain of its parts, within the rounding of the type."""
    x, norm, residual = torch.randn(3, 64).to(dtype), torch.randn(64).to(dtype), torch.randn(3, 24).to(dtype)
    weight = torch.randn(24, 64)
    scale = weight.abs().amax(1) / 127
    packed = fbgemm.pack_half(weight) if form == "half" else fbgemm.pack_int8((weight / scale[:, None]).round().to(torch.int8), scale)
    product, normed_product, added, gated = (
        getattr(fbgemm, f"{form}_{n}") for n in ("matmul", "norm_matmul", "matmul_add", "norm_gated_matmul")
    )
    kept = x.clone(), residual.clone()
    close = {"rtol": 0.05, "atol": 0.15} if dtype == torch.bfloat16 else {"rtol": 0.01, "atol": 0.02}
    normed = rms_norm(x, norm, 1e-5)
    torch.testing.assert_close(normed_product(x, norm, 1e-5, packed), product(normed, packed), **close)
    torch.testing.assert_close(added(x, packed, residual), residual + product(x, packed), **close)
    act = activation.gelu_tanh_mul if gelu else activation.silu_mul
    want = act(product(normed, packed))
    got = gated(x, norm, 1e-5, packed, gelu)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=close["rtol"], atol=4 * close["atol"])
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])

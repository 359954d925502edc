"""Products with weights in the order that FBGEMM's kernels read them, on x86 processors (Khudia et al. 2021, arXiv:2101.05615).

A packed weight is an opaque object of torch; the weight that it was made from is not needed any more, and `unpack_*` gives it back.
Dimension letters: T rows, K inputs, N outputs.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from modelrunner.kernels.activation.cpu import gated
from modelrunner.kernels.chain import chained
from modelrunner.kernels.norm.cpu import rms_norm

HALF_MOST = 65504.0  # largest float16; smaller ones than 2^-24 are lost
# Digits are to the base 128 and lie in [-64, 64]; the high one of a row's largest activation is 64. 64 is added to make them unsigned: two
# products of at most 128 * 127 fit into the kernel's 16 bits.
DIGITS = 64 * 128

if TYPE_CHECKING:
    Packed = Any
else:
    Packed = torch.classes.quantized.LinearPackedParamsBase


def problem() -> str | None:
    """Why these products cannot run here; None if they can."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return "this build of torch, or this processor, has no FBGEMM (it needs x86 with AVX2)"
    return None


@contextmanager
def _engine() -> Iterator[None]:
    """Packing is for the engine that torch is set to; the packed object knows its own."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        with warnings.catch_warnings():  # torch means to drop tensors of quantised types, the only way to hand integers over
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        torch.backends.quantized.engine = before


def fits_half(weight: torch.Tensor) -> bool:
    """Whether every weight is finite and within float16's range."""
    return bool(weight.abs().amax() <= HALF_MOST)


def pack_half(weight: torch.Tensor) -> Packed:
    """weight: [N, K] float32, within float16's range; it is rounded to float16."""
    with _engine():
        return torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), None)


def unpack_half(packed: Packed) -> torch.Tensor:
    """[N, K] float32."""
    weight: torch.Tensor = torch.ops.quantized.linear_unpack_fp16(packed)[0]
    return weight.float()


@chained
def half_matmul(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """x @ weight.T, products and sums in float32. x: [T, K] of any float dtype. Returns [T, N] in x's dtype."""
    out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x.float().contiguous(), packed)
    return out.to(x.dtype)


@chained
def half_norm_matmul(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, packed: Packed) -> torch.Tensor:
    """`half_matmul` of the norm of x, which is rounded to x's dtype. The rest as in the operation `rms_norm`."""
    normed = rms_norm(x, norm_weight, eps).float()
    out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(normed, packed)
    return out.to(x.dtype)


@chained
def half_matmul_add(x: torch.Tensor, packed: Packed, residual: torch.Tensor) -> torch.Tensor:
    """residual + `half_matmul`, rounded once. residual: [T, N] in x's dtype. A new tensor."""
    out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x.float().contiguous(), packed)
    return out.add_(residual).to(x.dtype)


@chained
def half_norm_gated_matmul(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, packed: Packed, gelu: bool) -> torch.Tensor:
    """act(gate) * up of `half_norm_matmul`, in float32 and rounded once. packed: of [2I, K], gate first. Returns [T, I]."""
    normed = rms_norm(x, norm_weight, eps).float()
    return gated(torch.ops.quantized.linear_dynamic_fp16(normed, packed), gelu).to(x.dtype)


def pack_int8(qweight: torch.Tensor, scale: torch.Tensor) -> Packed:
    """qweight: [N, K] int8, of at most 127. scale: [N] float32, of each output."""
    wide = scale.double() / DIGITS  # what the digits of `int8_matmul` are to be multiplied with
    with _engine():
        quantized = torch._make_per_channel_quantized_tensor(qweight, wide, torch.zeros_like(scale, dtype=torch.int64), 0)
        return torch.ops.quantized.linear_prepack(quantized, None)


def unpack_int8(packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """qweight [N, K] int8 and scale [N] float32, as they were packed."""
    quantized = torch.ops.quantized.linear_unpack(packed)[0]
    return quantized.int_repr(), (quantized.q_per_channel_scales() * DIGITS).float()


@chained
def _digits_matmul(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """`int8_matmul` before it is rounded: [T, N] float32."""
    rows = x.size(0)
    wide = x.float()
    largest = torch.norm(wide, float("inf"), [-1], True).add_(1e-30)
    scaled = torch.div(wide, largest).mul_(64.0)
    high = scaled.round()
    low = scaled.sub_(high).mul_(128.0)
    digits = torch.cat((high, low))  # the low one is rounded on the way in
    out = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(digits, 1.0, 64, packed)
    return torch.add(out[rows:], out[:rows], alpha=128.0).mul_(largest)


@chained
def int8_matmul(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """x @ (scale * qweight).T, by integer products. x: [T, K] of any float dtype. Returns [T, N] in x's dtype.

    A row's activations become two digits of 7 bits, in steps of 1/8192 of its largest one, so an outlier leaves the others their
    precision. The sums are exact, so a row's result depends on nothing but the row.
    """
    return _digits_matmul(x, packed).to(x.dtype)


@chained
def int8_norm_matmul(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, packed: Packed) -> torch.Tensor:
    """`int8_matmul` of the norm of x."""
    return _digits_matmul(rms_norm(x, norm_weight, eps), packed).to(x.dtype)


@chained
def int8_matmul_add(x: torch.Tensor, packed: Packed, residual: torch.Tensor) -> torch.Tensor:
    """residual + `int8_matmul`, rounded once."""
    return _digits_matmul(x, packed).add_(residual).to(x.dtype)


@chained
def int8_norm_gated_matmul(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, packed: Packed, gelu: bool) -> torch.Tensor:
    """act(gate) * up of `int8_norm_matmul`, rounded once. packed: of [2I, K], gate first. Returns [T, I]."""
    return gated(_digits_matmul(rms_norm(x, norm_weight, eps), packed), gelu).to(x.dtype)

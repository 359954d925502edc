"""What tests of Triton kernels share: on the GPU where there is one, else in Triton's interpreter (which conftest.py turns on)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from modelrunner.ops import Registry, Tolerance
from modelrunner.plugins import reference_kernels
from modelrunner.testing.conformance.kernel_cases import Draw, cases_of

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter computes bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]


@cache
def tolerances() -> Mapping[str, Tolerance]:
    """Of the registered operations and fusions."""
    registry = Registry()
    reference_kernels.kernels(registry, device=None)
    return registry.tolerances()


def rounding_to_8_bits() -> None:
    """Let the interpreter round float32 to float8_e4m3fn as GPUs do; left alone it rounds ties up, and loses carries and NaN."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(values: np.ndarray[Any, Any], source: Any, target: Any, mode: Any) -> np.ndarray[Any, Any]:
        if (source, target) != (tl.float32, tl.float8e4nv):
            return convert(values, source, target, mode)
        kept = torch.from_numpy(np.array(values)).to(torch.float8_e4m3fn)
        return kept.view(torch.uint8).numpy()

    interpreter._convert_float = converted


if not ON_GPU:
    rounding_to_8_bits()


def nan(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Memory that nobody has written: NaN, or the type's lowest value; False for bool."""
    if dtype == torch.bool:
        return torch.zeros(shape, dtype=dtype, device=DEVICE)
    return torch.full(shape, float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min, dtype=dtype, device=DEVICE)


def close(out: Any, ref: Any, op: str | Tolerance) -> None:
    """Assert that `out` equals `ref` within the tolerance of operation or fusion `op`.

    Both: a tensor, or a list, tuple or dict of them (None in the same places). Integers, and dtypes without a tolerance, bit for bit.
    """
    if isinstance(ref, dict):
        assert list(out) == list(ref)
        out, ref = list(out.values()), list(ref.values())
    if isinstance(ref, list | tuple):
        assert len(out) == len(ref)
        for one, other in zip(out, ref, strict=True):
            close(one, other, op)
        return
    if ref is None:
        assert out is None
        return
    tolerance = tolerances()[op] if isinstance(op, str) else op
    relative, absolute = tolerance.by_dtype.get(ref.dtype, (0.0, 0.0)) if ref.is_floating_point() else (0.0, 0.0)
    torch.testing.assert_close(out, ref, rtol=relative, atol=absolute, equal_nan=True)


def close_in_8_bits(out: torch.Tensor, ref: torch.Tensor) -> None:
    """Assert that two tensors of float8_e4m3fn have the same numbers, but for a few next ones, where what was rounded differed already."""
    a, b = out.float(), ref.float()
    assert torch.equal(a.isnan(), b.isnan())
    differ = (a != b) & ~a.isnan()
    assert differ.float().mean() < 0.01, f"{int(differ.sum())} of {differ.numel()} numbers differ"
    torch.testing.assert_close(a, b, rtol=2**-3, atol=2**-9, equal_nan=True)


def agree(op: str, functions: Mapping[str, Any], references: Mapping[str, Any]) -> None:
    """Assert that `op` of `functions` gives what that of `references` gives, in every conformance case of a built-in operation.

    A case may call other operations too; those are the references' in both runs.
    """
    for case, size in cases_of(op):
        for dtype in DTYPES:
            plain = SimpleNamespace(**references)
            fast = SimpleNamespace(**references | {op: functions[op]})
            want, got = (case(ops, Draw(torch.Generator().manual_seed(0), dtype, DEVICE), *size) for ops in (plain, fast))
            close(got, want, op)

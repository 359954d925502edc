"""Products with float32 weights in the order that oneDNN's kernels read them.

A packed weight is a tensor of torch's layout for oneDNN, of the shape of the weight that it was made from, which is not needed any more.
Dimension letters: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch

from modelrunner.kernels.activation.cpu import gated
from modelrunner.kernels.chain import chained
from modelrunner.kernels.norm.cpu import rms_norm

ROWS = 16  # the number of rows that the order of a packed weight is chosen for; it serves any other


def problem() -> str | None:
    """Why these products cannot run here; None if they can."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this build of torch has no oneDNN"
    return None


def pack(weight: torch.Tensor) -> torch.Tensor:
    """weight: [N, K] float32."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)
    return packed


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The weight, as it was packed: [N, K] float32."""
    return packed.to_dense()


@chained
def matmul(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """x @ weight.T. x: [..., K] float32. Returns [..., N]."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")  # type: ignore[no-any-return]


@chained
def norm_matmul(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, packed: torch.Tensor) -> torch.Tensor:
    """`matmul` of the norm of x, which is as in the operation `rms_norm`."""
    return matmul(rms_norm(x, norm_weight, eps), packed)


@chained
def matmul_add(x: torch.Tensor, packed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """residual [..., N] + `matmul`, a new tensor."""
    return matmul(x, packed).add_(residual)


@chained
def norm_gated_matmul(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, packed: torch.Tensor, gelu: bool) -> torch.Tensor:
    """act(gate) * up of `norm_matmul`. packed: of [2I, K], gate first. Returns [..., I]."""
    return gated(norm_matmul(x, norm_weight, eps, packed), gelu)

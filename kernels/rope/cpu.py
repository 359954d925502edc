"""Rotary positions as one call, for CPUs."""

from typing import Optional

import torch

from modelrunner.kernels.chain import chained


@chained
def rotated(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x: [T, H, D], of which the first R components turn. cos_sin: [T, R] float32. Returns a new tensor in x's dtype."""
    rotary_dim = cos_sin.size(-1)
    half = rotary_dim // 2
    cos, sin = cos_sin.unsqueeze(1).chunk(2, -1)
    first, second = x[..., :half], x[..., half:rotary_dim]
    if x.dtype != torch.float32:
        first, second = first.float(), second.float()
    parts = [torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)]
    if x.dtype != torch.float32:
        parts = [parts[0].to(x.dtype), parts[1].to(x.dtype)]
    if rotary_dim < x.size(-1):
        parts.append(x[..., rotary_dim:])
    return torch.cat(parts, -1)


@chained
def full_turns(cos_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `turned` multiplies by, of tables [T, D] float32: [T, 1, D] float32 each. The second has the sign of each half."""
    cos, sin = cos_sin.unsqueeze(1).chunk(2, -1)
    return torch.cat((cos, cos), -1), torch.cat((sin.neg(), sin), -1)


@chained
def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`rotated` of all components of x [T, H, D] float32, with both factors from `full_turns`."""
    half = x.size(-1) // 2
    return torch.addcmul(x * cos, torch.cat((x[..., half:], x[..., :half]), -1), sin)


@chained
def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: Optional[torch.Tensor],  # noqa: UP045 (TorchScript's spelling)
    cos_sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.apply_rope`."""
    table = cos_sin if positions is None else cos_sin.index_select(0, positions)
    return rotated(q, table), rotated(k, table) if k.size(1) > 0 else k


OVERRIDES = {"apply_rope": apply_rope}

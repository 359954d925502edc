"""Rotary position embedding."""

from modelrunner.kernels.rope.reference import apply_rope

__all__ = ["apply_rope"]

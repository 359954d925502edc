"""Activations."""

from modelrunner.kernels.activation.reference import silu_mul

__all__ = ["silu_mul"]

"""Activations."""

from modelrunner.kernels.activation.reference import gelu_tanh_mul, silu_mul

__all__ = ["gelu_tanh_mul", "silu_mul"]

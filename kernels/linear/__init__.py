"""Matrix products."""

from modelrunner.kernels.linear.reference import int8_matmul, matmul

__all__ = ["int8_matmul", "matmul"]

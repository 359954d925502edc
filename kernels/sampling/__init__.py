"""Choosing tokens from logits."""

from modelrunner.kernels.sampling.philox import gumbel_noise
from modelrunner.kernels.sampling.reference import greedy, sample

__all__ = ["greedy", "gumbel_noise", "sample"]

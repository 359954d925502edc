"""Sampling: one file a stage, with its columns."""

from modelrunner.sampler.base import Stage
from modelrunner.sampler.sampler import Sampler, default_stages

__all__ = ["Sampler", "Stage", "default_stages"]

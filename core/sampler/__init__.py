"""Sampling: one file a stage, with its columns."""

from modelrunner.sampler.base import Stage
from modelrunner.sampler.functions import Functions
from modelrunner.sampler.processors import ProcessorRegistry, Processors
from modelrunner.sampler.sampler import Sampler, default_stages

__all__ = ["Functions", "ProcessorRegistry", "Processors", "Sampler", "Stage", "default_stages"]

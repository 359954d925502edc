"""Embedding lookup."""

from modelrunner.kernels.embedding.reference import embedding

__all__ = ["embedding"]

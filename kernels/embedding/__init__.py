"""Embedding lookup, and embeddings of media."""

from modelrunner.kernels.embedding.reference import add_media, embedding, media_positions, place_media

__all__ = ["add_media", "embedding", "media_positions", "place_media"]

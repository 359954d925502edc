"""Byte automata of structured output: masks of their states, and the way of a sampled token through them."""

from modelrunner.kernels.automata.reference import mask_states, walk_tokens

__all__ = ["mask_states", "walk_tokens"]

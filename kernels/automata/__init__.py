"""Byte automata of structured output: masks of their states, and the way of sampled and of drafted tokens through them."""

from modelrunner.kernels.automata.reference import draft_states, mask_states, walk_tokens

__all__ = ["draft_states", "mask_states", "walk_tokens"]

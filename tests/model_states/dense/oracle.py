"""Greedy decoding against transformers without decoding twice.

If each output token is the oracle's best one after the tokens before it, then the oracle, decoding greedily, gives the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

NEAR_TIE = 1e-4  # two best logits closer than this may change places by rounding


def assert_greedy(model: Any, prompt: Sequence[int], output: Sequence[int]) -> int:
    """Compare up to the first near-tie; returns how many tokens were compared."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *output]]), logits_to_keep=len(output) + 1).logits[0, :-1]
    best = logits.topk(2, -1)
    for place, token in enumerate(output):
        if best.values[place, 0] - best.values[place, 1] < NEAR_TIE:
            return place
        assert token == best.indices[place, 0], f"output token {place} is {token}; transformers has {best.indices[place].tolist()}"
    return len(output)

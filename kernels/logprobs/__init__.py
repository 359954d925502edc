"""Log-probs of chosen tokens and of the likeliest ones."""

from modelrunner.kernels.logprobs.reference import processed_logits, token_logprobs

__all__ = ["processed_logits", "token_logprobs"]

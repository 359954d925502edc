"""What changes logits before a token is chosen: allow lists, biases, bans, penalties; and the counts that penalties read."""

from modelrunner.kernels.logits.reference import count_tokens, edit_logits, mask_logits

__all__ = ["count_tokens", "edit_logits", "mask_logits"]

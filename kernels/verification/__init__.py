"""Which drafted tokens a step keeps."""

from modelrunner.kernels.verification.reference import verify_drafts

__all__ = ["verify_drafts"]

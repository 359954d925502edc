"""Operations of speculative decoding: drafts on their way to a step and from it."""

from modelrunner.kernels.speculation.reference import draft_inputs, draft_pass, ngram_draft, spread_rows, store_drafts

__all__ = ["draft_inputs", "draft_pass", "ngram_draft", "spread_rows", "store_drafts"]

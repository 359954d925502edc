"""The drafter of the plugin `ngram`."""

from __future__ import annotations

import torch

from modelrunner.plugins.ngram import NgramSettings
from modelrunner.speculation import DraftBuild, Drafter, DrafterNeeds, DraftStep


class NgramDrafter(Drafter):
    """Looks a row's last tokens up in its own prompt and output (operation `ngram_draft`)."""

    def declare(self) -> DrafterNeeds:
        return DrafterNeeds()

    def build(self, build: DraftBuild) -> None:
        self.ops = build.context.ops
        self.sizes = self.settings.section(NgramSettings)

    def propose(self, step: DraftStep, out: torch.Tensor, probabilities: torch.Tensor | None) -> None:
        batch, token_ids = step.batch, step.columns["token_ids"]
        longest = min(batch.max_seq_len + 1, token_ids.shape[1])
        self.ops.ngram_draft(batch.rows, step.wants, step.known, token_ids, longest, self.sizes.min_size, self.sizes.max_size, out)

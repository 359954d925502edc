"""The drafter. N rows of a step, k drafts, L tokens of the longest request, V vocabulary size."""

from __future__ import annotations

import torch

from modelrunner.kernels.sampling.philox import PURPOSE_DRAFT
from modelrunner.speculation import DraftBuild, Drafter, DrafterNeeds, DraftStep
from modelrunner_followers import FollowersSettings


class Followers(Drafter):
    """Draws a draft from the counts of the tokens that have followed the token before it. Where none has, the row's drafts end."""

    def declare(self) -> DrafterNeeds:
        return DrafterNeeds(probabilities=True)

    def build(self, build: DraftBuild) -> None:
        self.noise = build.context.ops.gumbel_noise
        self.floor = self.settings.section(FollowersSettings).floor

    def propose(self, step: DraftStep, out: torch.Tensor, probabilities: torch.Tensor | None) -> None:
        assert probabilities is not None, "the core gives them to a drafter that declares them"
        row = step.batch.rows.long()
        ids = step.columns["token_ids"][row].long()  # [N, L]; nobody has written those from `known` on
        followed = torch.arange(1, ids.shape[1], device=ids.device) < step.known.unsqueeze(1)  # [N, L - 1]: whether place p + 1 is known
        seed, choice = step.columns["seed"][row], step.columns["choice"][row]
        token = step.newest.unsqueeze(1)  # [N, 1]
        for j in range(step.num_draft):
            counted = ((ids[:, :-1] == token) & followed).float()
            line = probabilities[:, j]  # [N, V], zeros
            line.scatter_add_(1, torch.where(followed, ids[:, 1:], 0), counted)
            total = line.sum(1, keepdim=True)
            line.mul_((1 - self.floor) / total.clamp(min=1)).add_(self.floor / line.shape[1])
            # The noise of the position that the draft would take: another one at each, and none that the sampler draws by.
            noisy = line.log() + self.noise(seed, step.known + j, choice, PURPOSE_DRAFT, line.shape[1])
            token = noisy.argmax(1, keepdim=True)
            out[:, j] = torch.where(total > 0, token, -1)[:, 0]

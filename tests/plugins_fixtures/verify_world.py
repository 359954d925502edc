"""Verification of drafts alone, without an engine: rows that are taken on token by token, and drafters that draw.

On the GPU where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from modelrunner.kernels.sampling.philox import PURPOSE_DRAFT, gumbel_noise
from modelrunner.kernels.verification import reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = 200_000
K, LENGTH = 3, 3
Verify = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
Draft = Callable[["World", torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


def verifiers() -> list[Verify]:
    """The reference, and on a GPU the kernels."""
    if DEVICE.type == "cpu":
        return [reference.verify_drafts]
    from modelrunner.kernels.verification.gpu import OVERRIDES

    return [reference.verify_drafts, OVERRIDES["verify_drafts"]]


def lines_of(rows: torch.Tensor, known: torch.Tensor, drafts: torch.Tensor, alive: bool | torch.Tensor = True) -> tuple[Any, ...]:
    """Arguments of `verify_drafts` from `rows` to `slots`. drafts: [N, k], -1 for none; known, drafts: of rows 0, 1, ..."""
    slots = 1 + drafts.shape[1]
    ahead = torch.arange(slots, dtype=torch.int32, device=DEVICE)
    present = torch.cat((torch.ones_like(drafts[:, :1]), drafts >= 0), 1).bool() & torch.as_tensor(alive, device=DEVICE).view(-1, 1)
    query_len = 1 + ahead.repeat(len(rows))
    token_ids = torch.full((len(rows), 40), 3, dtype=torch.int32, device=DEVICE)
    token_ids.scatter_(1, known.long().unsqueeze(1) + ahead[:-1].long(), drafts)
    return rows.repeat_interleave(slots), present.flatten(), (known - 1).repeat_interleave(slots), query_len, token_ids, slots


class World:
    """Rows that start from token 0 at position 1, and their columns. `model` [V, V]: the logits after each token."""

    def __init__(self, model: torch.Tensor, rows: int = ROWS, seed: torch.Tensor | None = None, **given: float) -> None:
        self.model, self.rows = model.to(DEVICE), torch.arange(rows, dtype=torch.int32, device=DEVICE)
        self.known = torch.ones_like(self.rows)
        self.tokens = torch.zeros(rows, LENGTH + K + 2, dtype=torch.int64, device=DEVICE)
        self.seed = torch.arange(rows, device=DEVICE) if seed is None else seed.to(DEVICE)
        self.choice = torch.zeros_like(self.rows)
        types = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
        filled = {"temperature": 1.0, **given}
        self.columns = {
            name: torch.full((rows,), filled[name], dtype=dtype, device=DEVICE) if name in filled else None for name, dtype in types.items()
        }
        self.drafted, self.accepted = 0, 0

    @property
    def newest(self) -> torch.Tensor:
        return self.tokens.gather(1, self.known.long().unsqueeze(1) - 1)

    def verify(self, verify: Verify, drafts: torch.Tensor, probs: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
        """One step; returns how many tokens each row got."""
        logits = self.model[torch.cat((self.newest, drafts.clamp(min=0).long()), 1)].flatten(0, 1)
        columns = {**self.columns, "seed": self.seed, "choice": self.choice}
        tokens, counts, ok = verify(logits, *lines_of(self.rows, self.known, drafts), **columns, draft_probs=probs, **more)
        assert ok.all()
        assert (counts >= 1).all()
        place = self.known.long().unsqueeze(1) + torch.arange(tokens.shape[1], device=DEVICE)
        counting = (torch.arange(tokens.shape[1], device=DEVICE) < counts.unsqueeze(1)) & (place < self.tokens.shape[1])
        place = place.clamp(max=self.tokens.shape[1] - 1)
        self.tokens.scatter_(1, place, torch.where(counting, tokens, self.tokens.gather(1, place)))
        self.drafted += int((drafts[:, 0] >= 0).sum())
        self.accepted += int(((counts > 1) & (drafts[:, 0] >= 0)).sum())
        self.known += counts
        return counts

    def run(self, verify: Verify, draft: Draft, **more: Any) -> World:
        """Until every row has LENGTH new tokens; rows that have them take no drafts."""
        while (left := self.known <= LENGTH).any():
            known, tokens = self.known.clone(), self.tokens.clone()
            drafts, probs = draft(self, self.newest)
            self.verify(verify, drafts, probs, **more)
            self.known = torch.where(left, self.known, known)
            self.tokens = torch.where(left.unsqueeze(1), self.tokens, tokens)
        return self


def drawing(proposed: torch.Tensor) -> Draft:
    """Draws from `proposed` [V, V], the probabilities after each token, or [V], and says so."""

    def draft(world: World, newest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table = proposed.to(DEVICE).expand(len(world.model), -1)
        found, probs = [newest], []
        for j in range(K):
            chances = table[found[-1][:, 0]]
            noise = gumbel_noise(world.seed, world.known + j, world.choice, PURPOSE_DRAFT, chances.shape[1])
            found.append((chances.log() + noise).argmax(-1, keepdim=True))
            probs.append(chances)
        return torch.cat(found[1:], 1).int(), torch.stack(probs, 1)

    return draft

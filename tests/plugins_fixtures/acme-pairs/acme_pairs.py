"""A logits processor that forbids repeating a pair of tokens of the output, and writes down which tokens it was shown."""

from __future__ import annotations

import torch

from modelrunner import LogitsProcessor, hookimpl
from modelrunner.request_table import Column

MODELRUNNER_API = ">=1.5,<2"

shown: list[tuple[int, tuple[int, ...], int]] = []
"""(tag of the request, its tokens, how many of them are prompt) of each row that asked and sampled, in the order of the steps."""


class Pairs(LogitsProcessor):
    name = "pairs"

    def columns(self, settings):
        return (Column("pairs.tag", torch.int32),)

    def row_values(self, request, arguments):
        return {"pairs.tag": arguments["tag"]}

    def apply(self, logits, batch):
        ids, known, start = (batch.per_row(name).long() for name in ("token_ids", "known", "prompt_len"))
        asking = self.asking(batch)
        self.write_down(ids, known, start, batch.per_row("pairs.tag"), asking & batch.samples)
        place = torch.arange(ids.shape[1], device=ids.device)
        newest = self.last_tokens(batch, 1)
        banned = asking.unsqueeze(1) & (ids.roll(1, 1) == newest) & (place > start.unsqueeze(1)) & (place < known.unsqueeze(1))
        limit = torch.where(banned, -torch.inf, torch.inf)
        return logits.scatter_reduce_(1, torch.where(banned, ids, 0), limit, "amin")

    def write_down(self, ids, known, start, tags, wanted):
        """Waits for the device, which a processor must not; this one is to be looked at."""
        for i in wanted.nonzero()[:, 0].tolist():
            shown.append((int(tags[i]), tuple(ids[i, : int(known[i])].tolist()), int(start[i])))


@hookimpl
def logits_processors(register, model_info):
    processor = Pairs()
    processor.captured = model_info.device.type == "cpu"  # elsewhere a captured step cannot be looked into
    register(processor)

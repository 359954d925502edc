"""Logits processors: changing the logits that a token is drawn from, for the requests that ask.

A plugin answers the hook `logits_processors` by registering objects of a `LogitsProcessor` subclass. A request chooses by
`SamplingParams.logits_processors`, whose keys are their names and whose values are their arguments.

    class Only(LogitsProcessor):
        name = "every_other"

        def apply(self, logits, batch):
            logits[:, 1::2].masked_fill_(self.asking(batch)[:, None], -torch.inf)
            return logits

A step in which no row asks for a processor does not call it. Dimension letters: N rows of the step, R rows of the request table, L tokens
of the longest request, V vocabulary size. H and D as in `model_state`: H runs on the host, D enqueues device work and never synchronises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from modelrunner.request_table import Column

if TYPE_CHECKING:
    from modelrunner.batch import Batch
    from modelrunner.request import Request
    from modelrunner.settings import RunnerSettings

NO_TOKEN = -1


class LogitsProcessor:
    """Changes the logits of the requests that ask. One instance per engine; set the attributes in the class or in `__init__`.

    name: by which a request asks. captured: whether `apply` may be recorded in a graph, and replayed with other values at the same
    addresses: it may be unless its Python code decides by something that changes from step to step. Steps with a processor that may not
    are run without graphs.
    drafts: whether rows that ask may have drafts, where a drafter is in use. `apply` is then called once for each place of a row's run,
    with the column `known` counting the drafts before that place as known tokens. So what it does to a row must follow from the row's
    tokens and from columns that it does not change: a state that it carries from step to step would have seen drafts that are rejected.
    Where False, the rows that ask go on one token at a time, and beside them others as they do.
    """

    name: str = ""
    captured: bool = True
    drafts: bool = False

    # ---- requests ------------------------------------------------------------------------------------------------

    def columns(self, settings: RunnerSettings) -> Sequence[Column]:
        """H, at start-up. Request-table columns that this processor owns; see `Batch.per_row`. Names are unique: begin with the own one.

        A row that does not ask holds each column's default. Of a seated column with `on_device` the lines are the processor's to fill, and
        hold what their last owner left: a plain column that is 0 for a new row tells it to begin anew.
        """
        return ()

    def row_values(self, request: Request, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """H, at submission of a request that asks. Values of its own columns; an unnamed one gets its default.

        arguments: what `SamplingParams.logits_processors` gives this processor. Raise ValueError, saying what is accepted, for wrong ones:
        the request is then refused with a RequestError that names the processor. The default takes no arguments.
        """
        if arguments:
            raise ValueError(f"got {', '.join(map(repr, arguments))}; accepted: no arguments")
        return {}

    # ---- the step ------------------------------------------------------------------------------------------------

    def apply(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """D, may be captured. Called in every step in which some row asks, once for all rows.

        logits: [N, V] float32, a copy that may be changed in place; penalties and the edits before them have been made in it. Row i is of
        `batch.rows[i]`. Returns it, or a new tensor of its shape and type. Rows that do not ask must come out as they went in, and an id
        that is -inf must stay so. No row may depend on another.

        batch: of a step with prompts it has the rows, and no tokens. What a row has so far are the first `known` of its `token_ids`, of
        which the first `prompt_len` are its prompt: columns of every request, kept by the device, so that they are the true ones with
        steps in flight too. `batch.samples` [N] says which rows sample in this step; what is made of the others' logits counts for nothing.
        """
        return logits

    # ---- for subclasses --------------------------------------------------------------------------------------------

    def asking(self, batch: Batch) -> torch.Tensor:
        """D. [N] bool: the rows that ask for this processor."""
        return batch.per_row(f"processor.{self.name}") != 0

    def last_tokens(self, batch: Batch, count: int) -> torch.Tensor:
        """D. The newest tokens of each row, prompt and output, newest last: [N, count] int64, -1 where a row has fewer; a padded
        row has none."""
        ids, rows = batch.columns["token_ids"], batch.rows.long()
        places = batch.per_row("known").long().unsqueeze(1) - torch.arange(count, 0, -1, device=rows.device)
        tokens = ids[rows.unsqueeze(1), places.clamp(0, ids.shape[1] - 1)].long()
        return torch.where(places >= 0, tokens, NO_TOKEN)


class RegisterProcessor(Protocol):
    """What the hook `logits_processors` is handed."""

    def __call__(self, processor: LogitsProcessor) -> None:
        """Add a processor; they act in the order in which they are added. Raises PluginError for a name that has an owner, naming both."""

"""The sampler: stages put together, and the choice between the greedy and the drawing tail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from modelrunner.batch import EDITED, MASKED, REWRITTEN, Feature
from modelrunner.request_table import Column
from modelrunner.sampler.allowed import Allowed
from modelrunner.sampler.automata import Automata
from modelrunner.sampler.bad_words import BadWords
from modelrunner.sampler.base import Stage
from modelrunner.sampler.bias import Bias
from modelrunner.sampler.draw import Draw
from modelrunner.sampler.edits import EditStage
from modelrunner.sampler.logprobs import Logprobs
from modelrunner.sampler.min_p import MinP
from modelrunner.sampler.min_tokens import MinTokens
from modelrunner.sampler.penalties import Penalties
from modelrunner.sampler.stop_ids import StopIds
from modelrunner.sampler.temperature import Temperature
from modelrunner.sampler.top_k import TopK
from modelrunner.sampler.top_p import TopP

if TYPE_CHECKING:
    from modelrunner.automaton_arena import AutomatonArena
    from modelrunner.batch import Batch
    from modelrunner.ops import Ops
    from modelrunner.request import Request, SamplingParams
    from modelrunner.settings import RunnerSettings

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Note = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
EDITED_LINES = 256  # of logits that are edited at a time: the copy is float32, 155 MB for a vocabulary of 151,936


def default_stages(*processors: Stage, arena: AutomatonArena | None = None) -> tuple[Stage, ...]:
    """Every built-in stage, in the order in which they act. processors: stages with an `edit` of their own; they come after penalties.
    arena: for structured output by automata, None for none."""
    automata = () if arena is None else (Automata(arena),)
    edits = (Allowed(), *automata, Bias(), MinTokens(), BadWords(), Penalties())
    return (*edits, *processors, Temperature(), MinP(), TopK(), TopP(), Draw(), StopIds(), Logprobs())


class Sampler:
    """Composes stages. The host side asks every stage; the device side runs `edit_logits` if a row wants it, then stages with an `edit` of
    their own that a row wants, then one `greedy` or one `sample` operation over the step's rows, `verify_drafts` over those with drafts.

    processed: features of the stages with an `edit`. captured: those of them that a captured step may have. undrafted: features with which
    a row must not have drafts.
    """

    def __init__(self, ops: Ops, stages: Sequence[Stage], typical: tuple[float, float] | None = None) -> None:
        """typical: threshold and factor of typical acceptance (see `verify_drafts`), None for exact acceptance.

        Raises ValueError if two stages supply the same argument of `sample` or of `edit_logits`.
        """
        self.ops = ops
        self.stages = tuple(stages)
        self.typical = typical
        self._inputs: dict[str, Feature] = {}
        self._edits: dict[str, EditStage | None] = dict.fromkeys(("allowed", "bias", "stops", "bad_words", "penalties", "automata"))
        for stage in self.stages:
            taken = [name for name in stage.inputs if name in self._inputs]
            if isinstance(stage, EditStage):
                taken += [stage.argument] if self._edits[stage.argument] is not None else []
                self._edits[stage.argument] = stage
            if taken:
                raise ValueError(f"two sampler stages supply {taken[0]!r}; each argument of an operation has one owner")
            self._inputs.update(dict.fromkeys(stage.inputs, stage.feature))
        self._processing = [stage for stage in self.stages if stage.acts]
        self._checking = [stage for stage in self.stages if type(stage).check is not Stage.check]
        self._valued = [stage for stage in self.stages if type(stage).row_values is not Stage.row_values]
        self.processed = Feature.GREEDY
        self.captured = Feature.GREEDY
        for stage in self._processing:
            self.processed |= stage.feature
            self.captured |= Feature(int(stage.feature) & ~int(stage.uncaptured))
        self.undrafted = Feature.GREEDY
        for stage in self.stages:
            self.undrafted |= stage.undrafted

    def columns(self, settings: RunnerSettings, vocab_size: int) -> tuple[Column, ...]:
        """H. Request-table columns of all stages."""
        return tuple(column for stage in self.stages for column in stage.columns(settings, vocab_size))

    def check(self, request: Request, settings: RunnerSettings) -> None:
        """H, at submission. Raises RequestError for a request that a stage cannot hold."""
        for stage in self._checking:
            stage.check(request, settings)

    def row_values(self, request: Request) -> dict[str, Any]:
        """H, at submission. Column values of the request."""
        values: dict[str, Any] = {}
        for stage in self._valued:
            values.update(stage.row_values(request))
        return values

    def features(self, params: SamplingParams) -> Feature:
        """H, at submission. Union of what the stages need of a step's tail."""
        found = 0
        for stage in self.stages:
            found |= int(stage.features(params))
        return Feature(found)

    @property
    def _logprobs(self) -> Logprobs | None:
        return next((stage for stage in self.stages if isinstance(stage, Logprobs)), None)

    @property
    def num_logprobs(self) -> int:
        """The likeliest tokens in a record of log-probs; known once the columns are."""
        return self._logprobs.recorded if self._logprobs else 0

    def sample(self, logits: torch.Tensor, batch: Batch, note: Note | None = None, draft_probs: torch.Tensor | None = None) -> Result:
        """D, may be captured. Choose tokens for every row; `batch.features` says what the rows ask for.

        logits: [N, V] in the model's dtype; those of tokens that a mask leaves out may be overwritten. A row's tokens depend on its own
        logits and columns only. In a step with drafts N counts lines, S = 1 + k of each row (see `Batch`), and line j is edited with the
        drafts ahead of it as known tokens.
        note: told the logits that log-probs are made of, and the tokens, as (first line, logits [n, V], tokens [n] int64, rows of the lines
        [n] int32). draft_probs: [N / S, k, V] float32, what the drafts were drawn from, if they were.
        Returns tokens [N / S, S] int64, num_tokens [N / S] int32 (how many of them count: 0 where the row does not sample or its logits do
        not allow it), ok [N / S] bool.
        """
        slots = 1 + batch.num_draft
        processed = note is not None and self._logprobs is not None and self._logprobs.processed
        in_place = note is None or processed  # nobody asks for the given logits afterwards
        copied = batch.features & (REWRITTEN | self.processed) or (batch.features & MASKED and not in_place)
        at_once = max(1, EDITED_LINES // slots) * slots
        if not (copied or processed) or batch.num_rows <= at_once:
            return self._sample(logits, batch, 0, note, processed, draft_probs)
        parts = []
        for start in range(0, batch.num_rows, at_once):
            cut = slice(start, min(start + at_once, batch.num_rows))
            probs = None if draft_probs is None else draft_probs[cut.start // slots : cut.stop // slots]
            parts.append(self._sample(logits[cut], rows_of(batch, cut), start, note, processed, probs))
        tokens, counts, ok = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
        return tokens, counts, ok

    def _sample(
        self, given: torch.Tensor, batch: Batch, start: int, note: Note | None, processed: bool, draft_probs: torch.Tensor | None
    ) -> Result:
        logits = self._changed(given, batch, in_place=note is None or processed)
        tokens, counts, ok = self._choose(logits, batch, draft_probs)
        if note is not None:
            note(start, self._processed(logits, batch) if processed else given, tokens.flatten(), batch.rows)
        return tokens, counts, ok

    def _changed(self, given: torch.Tensor, batch: Batch, in_place: bool) -> torch.Tensor:
        """The logits after every stage that edits them. in_place: masks may be laid on the given ones."""
        features, logits = batch.features, given
        if in_place and features & MASKED and not features & REWRITTEN and given.stride(1) == 1:
            masks = [self._given(name, batch) for name in ("allowed", "automata")]
            if any(masks):
                self.ops.mask_logits(given, batch.rows, *masks)
        elif features & EDITED:
            logits = self._edit(given, batch)
        automata = self._edits["automata"]
        if batch.num_draft and isinstance(automata, Automata) and automata.feature & features:
            self.ops.mask_logits(logits, None, None, automata.by_line(self.ops, batch))
        acting = [stage for stage in self._processing if stage.feature == Feature.GREEDY or stage.feature & features]
        if acting:
            logits = logits.to(torch.float32, copy=logits is given)
        if acting and batch.num_draft:
            return self._changed_by_place(acting, logits, batch)
        for stage in acting:
            logits = stage.edit(logits, batch)
        return logits

    def _changed_by_place(self, stages: Sequence[Stage], logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Every place of the rows' runs by itself. logits: a copy, changed. Rows of undrafted features have a first place only."""
        slots, known = 1 + batch.num_draft, batch.columns["known"]
        drafted = Feature(int(batch.features) & ~int(self.undrafted))
        for j in range(slots):
            now, own = rows_of(batch, slice(j, batch.num_rows, slots)), logits[j::slots].contiguous()
            if j:
                now = replace(now, features=drafted, columns={**batch.columns, "known": known + j})
            for stage in stages:
                if stage.feature == Feature.GREEDY or stage.feature & now.features:
                    own = stage.edit(own, now)
            logits[j::slots] = own
        return logits

    def _choose(self, logits: torch.Tensor, batch: Batch, draft_probs: torch.Tensor | None) -> Result:
        drawn, places = bool(batch.features & Feature.PLAIN), (batch.rows, batch.samples, batch.computed, batch.query_len)
        columns = {name: self._column(name, feature, batch) for name, feature in self._inputs.items()}
        if batch.num_draft:
            more = {"draft_probs": draft_probs, "typical": self.typical}
            if not drawn:
                columns, more = columns | dict.fromkeys(("temperature", "top_k", "top_p", "min_p")), {}
            verified: Result = self.ops.verify_drafts(logits, *places, batch.columns["token_ids"], 1 + batch.num_draft, **columns, **more)
            return verified
        found = self.ops.sample_rows(logits, *places, **columns) if drawn else self.ops.greedy_rows(logits, batch.samples)
        tokens, counts, ok = found
        return tokens.unsqueeze(1), counts, ok

    def _processed(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """What the tokens of these lines are drawn from."""
        if not batch.features & Feature.PLAIN:
            return logits
        columns = [self._column(name, self._inputs[name], batch) for name in ("temperature", "top_k", "top_p", "min_p")]
        mine = (None if column is None else column.index_select(0, batch.rows) for column in columns)
        found: torch.Tensor = self.ops.processed_logits(logits, *mine)
        return found

    def _edit(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """A copy of the logits with what the built-in stages change."""
        columns, slots = batch.columns, 1 + batch.num_draft
        known, prompt_len, token_ids = columns["known"], columns["prompt_len"], columns["token_ids"]
        if Feature.PENALISED & batch.features and self._edits["penalties"] is not None:
            seats, counted, counts = columns["token_counts"], columns["counted"], columns["token_counts.seats"]
            rows, samples = (tensor[::slots].contiguous() for tensor in (batch.rows, batch.samples))
            self.ops.count_tokens(rows, samples, seats, counted, prompt_len, known, token_ids, counts)
        given = [self._given(name, batch) for name in self._edits]
        edited: torch.Tensor = self.ops.edit_logits(logits, batch.rows, known, prompt_len, token_ids, *given, batch.ahead)
        return edited

    def _given(self, name: str, batch: Batch) -> tuple[torch.Tensor, ...] | None:
        """An argument of `edit_logits`; None if no row asks for its stage, or if it differs from line to line of a row."""
        stage = self._edits[name]
        if batch.num_draft and isinstance(stage, Automata):
            return None
        return stage.given(batch.columns) if stage is not None and stage.feature & batch.features else None

    def loading(self) -> list[Callable[[], None]]:
        """H, at start-up. What stages launch beside steps, to be got ready."""
        return [stage.loading() for stage in self.stages if isinstance(stage, Automata)]

    def ends(self, batch: Batch, tokens: torch.Tensor, num_tokens: torch.Tensor, ok: torch.Tensor) -> torch.Tensor | None:
        """D, captured. After how many of its sampled tokens [N, 1 + k] a row's output is complete by its automaton, [N] int32, 0 for not
        yet; the rows' states go on by them. None if no row has one."""
        stage = self._edits["automata"]
        if not isinstance(stage, Automata) or not stage.feature & batch.features:
            return None
        return stage.walk(self.ops, batch, tokens, num_tokens, ok)

    def _column(self, name: str, feature: Feature, batch: Batch) -> torch.Tensor | None:
        """The column `name`; None if its stage is not asked for."""
        return batch.columns[name] if feature == Feature.GREEDY or feature & batch.features else None


def rows_of(batch: Batch, cut: slice) -> Batch:
    """The batch as a sampler stage sees it, of some of its rows; in a step with drafts, of some of its lines."""
    names = ["rows", "query_len", "computed", "samples", *(["ahead"] if batch.num_draft else ["seq_len", "num_accepted", "sample_index"])]
    cuts = {name: getattr(batch, name)[cut].contiguous() for name in names}
    return replace(batch, num_rows=len(cuts["rows"]), **cuts)

"""A scheduler with a simulated device whose tokens depend on every cached token that a step may read.

The device runs late, in stream order; freed pages are poisoned; so a page freed too early, a lost patch or a wrong length changes tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from modelrunner.batch import Drain, Finish, Outcome, Plan, record_words
from modelrunner.draft_policy import NO_DRAFTS, DraftPolicy
from modelrunner.model_state import FullAttention
from modelrunner.page_pool import GroupLayout, PagePool
from modelrunner.request import Request, SamplingParams
from modelrunner.request_table import Column, RequestTable
from modelrunner.scheduler import Scheduler
from modelrunner.step_books import Committed

VOCAB = 50
SHAPE: dict[str, Any] = {"layers": (0,), "num_heads": 1, "num_kv_heads": 1, "head_dim": 1, "scale": 1.0}
FULL = FullAttention("full", **SHAPE)
POISON = -7


def chain(tokens: list[int]) -> list[int]:
    """A number for each token that depends on all tokens up to it."""
    state, out = 1, []
    for token in tokens:
        state = (state * 1_000_003 + token + 12_345) % 2_147_483_629
        out.append(state)
    return out


def reference(prompt: list[int], limit: int, stop: tuple[int, ...] = ()) -> list[int]:
    """Output of a request, computed alone."""
    tokens = list(prompt)
    while len(tokens) < limit and (len(tokens) == len(prompt) or tokens[-1] not in stop):
        tokens.append(chain(tokens)[-1] % VOCAB)
    return tokens[len(prompt) :]


def request(name: str, prompt: list[int], max_tokens: int, **fields: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=fields.pop("stop", ()))
    return Request(name, prompt, params, arrival=0.0, limit=len(prompt) + max_tokens, seed=1, **{"num_draft": 99} | fields)


@dataclass
class World:
    """A scheduler, a device that lags behind, and the loop between them."""

    groups: list[GroupLayout] = field(default_factory=lambda: [GroupLayout(FULL, 4)])
    pages: int = 40
    max_rows: int = 4
    max_model_len: int = 64
    depth: int = 2
    budget: int = 16
    seats: int = 4
    options: Mapping[str, Any] = field(default_factory=dict)
    on_admit: Callable[[int, Request, bool], Mapping[str, Any]] = lambda row, request, resumed: {}
    checks: bool = True  # after each plan and commit, which settles what the steady path kept to itself
    drafts: int = 0  # proposed for a row after each of its tokens; about three of four are right
    off_above_rows: int | None = None

    def __post_init__(self) -> None:
        names = ("known", "computed", "finished", "limit", "generation", "num_accepted")
        columns = [Column("token_ids", torch.int32, self.max_model_len), *(Column(n, torch.int32) for n in names)]
        columns += [Column(f"pages.{g.name}", torch.int32, max(2, g.pages_for(self.max_model_len))) for g in self.groups]
        columns.append(Column("stop_ids", torch.int32, 8, -1, seats=self.seats))
        table = RequestTable(columns, self.max_rows, torch.device("cpu"))
        self.arena = table.arena.numpy()
        self.proposed: dict[tuple[int, int], list[int]] = {}  # by row and tenancy, as the device has them
        policy = DraftPolicy(self.drafts, depth=self.depth, off_above_rows=self.off_above_rows) if self.drafts else NO_DRAFTS
        self.table = {name: view.numpy() for name, view in table.columns.items()}
        self.pool = PagePool(self.pages + 1)
        self.pool.record_freed()
        self.scheduler = Scheduler(
            groups=self.groups, pool=self.pool, builder=table.builder,
            row_values=lambda r: {"stop_ids": np.array(r.params.stop_token_ids, np.int32)},
            on_admit=lambda *a: self.on_admit(*a), on_remove=lambda row, r: None,
            max_rows=self.max_rows, max_batched_tokens=self.budget, max_model_len=self.max_model_len,
            seats=table.seats, depth=self.depth, drafting=policy, **self.options,
        )  # fmt: skip
        self.cache = {g.name: np.full((self.pages + 1, g.tokens_per_page), POISON, np.int64) for g in self.groups}
        self.stream: deque[Callable[[], None]] = deque()
        self.tickets: deque[tuple[Plan, list[Any]]] = deque()
        self.finished: list[Request] = []
        self.fail_launch = False
        self.before_launch: Callable[[Plan], None] = lambda plan: None

    # ---- the device ------------------------------------------------------------------------------------------------

    def launch(self, plan: Plan) -> None:
        if self.fail_launch:
            raise OSError("launch failed")
        freed = self.pool.take_freed()
        for ticket, _ in self.tickets:
            for row, generation in zip(ticket.rows, ticket.generations, strict=True):
                clash = plan.generations[plan.rows == row]
                assert not clash.size or clash[0] == generation, "a row got a new tenant while a ticket names it"
        records: list[Any] = []
        self.stream.append(lambda: self.poison(freed))
        self.stream.append(lambda: records.extend(self.run(plan)))
        self.tickets.append((plan, records))

    def poison(self, pages: list[int]) -> None:
        for cache in self.cache.values():
            cache[pages] = POISON

    def run(self, plan: Plan) -> np.ndarray:
        patch, start = plan.patch, 0
        touched = np.concatenate([np.arange(d, d + n) for d, n in zip(patch.dst, patch.length, strict=True)] or [np.empty(0, np.int64)])
        assert len(set(touched.tolist())) == touched.size, "runs of a patch overlap"
        for dst, length in zip(patch.dst.tolist(), patch.length.tolist(), strict=True):
            self.arena[dst : dst + length] = patch.words[start : start + length]
            start += length
        return np.array(
            [self.run_row(*row) for row in zip(plan.rows.tolist(), plan.generations.tolist(), plan.num_query.tolist(), strict=True)]
        )

    def run_row(self, row: int, generation: int, num_query: int) -> list[int]:
        t, width = self.table, 1 + self.drafts
        if t["finished"][row] or t["generation"][row] != generation:
            return [row, generation, 0, 0, 0, *[-1] * width]
        known, computed = int(t["known"][row]), int(t["computed"][row])
        drafts = self.proposed.pop((row, generation), [])[: max(num_query - (known - computed), 0)]
        end = computed + min(num_query, known - computed + len(drafts))
        values = np.array(chain([*t["token_ids"][row, :known].tolist(), *drafts][:end]))
        good = self.attend(row, computed, end, values)
        t["computed"][row] = end
        if end < known:
            return [row, generation, 0, 0, 0, *[-1] * width]
        tokens, code = self.chosen(row, known, [int(value) % VOCAB if good else VOCAB for value in values[known - 1 :]], drafts)
        t["token_ids"][row, known : known + len(tokens)] = tokens
        t["known"][row] = known + len(tokens)
        t["computed"][row] = known + len(tokens) - 1
        t["finished"][row] = code
        if not code:
            self.propose(row, generation)
        return [row, generation, len(tokens), int(code), len(drafts), *tokens, *[-1] * (width - len(tokens))]

    def attend(self, row: int, computed: int, end: int, values: np.ndarray) -> bool:
        """Write the values of the row's query tokens, read all that they see. Returns whether that was as it must be."""
        good = True
        for group in self.groups:
            cache, pages, size = self.cache[group.name], self.table[f"pages.{group.name}"][row], group.tokens_per_page
            at = np.arange(computed, end)
            assert (pages[at // size] > 0).all(), "a token without a page"
            cache[pages[at // size], at % size] = values[computed:end]
            read = np.arange(int(group.group.needed_from(np.array([computed]))[0]), end)
            good &= np.array_equal(cache[pages[read // size], read % size], values[read])
        return good

    def chosen(self, row: int, known: int, targets: list[int], drafts: list[int]) -> tuple[list[int], Finish]:
        """Tokens that the row gets: one more than drafts are right, but no more than stop ids and its limit let it have."""
        t, tokens = self.table, []
        for target, draft in zip(targets, [*drafts, -1], strict=True):
            tokens.append(target)
            if target in t["stop_ids.seats"][t["stop_ids"][row]] and target >= 0:
                return tokens, Finish.STOP
            if known + len(tokens) == t["limit"][row]:
                return tokens, Finish.LENGTH
            if draft != target:
                break
        return tokens, Finish.NONE

    def propose(self, row: int, generation: int) -> None:
        t = self.table
        known, limit = int(t["known"][row]), int(t["limit"][row])
        tokens = t["token_ids"][row, :known].tolist()
        for _ in range(min(self.drafts, limit - 1 - known)):
            right = chain(tokens)[-1]
            tokens.append(right % VOCAB if right % 4 else (right + 1) % VOCAB)
        self.proposed[row, generation] = tokens[known:]

    # ---- the loop --------------------------------------------------------------------------------------------------

    def collect(self, keep: int) -> None:
        while len(self.tickets) > keep:
            plan, records = self.tickets.popleft()
            while not records:
                self.stream.popleft()()
            self.commit(Outcome(plan, np.array(records, np.int32).reshape(-1, record_words(self.drafts))))

    def check(self) -> None:
        if self.checks:
            self.scheduler.check()

    def commit(self, outcome: Outcome) -> None:
        committed: Committed = self.scheduler.commit(outcome)
        self.finished += committed.finished
        self.check()

    def step(self) -> Plan | None:
        plan = self.scheduler.plan()
        if isinstance(plan, Drain):
            self.check()
            self.collect(0)
            plan = self.scheduler.plan(drained=True)
        assert not isinstance(plan, Drain)
        self.check()
        if plan is not None:
            assert plan.num_tokens <= self.budget
            assert (plan.num_query[: plan.num_decode] <= 1 + plan.num_draft).all()
            self.before_launch(plan)
            try:
                self.launch(plan)
            except OSError:
                self.scheduler.rollback(plan)
                self.check()
        self.collect(self.depth - 1 if plan is not None else max(len(self.tickets) - 1, 0))
        return plan

    def finish(self, most: int = 2000) -> None:
        for _ in range(most):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "requests never end"
        self.scheduler.check()
        assert self.pool.available == self.pool.capacity


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng([length, seed]).integers(0, VOCAB, length).tolist()


def expect(r: Request) -> None:
    assert r.output_token_ids == reference(r.prompt_token_ids, r.limit, r.params.stop_token_ids), r.id

"""Log-probs on the host, as steps are collected: kept with the requests that ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from modelrunner.batch import Feature, Finish, Float32Array, Int32Array, LogprobRecords, Outcome, Record

if TYPE_CHECKING:
    from modelrunner.logprobs import RequestLogprobs
    from modelrunner.request import Request
    from modelrunner.rows import HostRows


def keep_logprobs(outcome: Outcome, rows: HostRows, request_at: Callable[[int], Request | None]) -> None:
    """Hand an outcome's log-probs to their requests, before it is committed. Costs per row that asks."""
    found, plan, records = outcome.logprobs, outcome.plan, outcome.records
    assert found is not None, "no row of this step asks for log-probs"
    live = rows.active[plan.rows] & (rows.generation[plan.rows] == plan.generations)
    asks = live & (rows.features[plan.rows] & Feature.LOGPROBS != 0)
    sampled = asks & (records[:, Record.NUM_TOKENS] > 0) & (records[:, Record.FINISH] != Finish.ERROR)
    slots = 1 + plan.num_draft
    for at in np.flatnonzero(sampled).tolist():
        held, line = _held(request_at(int(plan.rows[at]))), found.row_lines.get(at)
        kept = found.rows[at * slots : at * slots + int(records[at, Record.NUM_TOKENS])]
        held.records.extend(kept if line is None else [longer(kept[0], line, held.num_top)])
    first = 0
    for at, start, stop, _ in found.spans:
        if live[at]:
            _keep_prompt(_held(request_at(int(plan.rows[at]))), found, first, stop - start, int(rows.computed[plan.rows[at]]))
        first += stop - start


def _keep_prompt(held: RequestLogprobs, found: LogprobRecords, first: int, count: int, position: int) -> None:
    """Take the records from `first` on, of positions from `position` on, but for those that are there already or that no prompt token
    follows."""
    for number in range(len(held.prompt) - position, min(count, held.prompt_length - 1 - position)):
        record, line = found.positions[first + number], found.position_lines.get(first + number)
        held.prompt.append(record if line is None else longer(record, line, held.num_prompt_top))


def _held(request: Request | None) -> RequestLogprobs:
    assert request is not None, "a row has no request"
    assert request.logprobs is not None, f"request {request.id!r} asks for no log-probs"
    return request.logprobs


def longer(record: Int32Array, line: Float32Array, num_top: int | None) -> Int32Array:
    """A record of the likeliest `num_top` tokens, from a shorter one and the log-probs of the whole vocabulary."""
    assert num_top is not None
    order = np.argsort(-line, kind="stable")[:num_top]
    own = record[1]
    ids, values = np.concatenate([[own], order]).astype(np.int32), np.concatenate([[line[own]], line[order]]).astype(np.float32)
    return np.concatenate([record[:1], ids, values.view(np.int32)])

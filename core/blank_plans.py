"""Plans of dead rows, which go through all operations and change nothing: for trying, building, measuring and capturing at start-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from modelrunner.batch import EDITED, Feature, Plan
from modelrunner.page_pool import GroupLayout
from modelrunner.request_table import RequestTable


def blank_row(table: RequestTable, num_groups: int) -> Plan:
    """A step of the scratch row, whose columns get their defaults."""
    one = np.ones(1, np.int32)
    blank = table.builder()
    blank.row(table.max_rows, {})
    return Plan(
        step=-1,
        rows=one * table.max_rows,
        generations=-one,
        num_query=one,
        patch=blank.build(),
        num_decode=1,
        num_tokens=1,
        max_query=1,
        max_seq_len=1,
        table_pages=(1,) * num_groups,
    )


def prompt(blank: Plan, layouts: Sequence[GroupLayout], num_tokens: int) -> Plan:
    """The `blank` row with so many query tokens."""
    return replace(
        blank,
        num_query=blank.num_query * num_tokens,
        num_decode=0,
        num_tokens=num_tokens,
        max_query=num_tokens,
        max_seq_len=num_tokens,
        table_pages=tuple(layout.pages_for(num_tokens) for layout in layouts),
    )


def crowd(blank: Plan, layouts: Sequence[GroupLayout], num_rows: int, most: int, longest: int) -> Plan:
    """So many rows, half of which decode, and the others have prompts of one length, `longest` or as is room for in `most` tokens."""
    num_decode = num_rows // 2
    longest = min(longest, (most - num_decode) // (num_rows - num_decode))
    num_query = np.ones(num_rows, np.int32)
    num_query[num_decode:] = longest
    return replace(
        prompt(blank, layouts, longest),
        rows=np.repeat(blank.rows, num_rows),
        generations=np.repeat(blank.generations, num_rows),
        num_query=num_query,
        num_decode=num_decode,
        num_tokens=int(num_query.sum()),
    )


def drafting(blank: Plan, layouts: Sequence[GroupLayout], num_draft: int) -> Plan:
    """The `blank` row with so many drafts, in the step and after it."""
    slots = 1 + num_draft
    return replace(prompt(blank, layouts, slots), num_decode=1, num_draft=num_draft, num_next=num_draft)


def large(blank: Plan, layouts: Sequence[GroupLayout], num_tokens: int, max_rows: int, max_model_len: int, more: Feature) -> Plan:
    """So many tokens in as many rows as there can be: one in each, and the rest in the first; with the tail that needs most
    memory, and the features `more`."""
    rows = min(max_rows, num_tokens)
    num_query = np.ones(rows, np.int32)
    num_query[0] += num_tokens - rows
    return replace(
        blank,
        rows=np.repeat(blank.rows, rows),
        generations=np.repeat(blank.generations, rows),
        num_query=num_query,
        num_decode=0,
        num_tokens=num_tokens,
        max_query=int(num_query[0]),
        max_seq_len=max_model_len,
        table_pages=tuple(layout.pages_for(max_model_len) for layout in layouts),
        features=Feature.PLAIN | Feature.FILTERED | EDITED | Feature.LOGPROBS | Feature.PROMPT_LOGPROBS | more,
        row_features=np.where(np.arange(rows) == 0, int(Feature.PROMPT_LOGPROBS), 0),
    )

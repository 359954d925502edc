"""Launchers of the sampling kernels: `greedy`, `sample`, and the same with a row's values taken from the request table's columns."""

from __future__ import annotations

import torch
import triton

from modelrunner.kernels.pdl import pdl
from modelrunner.kernels.sampling import reference
from modelrunner.kernels.sampling import scan as scanning
from modelrunner.kernels.sampling.scan import GROUP, Columns, Scan, scan
from modelrunner.kernels.sampling.settle import _confirm, _settle, _weigh

TILE = 64  # bytes: one logit each of the groups looked at at a time
LIST = 1024  # tokens on a row's short list, at most
WIDE = 2048  # tokens of a row at a time where all of it is read again
MANY = 32  # groups at a time where one program weighs all of a row
WARPS = 16, 8  # of a program that settles a row: without lists, and with
GREEDY = (None,) * 9  # in place of rows, temperature, filters and what the noise depends on

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def places_of(count: int) -> int:
    """A power of two for `count` elements; the interpreter wants more than one."""
    return max(16, int(triton.next_power_of_2(count)))


def _run(logits: torch.Tensor, columns: Columns | None, samples: torch.Tensor | None) -> Result:
    """columns: None if all rows are greedy. samples: [n] bool, or None. Returns tokens, ok and, with `samples`, how many tokens count."""
    n = logits.shape[0]
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    ok = torch.empty(n, dtype=torch.bool, device=logits.device)
    counts = None if samples is None else torch.empty(n, dtype=torch.int32, device=logits.device)
    if n == 0:
        return tokens, ok, counts
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    found = scan(logits, columns)
    state = tries = None
    if columns is not None and columns.filtered:
        state = torch.empty(n, 2, device=logits.device)
        tries = torch.empty(n, reference.TRIES, dtype=torch.int32, device=logits.device)
    _launch_settle(logits, columns, samples, found, (tokens, counts, ok, state, tries))
    if state is not None and tries is not None:
        assert columns is not None
        _confirmed(logits, columns, found, tokens, state, tries)
    return tokens, ok, counts


def _launch_settle(
    logits: torch.Tensor, columns: Columns | None, samples: torch.Tensor | None, found: Scan, out: tuple[torch.Tensor | None, ...]
) -> None:
    n, vocab = logits.shape
    groups = found.peaks.shape[1]
    places, inputs, scratch = places_of(groups), GREEDY, None
    if columns is not None:
        filters = columns.top_k, columns.top_p, columns.min_p
        inputs = (columns.rows, columns.temperature, *filters, *columns.draw)  # type: ignore[assignment]
        if columns.top_k is not None:
            scratch = torch.empty(n, places + 2 * LIST, dtype=torch.int32, device=logits.device)
    constants = (GROUP, places, TILE // logits.element_size(), LIST, min(WIDE, places_of(vocab)))
    head = (logits, logits.stride(0), vocab, *inputs, samples, found.peaks, found.masses, scratch, groups, *out)
    _settle[(n,)](*head, *constants, num_warps=WARPS[scratch is not None], **pdl(logits))


def parts_of(n: int, tiles: int) -> tuple[int, int]:
    """How many programs weigh a row, and how many tiles each takes."""
    steps = 1
    while steps < 8 and n * tiles >= 2048 * steps:
        steps *= 2
    return -(-tiles // steps), steps


def _confirmed(logits: torch.Tensor, columns: Columns, found: Scan, tokens: torch.Tensor, state: torch.Tensor, tries: torch.Tensor) -> None:
    n, vocab = logits.shape
    groups = found.peaks.shape[1]
    parts, steps = parts_of(n, triton.cdiv(groups, scanning.TILE))
    weights = torch.empty(n, 1 + reference.TRIES, groups, device=logits.device)
    head = (logits, logits.stride(0), vocab, columns.rows, columns.temperature)
    weighed = (found.peaks, groups, state, tries, weights)
    _weigh[(n * parts,)](*head, *weighed, parts, steps, GROUP, scanning.TILE, num_warps=4, **pdl(logits))
    constants = (GROUP, places_of(groups), MANY)
    _confirm[(n,)](*head, columns.top_p, *columns.draw, *weighed, tokens, *constants, num_warps=WARPS[0], **pdl(logits))


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.greedy`: two launches, one read of the logits."""
    return _run(logits, None, None)[:2]


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seed: torch.Tensor,
    position: torch.Tensor,
    choice: torch.Tensor,
    uniforms: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.sample`: two launches, four with filters. One read of the logits; one more for rows with top-p but no small top-k,
    and for those whose first token other filters drop."""
    if uniforms is not None:
        return reference.sample(logits, temperature, top_k, top_p, min_p, seed, position, choice, uniforms)
    given = (temperature, top_k, top_p, min_p, seed, choice, position)
    return _run(logits, Columns(*(None if t is None else t.contiguous() for t in given)), None)[:2]  # type: ignore[arg-type]


def greedy_rows(logits: torch.Tensor, samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the fusion `greedy_rows`: the launches of `greedy`."""
    tokens, ok, counts = _run(logits, None, samples)
    assert counts is not None
    return tokens, counts, ok


def sample_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    samples: torch.Tensor,
    computed: torch.Tensor,
    query_len: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seed: torch.Tensor,
    choice: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the fusion `sample_rows`: the launches of `sample`."""
    tokens, ok, counts = _run(logits, Columns(temperature, top_k, top_p, min_p, seed, choice, computed, query_len, rows), samples)
    assert counts is not None
    return tokens, counts, ok

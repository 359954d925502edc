"""Decode rows dealt out to programs: every page of every head once, as many for each program, and parts that find each other."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import pytest
import torch
from triton_world import DEVICE

from modelrunner.kernels.attention import ring_rows
from modelrunner.kernels.attention.deal import CUT_PAGES, FIRST_PAGES, LEAST_PAGES, DealtRows, deal_rows

PAGE = 16


class Part(NamedTuple):
    """Of a unit: its pages [first, end), what its border says of the unit's parts, and where its sums go (-1: it is the whole unit)."""

    first: int
    end: int
    first_program: int
    parts: int
    slot: int


def parts_of(program: int, dealt: DealtRows, pages: list[int]) -> list[tuple[int, Part]]:
    """What the kernel makes of two borders: units and parts in its order."""
    numbers = dealt.pieces[program].tolist()
    (unit, page, *own), (end_unit, end_page, *others) = numbers[:4], numbers[4:8]
    cut = end_page > (page if unit == end_unit else 0)
    found = []
    for n in range(end_unit - unit + cut):
        last = n == 0 and cut
        this = end_unit if last else unit + n - cut
        first, end = page if this == unit else 0, end_page if last else pages[this % len(pages)]
        whole = first == 0 and not last
        found.append((this, Part(first, end, *((program, 1) if whole else others if last else own), -1 if whole else 2 * program + last)))
    return found


@pytest.mark.parametrize("programs", [1, 3, 132, 264])
@pytest.mark.parametrize(
    "lengths",
    [[1], [0], [17], [300, 1, 16, 0, 64], [5000], [40] * 33, [1, 4000, 1, 0, 700, 33], list(range(1, 101)), [900] * 32, [2300] * 49],
    ids=lambda x: f"{len(x)}",
)
@pytest.mark.parametrize("num_kv", [1, 8])
def test_every_page_is_dealt_once(lengths: list[int], programs: int, num_kv: int) -> None:
    seq_len = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    columns = max(max(lengths) // PAGE + 1, 1)
    table = torch.randint(1, 1000, (len(lengths), columns), dtype=torch.int32, device=DEVICE)
    dealt = deal_rows(programs, num_kv, 2, 128, PAGE, table, (seq_len > 0).int(), seq_len)
    pages = [max(-(-(n - 1) // PAGE), 1) for n in lengths]
    units: dict[int, list[Part]] = defaultdict(list)
    loads = []
    for program in range(programs):
        mine = parts_of(program, dealt, pages)
        loads.append(sum(part.end - part.first for _, part in mine))
        for unit, part in mine:
            units[unit].append(part)
        if mine:  # what it starts with
            row, first = mine[0][0] % len(lengths), mine[0][1].first
            numbers = table[row, first : first + FIRST_PAGES].tolist()
            assert dealt.pieces[program, 8 : 9 + len(numbers)].tolist() == [max(lengths[row] - 1, 0), *numbers]
    assert sorted(units) == list(range(num_kv * len(lengths)))
    for unit, found in units.items():
        parts = sorted(found)
        assert [part.first for part in parts] == [0, *[part.end for part in parts[:-1]]]
        assert parts[-1].end == pages[unit % len(lengths)]
        assert {part.parts for part in parts} == {len(parts)}
        if len(parts) > 1:  # where the last to end looks for them, in their order
            first, last = parts[0].first_program, len(parts) - 1
            assert [part.slot for part in parts] == [2 * (first + i) + (i < last) for i in range(len(parts))]
    total = sum(pages) * num_kv
    active = max(min(programs, total // LEAST_PAGES), 1)
    most = -(-num_kv * len(lengths) // active) * max(pages)
    if most * active <= total + CUT_PAGES * active:  # so that no unit need be shared
        assert all(len(found) == 1 for found in units.values())
        assert max(loads) <= most
    else:
        assert max(loads) <= -(-total // active)
        assert min(loads[:active]) >= total // active
    assert not any(loads[active:])
    assert not dealt.arrivals.any()


def test_how_many_rows_attend_by_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 to 64, or 128 where a key head has four query heads, on a GPU that they were written for; with one program a multiprocessor where
    that is the faster."""
    cache = torch.zeros(2, 16, 2, 8, 128, dtype=torch.bfloat16)
    assert ring_rows.choose_rings(cache, 32, 16, cache.dtype) is None
    monkeypatch.setattr(ring_rows, "RINGS", True)
    monkeypatch.setattr(ring_rows, "hopper", lambda _: True)
    found = [ring_rows.choose_rings(cache, rows, 16, cache.dtype) for rows in (15, 16, 40, 41, 64, 65)]
    assert [config and config.programs for config in found] == [None, 1, 1, 2, 2, None]
    found = [ring_rows.choose_rings(cache, rows, 32, cache.dtype) for rows in (15, 16, 23, 24, 128, 129)]
    assert [config and config.programs for config in found] == [None, 1, 1, 2, 2, None]
    assert ring_rows.choose_rings(cache, 32, 72, cache.dtype) is None
    assert ring_rows.choose_rings(cache.float(), 32, 16, torch.float32) is None

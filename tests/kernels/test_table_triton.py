"""The Triton operations on the request table against their references, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from triton_world import DEVICE, agree, close

from modelrunner.batch import Finish, record_words
from modelrunner.kernels.table import reference
from modelrunner.kernels.table.gpu import OVERRIDES
from modelrunner.plugins.fusions import finish_step as plain_finish_step

REFERENCES: dict[str, Callable[..., Any]] = {
    "apply_patch": reference.apply_patch,
    "update_state": reference.update_state,
    "write_record": reference.write_record,
    "finish_step": plain_finish_step(reference),
}


def on_device(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)


@pytest.mark.parametrize("op", OVERRIDES)
def test_conformance_cases(op: str) -> None:
    agree(op, OVERRIDES, REFERENCES)


@pytest.mark.parametrize(
    ("runs", "longest", "offset"), [(1, 1, 0), (1, 900, 0), (2, 1, 1), (255, 5, 0), (256, 1, 1), (700, 9, 1), (5, 400, 1)]
)
def test_a_patch_of_any_size_in_any_place(runs: int, longest: int, offset: int, rng: np.random.Generator) -> None:
    """Empty runs among the others, and parts that begin at odd words of the staged plan, as they do."""
    length = rng.integers(0, longest + 1, runs).astype(np.int32)
    length[rng.integers(runs)] = longest
    start = np.cumsum(length, dtype=np.int32) - length
    dst = (rng.permutation(runs) * longest + 3).astype(np.int64)
    words = rng.integers(-(2**31), 2**31, int(length.sum())).astype(np.int32)
    parts = (dst.view(np.int32), length, start, words)
    staged = on_device(np.concatenate([np.zeros(2 * offset, np.int32), *parts]))
    views = torch.split(staged[2 * offset :], [part.size for part in parts])
    patch = (views[0].view(torch.int64), *views[1:])
    arenas = [torch.arange(runs * longest + 9, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    OVERRIDES["apply_patch"](arenas[0], *patch)
    reference.apply_patch(arenas[1], *patch)
    close(*arenas, "apply_patch")
    assert (arenas[0] != torch.arange(arenas[0].numel(), device=DEVICE)).sum() >= longest


Tensors = dict[str, torch.Tensor]


def step(rng: np.random.Generator, n: int, draft: int, stop_width: int) -> tuple[Tensors, Tensors]:
    """Arguments of `update_state`, columns apart: live rows, dead ones, and several that share the scratch row."""
    table, live = n + 3, max(n - n // 5, 1)
    known = rng.integers(1, 20, table)
    stop_ids = np.full((4, stop_width), -1)
    stop_ids[:3, : max(stop_width - 2, 1)] = rng.integers(0, 9, (3, max(stop_width - 2, 1)))
    columns = {
        "token_ids": rng.integers(0, 9, (table, 40)),
        "computed": known - 1,
        "known": known,
        "finished": rng.integers(0, 2, table),
        "limit": known + rng.integers(1, 3 + draft, table),
        "num_accepted": rng.integers(0, 3, table),
        "stop_seat": rng.integers(-1, 3, table),
        "stop_ids": stop_ids,
    }
    rows = np.full(n, table - 1)
    rows[:live] = rng.permutation(table - 1)[:live]
    alive = (rng.random(n) < 0.8) & (np.arange(n) < live)
    arguments = {
        "rows": on_device(rows.astype(np.int32)),
        "query_len": on_device(((1 + draft) * alive).astype(np.int32)),
        "samples": on_device(rng.random(n) < 0.7),
        "tokens": on_device(rng.integers(0, 9, (n, 1 + draft))),
        "num_tokens": on_device(rng.integers(0, 2 + draft, n).astype(np.int32)),
        "ok": on_device(rng.random(n) < 0.9),
    }
    return arguments, {name: on_device(value.astype(np.int32)) for name, value in columns.items()}


def finish(function: Callable[..., Any], arguments: Tensors, columns: Tensors, entries: int, at: int) -> Any:
    """All that `finish_step` returns and changes."""
    arguments, columns = ({name: value.clone() for name, value in given.items()} for given in (arguments, columns))
    n, width = arguments["tokens"].shape
    ring = torch.full((entries, n + 3, record_words(width - 1)), -7, dtype=torch.int32, device=DEVICE)
    counter = torch.full((1,), at, dtype=torch.int64, device=DEVICE)
    generations = torch.arange(n, dtype=torch.int32, device=DEVICE)
    drafted = torch.arange(n, dtype=torch.int32, device=DEVICE) % width if width > 1 else None
    codes = function(ring, counter, generations, *arguments.values(), *columns.values(), num_drafted=drafted)
    return codes, ring, counter, arguments, columns


@pytest.mark.parametrize("draft", [0, 4])
@pytest.mark.parametrize(("n", "stop_width"), [(1, 1), (1, 64), (7, 3), (33, 64), (100, 5), (4, 1500)])
def test_finish_step(n: int, stop_width: int, draft: int, rng: np.random.Generator) -> None:
    """One program and many; the counter is past 2^32, and every entry of the ring has its turn."""
    seen = set()
    for at in (2**33, 2**33 + 1, 2**33 + 2):
        given = step(rng, n, draft, stop_width)
        got, want = (finish(f, *given, 3, at) for f in (OVERRIDES["finish_step"], REFERENCES["finish_step"]))
        close(got, want, "update_state")
        assert got[2].item() == at + 1
        seen |= set(got[0].tolist())
    assert n < 100 or seen == set(Finish), "the case shows every way to finish"


@pytest.mark.parametrize("draft", [0, 4])
def test_all_tokens_when_none_are_counted(draft: int, rng: np.random.Generator) -> None:
    arguments, columns = step(rng, 40, draft, 3)
    counts = torch.full_like(arguments["num_tokens"], 1 + draft)
    want = finish(OVERRIDES["finish_step"], arguments | {"num_tokens": counts}, columns, 2, 5)
    for function in (OVERRIDES["finish_step"], REFERENCES["finish_step"]):
        ring, counter = torch.full_like(want[1], -7), torch.full_like(want[2], 5)
        own = {name: value.clone() for name, value in columns.items()}
        generations = torch.arange(40, dtype=torch.int32, device=DEVICE)
        drafted = torch.arange(40, dtype=torch.int32, device=DEVICE) % (1 + draft) if draft else None
        values = (*(arguments | {"num_tokens": None}).values(), *own.values())
        codes = function(ring, counter, generations, *values, num_drafted=drafted)
        close((codes, ring, counter, own), (*want[:3], want[4]), "update_state")


def test_strided_tokens(rng: np.random.Generator) -> None:
    """Tokens that are a view of something wider, and such as lie by columns."""
    arguments, columns = step(rng, 9, 2, 4)
    tokens = arguments["tokens"]
    wide = torch.cat((tokens, tokens + 1), 1)[:, :3]
    turned = tokens.t().contiguous().t()
    want = finish(REFERENCES["finish_step"], arguments, columns, 2, 5)
    for view in (wide, turned):
        assert not view.is_contiguous()
        ring = torch.full((2, 12, record_words(2)), -7, dtype=torch.int32, device=DEVICE)
        counter = torch.full((1,), 5, dtype=torch.int64, device=DEVICE)
        own, kept = ({name: value.clone() for name, value in given.items()} for given in (arguments, columns))
        own["tokens"] = view
        generations = torch.arange(9, dtype=torch.int32, device=DEVICE)
        drafted = torch.arange(9, dtype=torch.int32, device=DEVICE) % 3
        codes = OVERRIDES["finish_step"](ring, counter, generations, *own.values(), *kept.values(), num_drafted=drafted)
        close((codes, ring, counter, kept), (*want[:3], want[4]), "update_state")

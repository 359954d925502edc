"""Checks and times the verification of drafts on a GPU: `python tests/gpu/bench_verification.py [--dry]`.

Times are of CUDA graphs with several calls over different logits, in microseconds a call, beside one read of the same logits (their
largest, by torch). Drafts are what the rows draw, of which a share is changed. --dry: in Triton's interpreter, with small sizes and no
times.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
from bench_sampling import DEVICE, VOCAB, columns, logits_of, microseconds  # noqa: E402

from modelrunner.kernels.logits import gpu as logits_gpu  # noqa: E402
from modelrunner.kernels.logits import reference as logits_reference  # noqa: E402
from modelrunner.kernels.sampling.gpu import OVERRIDES as SAMPLING  # noqa: E402
from modelrunner.kernels.table.gpu import OVERRIDES as TABLE  # noqa: E402
from modelrunner.kernels.verification import reference  # noqa: E402
from modelrunner.kernels.verification.gpu import OVERRIDES  # noqa: E402

ROWS = 3 if DRY else 64
LONGEST = 64
DRAFTS = (1, 3) if DRY else (1, 3, 5)
KINDS: dict[str, tuple[int | None, float | None] | None] = {
    "greedy": None,
    "drawn": (None, None),
    "k20 p.95": (20, 0.95),
    "p.95": (None, 0.95),
}
verify = OVERRIDES["verify_drafts"]


def int32(*shape: int, value: int) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.int32, device=DEVICE)


def arguments(k: int, kind: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Lines (after the logits) and columns of `verify_drafts`."""
    rows = torch.arange(ROWS, dtype=torch.int32, device=DEVICE)
    slots, many = 1 + k, ROWS * (1 + k)
    live = torch.ones(many, dtype=torch.bool, device=DEVICE)
    computed, query_len = int32(many, value=8), 1 + torch.arange(slots, dtype=torch.int32, device=DEVICE).repeat(ROWS)
    token_ids = torch.randint(0, VOCAB, (ROWS, LONGEST), dtype=torch.int32, device=DEVICE)
    given = columns(ROWS, *(KINDS[kind] or (None, None)), 0.8)
    del given["position"]
    if KINDS[kind] is None:
        given["temperature"] = None
    return (rows.repeat_interleave(slots), live, computed, query_len, token_ids, slots), given


def write_drafts(logits: torch.Tensor, lines: tuple[Any, ...], given: dict[str, Any], share: float) -> None:
    """Let a share of the drafts be what the rows draw."""
    token_ids, slots = lines[4], lines[5]
    drawn = verify(logits, *lines, **given)[0][:, : slots - 1].int()
    keep = torch.rand(drawn.shape, device=DEVICE) < share
    token_ids[:, 9 : 8 + slots] = torch.where(keep, drawn, (drawn + 1) % VOCAB)


def probabilities(k: int) -> torch.Tensor:
    return torch.randn(ROWS, k, VOCAB, device=DEVICE).mul_(2).softmax(-1)


def differences(k: int) -> list[str]:
    """Cases in which the kernels and the reference disagree."""
    lines = []
    for kind in KINDS:
        places, given = arguments(k, kind)
        logits = logits_of(ROWS * (1 + k), "real")
        write_drafts(logits, places, given, 0.7)
        modes: dict[str, dict[str, Any]] = {"": {}}
        if KINDS[kind] is not None:
            modes |= {" typical": {"typical": (0.3, 0.09)}, " probabilities": {"draft_probs": probabilities(k)}}
        for mode, more in modes.items():
            (tokens, counts, ok), want = verify(logits, *places, **given, **more), reference.verify_drafts(logits, *places, **given, **more)
            counting = torch.arange(1 + k, device=DEVICE) < counts.unsqueeze(1)
            wrong = int(((tokens != want[0]) & counting).any(1).sum()), int((counts != want[1]).sum()), int((ok != want[2]).sum())
            mean = counts.float().mean().item()
            lines.append(f"{kind}{mode} k={k}: rows, counts, ok that differ {wrong}; {mean:.2f} tokens a row")
    return lines


def tail(k: int) -> tuple[tuple[Any, ...], ...]:
    """Arguments of `finish_step` before and behind the tokens, for the rows of a step."""
    rows, zeros = torch.arange(ROWS, dtype=torch.int32, device=DEVICE), int32(ROWS, value=0)
    ring, counter = int32(3, ROWS, 6 + k, value=0), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    samples = torch.ones(ROWS, dtype=torch.bool, device=DEVICE)
    table = int32(ROWS, LONGEST, value=3), int32(ROWS, value=8), int32(ROWS, value=9), zeros.clone(), int32(ROWS, value=LONGEST)
    stops = int32(ROWS, value=-1), int32(ROWS + 1, 64, value=-1)
    return (ring, counter, zeros, rows, int32(ROWS, value=1 + k), samples), (*table, zeros.clone(), *stops)


def times(shape: str) -> None:
    for k in DRAFTS:
        many = ROWS * (1 + k)
        pair = [logits_of(many, shape) for _ in range(2)]
        read = microseconds(lambda i, pair=pair: pair[i % 2].amax(1), 5)
        head, rest = tail(k)
        cells = [f"k={k} {shape}: read {read:.1f}"]
        for kind in KINDS:
            places, given = arguments(k, kind)
            write_drafts(pair[0], places, given, 0.7)

            def step(i: int, pair: Any = pair, places: Any = places, given: Any = given, head: Any = head, rest: Any = rest) -> None:
                tokens, counts, ok = verify(pair[i % 2], *places, **given)
                for column, value in ((rest[1], 8), (rest[2], 9)):
                    column.fill_(value)
                TABLE["finish_step"](*head, tokens, counts, ok, *rest)

            def draw(i: int, pair: Any = pair, places: Any = places, given: Any = given) -> None:
                if given["temperature"] is None:
                    SAMPLING["greedy_rows"](pair[i % 2], places[1])
                else:
                    SAMPLING["sample_rows"](pair[i % 2], *places[:4], **given)

            alone = microseconds(lambda i, pair=pair, p=places, g=given: verify(pair[i % 2], *p, **g), 5)
            drawn, whole = microseconds(draw, 5), microseconds(step, 5)
            cells.append(f"{kind} {alone:.1f} ({alone / read:.2f} reads; drawing alone {drawn:.1f}, with state and record {whole:.1f})")
        places, given = arguments(k, "drawn")
        for name, more in (("typical", {"typical": (0.3, 0.09)}), ("probabilities", {"draft_probs": probabilities(k)})):
            time = microseconds(lambda i, pair=pair, p=places, g=given, m=more: verify(pair[i % 2], *p, **g, **m), 5)
            cells.append(f"{name} {time:.1f} ({time / read:.2f} reads)")
        print(", ".join(cells), flush=True)


def edits() -> None:
    """Penalties with drafts ahead: checked, and timed beside lines without any."""
    for k in DRAFTS:
        many, rows = ROWS * (1 + k), torch.arange(ROWS, dtype=torch.int32, device=DEVICE)
        lines, ahead = rows.repeat_interleave(1 + k), torch.arange(1 + k, dtype=torch.int32, device=DEVICE).repeat(ROWS)
        counts = torch.randint(0, 4, (ROWS + 1, VOCAB), dtype=torch.int32, device=DEVICE)
        factors = [torch.rand(ROWS, device=DEVICE) + 0.5 for _ in range(3)]
        token_ids = torch.randint(0, VOCAB, (ROWS, LONGEST), dtype=torch.int32, device=DEVICE)
        given = (int32(ROWS, value=9), int32(ROWS, value=4), token_ids, None, None, None, None, (rows, counts, *factors))
        pair, edit = [logits_of(many, "real") for _ in range(2)], logits_gpu.OVERRIDES["edit_logits"]
        want = logits_reference.edit_logits(pair[0], lines, *given, ahead)
        worst = float((edit(pair[0], lines, *given, ahead) - want).abs().max())
        text = f"penalties k={k}: off by {worst:.1e} at most"
        if not DRY:
            found = [microseconds(lambda i, p=pair, m=more: edit(p[i % 2], lines, *given, m), 5) for more in (ahead, None)]  # noqa: B023
            text += f"; {found[0]:.1f} us with drafts ahead, {found[1]:.1f} us without"
        print(text, flush=True)


def main() -> None:
    torch.manual_seed(0)
    for k in DRAFTS:
        print(*differences(k), sep="\n", flush=True)
    edits()
    if not DRY:
        for shape in ("real", "flat"):
            times(shape)


if __name__ == "__main__":
    main()

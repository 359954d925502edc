"""Records of measurements (JSON objects) as text: one by one, and as one compact table. Torch-free.

`python -m modelrunner.plugins.bench.table FILE...` prints the table of files of JSON lines, as `modelrunner bench --json` writes them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from modelrunner.plugins.bench import sampling
from modelrunner.plugins.bench.asked import told

Record = Mapping[str, Any]
GIB = 1 << 30
HEAD = ("scenario", "model", "tok/s", "ms/step", "floor", "share", "lib floor", "share", "spread")


def label(record: Record) -> str:
    """The scenario as it was asked for."""
    how = told(record)
    return f"{record['scenario']}@{how}" if how else str(record["scenario"])


def text(record: Record) -> Iterator[str]:
    """Lines for people about one record."""
    if "error" in record:
        yield f"{label(record)}: failed: {record['error']}"
    elif record["scenario"] == "startup":
        for name in ("empty_cache", "filled_cache"):
            parts = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in record[name].items() if stage != "total")
            yield f"startup, {name.replace('_', ' ')}: {record[name]['total']:.1f} s ({parts})"
    elif record["scenario"] == "host":
        parts = ", ".join(f"{name} {micros:.0f}" for name, micros in record["parts_us"].items())
        yield f"host, {rows_of(record)}: {record['us_per_step']:.0f} us a step, at best {record['best_us']:.0f} ({parts})"
    elif record["scenario"] == "sampling":
        yield from sampling.lines(record)
    else:
        yield from throughput(record)


def rows_of(record: Record) -> str:
    """The rows of a step whose host time was measured, and their drafts, if it has some: then also how it compares with one without."""
    drafts = f", {record['drafts']} drafts ({record['over_plain']:.2f} of plain)" if record.get("drafts") else ""
    return f"{record['rows']} rows{drafts}"


def throughput(record: Record) -> Iterator[str]:
    seconds = record["seconds"]
    yield (
        f"{label(record)}: {record['tokens_per_second']:,.0f} {record['counted']} tok/s, {record['ms_per_step']:.3f} ms a step "
        f"({record['statistic']} of {len(seconds)} runs, {min(seconds):.2f}-{max(seconds):.2f} s, {record['steps']} steps, "
        f"{record['prompt_tokens']} + {record['output_tokens']} tokens)"
    )
    memory = record["peak_device_memory_bytes"]
    held = "" if memory is None else f", {memory / GIB:.1f} GiB of device memory"
    extra = "".join(f", {record[name]} {what}" for name, what in COUNTED.items() if record.get(name))
    yield f"  {record['model']}, {record['dtype']}, {record['device_name']}{held}{extra}"
    if record.get("num_drafted"):
        places = ", ".join(f"{share:.2f}" for share in record["acceptance_at"])
        yield f"  {record['num_accepted']} of {record['num_drafted']} drafts accepted; share by place: {places}"
    for name, what in FLOORS.items():
        if name in record:
            yield f"  {what.format(**record[name], bandwidth=record['copy_bandwidth'] / 1e9, peak=record['peak_flops'] / 1e12)}"
    for name, what in (("inter_token_ms", "between tokens"), ("first_token_ms", "to a long prompt's first token")):
        if name in record:
            yield f"  {what}: " + ", ".join(f"{part} {value:.2f} ms" for part, value in record[name].items())


COUNTED = {"cached_tokens": "cached tokens", "preemptions": "preemptions"}
FLOORS = {
    "floor": "floor {tokens_per_second:,.0f} tok/s at {bandwidth:,.0f} GB/s and {peak:,.2f} TFLOP/s: {share:.1%} reached",
    "library_floor": "with torch's products ({products_ms:.3f} ms at {rows} rows) {tokens_per_second:,.0f} tok/s: {share:.1%} reached",
}


def cells(record: Record) -> list[str]:
    """The record's line in the table, as many cells as HEAD has."""
    first = [label(record), Path(str(record.get("model", ""))).name]
    if "error" in record:
        return [*first, f"failed: {record['error'][:60]}"]
    if record["scenario"] == "startup":
        return [*first, f"{record['empty_cache']['total']:.1f} s, filled cache {record['filled_cache']['total']:.1f} s"]
    if record["scenario"] == "host":
        return [f"host {rows_of(record).replace(' rows', '', 1)}", "", f"{record['us_per_step']:.0f} us, best {record['best_us']:.0f} us"]
    if record["scenario"] == "sampling":
        ours, read = record["us"]["modelrunner"], record["read_us"]
        return [f"sampling {record['logits']}", "", "; ".join(f"{name} {micros / read:.2f} reads" for name, micros in ours.items())]
    if "tokens_per_second" not in record or "steps" not in record:
        return [*first, f"{record.get('tokens_per_second', 0):,.1f}"]
    floors: list[str] = []
    for name in ("floor", "library_floor"):
        found = record.get(name)
        floors += [f"{found['tokens_per_second']:,.0f}", f"{found['share']:.0%}"] if found else ["", ""]
    seconds = record["seconds"]
    spread = f"{(max(seconds) - min(seconds)) / min(seconds):.0%} of {len(seconds)}"
    if tail := record.get("inter_token_ms"):
        spread += f"; between tokens p50 {tail['p50']:.2f}, p99 {tail['p99']:.2f} ms"
    return [*first, f"{record['tokens_per_second']:,.0f}", f"{record['ms_per_step']:.3f}", *floors, spread]


def table(records: Iterable[Record]) -> list[str]:
    """One line for each record, in columns; a line with few cells lets its last one run on."""
    rows: list[Sequence[str]] = [HEAD, *(cells(record) for record in records)]
    full = [row for row in rows if len(row) == len(HEAD)]
    widths = [max(len(row[column]) for row in (full if column > 1 else rows)) for column in range(len(HEAD))]

    def line(row: Sequence[str]) -> str:
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False)]
        if len(row) < len(HEAD):
            return "  ".join([*left, *row[2:]]).rstrip()
        numbers = [cell.rjust(width) for cell, width in zip(row[2:-1], widths[2:-1], strict=True)]
        return "  ".join([*left, *numbers, row[-1]]).rstrip()

    return [line(row) for row in rows]


def read(paths: Sequence[str]) -> list[Record]:
    """The JSON objects of files of JSON lines; lines of anything else are passed over."""
    lines = [line for path in paths for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


if __name__ == "__main__":
    print("\n".join(table(read(sys.argv[1:]))))

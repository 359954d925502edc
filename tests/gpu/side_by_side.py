"""Runs the tests of a GPU in several processes at once: `python3 -P tests/gpu/side_by_side.py [--alone FILE] FILES OR FOLDERS`.

What they take long for is building kernels, one after the other in each process. So each file of `tests/gpu` is a process of its own, and
so is each other file or folder that is named; there the tests that are marked `gpu` count. Files of --alone want the GPU to themselves and
come last, for which a quarter of --seconds is kept. What has not ended in time is stopped and told; the last line sums up. Ends with 1 if
anything failed or did not end.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

LONG = ("test_random_run.py", "test_graphs.py", "test_logprobs.py", "test_deterministic.py")  # begin first
PYTEST = ("-p", "no:cacheprovider", "-p", "no:xdist", "-m", "gpu", "-q", "-rfE", "--tb=short", "--no-header")
NOTHING_RAN = 5  # pytest's exit status where no test was chosen
ENDED = re.compile(r"\bin [\d.]+s")


@dataclass(frozen=True)
class Outcome:
    """One process: what it ran, whether it ended by itself, pytest's counts by kind of result, what it printed."""

    target: str
    status: int | None
    seconds: float
    counts: Counter[str]
    output: str

    @property
    def good(self) -> bool:
        return self.status in (0, NOTHING_RAN)


def targets(named: Sequence[str]) -> list[str]:
    """What runs in one process each."""
    found: list[Path] = []
    for path in map(Path, named):
        found += sorted(path.glob("test_*.py")) if path.name == "gpu" else [path]
    return [str(path) for path in sorted(found, key=lambda path: LONG.index(path.name) if path.name in LONG else len(LONG))]


def run(target: str, end: float) -> Outcome:
    begun = time.monotonic()
    command = [sys.executable, "-P", "-m", "pytest", *PYTEST, target]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        try:
            left = end - begun
            status = (
                None if left < 1 else subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=left, check=False).returncode
            )
        except subprocess.TimeoutExpired:
            status = None
        log.seek(0)
        output = log.read()
    return Outcome(target, status, time.monotonic() - begun, counts(output), output)


def counts(output: str) -> Counter[str]:
    """From the line that ends pytest's output, or, where it was stopped, from its dots."""
    for line in reversed(output.splitlines()):
        if ENDED.search(line):
            return Counter({kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|errors?|skipped)", line)})
    dots = Counter("".join(line.split(" ")[0] for line in output.splitlines() if re.fullmatch(r"[.FEsx]+( +\[ *\d+%\])?", line)))
    return Counter({kind: dots[letter] for letter, kind in ((".", "passed"), ("F", "failed"), ("s", "skipped")) if dots[letter]})


def told(outcome: Outcome) -> str:
    kinds = ", ".join(f"{number} {kind}" for kind, number in outcome.counts.items()) or "nothing"
    line = f"{outcome.seconds:6.1f} s  {outcome.target}: {kinds}{'' if outcome.status is not None else ', then stopped'}"
    return line if outcome.good or outcome.status is None else f"{outcome.output[-6000:]}\n{line}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--alone", action="append", default=[])
    parser.add_argument("named", nargs="+")
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    alone = {str(Path(path)) for path in options.alone}
    outcomes: list[Outcome] = []

    def one(target: str, share: float = 1.0) -> None:
        outcomes.append(outcome := run(target, begun + share * options.seconds))
        print(told(outcome), flush=True)

    with ThreadPoolExecutor(options.workers) as pool:
        together = [target for target in targets(options.named) if target not in alone]
        list(pool.map(partial(one, share=0.75 if alone else 1.0), together))
    for target in options.alone:
        one(target)
    total = sum((outcome.counts for outcome in outcomes), Counter[str]())
    stopped = [outcome.target for outcome in outcomes if outcome.status is None]
    kinds = ", ".join(f"{number} {kind}" for kind, number in total.items()) or "nothing ran"
    print(f"{kinds} in {time.monotonic() - begun:.0f} s{'; stopped: ' + ', '.join(stopped) if stopped else ''}")
    return 0 if all(outcome.good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Runs the tests of a GPU in several processes at once: `python3 -P tests/gpu/side_by_side.py [--alone FILE] FILES OR FOLDERS`.

What they take long for is building kernels, one after the other in each process. So the tests that are marked `gpu` are dealt out to
processes: those of a file to one, or to several if they are many; short files share one. Files of --alone want the GPU to themselves and
come last, for which a tenth of --seconds is kept. What has not ended in time is stopped and told; the last line sums up. Ends with 1 if
anything failed or did not end.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

LONG = (  # begin first, each alone in its process
    "test_real_weights.py", "transformers/test_state.py", "test_rings.py", "test_drafters.py", "test_deterministic.py", "test_graphs.py",
    "test_b46.py", "test_b36.py", "test_b20.py", "test_b35.py", "test_b32.py", "test_b44.py", "test_b45.py", "test_logprobs.py",
    "test_b52.py", "test_b28.py", "test_b61.py", "test_b43.py", "test_narrowed.py", "test_b05.py", "test_b11.py", "test_b10.py",
    "test_random_run.py", "test_speculation.py", "test_media.py", "test_eight_bit_cache.py", "test_b37.py",
)  # fmt: skip
# pyproject.toml says -q
PYTEST = (sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "gpu")
MOST = 9  # tests of a process
QUICK = ("test_rings.py",)  # all in one process: its tests take less time than a process takes to start
LAST_WORDS = 3  # seconds in which one that is stopped tells what had failed
ENDED = re.compile(r"\bin [\d.]+s")


@dataclass(frozen=True)
class Part:
    """Tests of one process: their ids, and a name for people."""

    name: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """One process: whether it ended by itself (status), pytest's counts by kind of result, what it printed."""

    part: Part
    status: int | None
    seconds: float
    counts: Counter[str]
    output: str


def parts(named: Sequence[str], alone: Sequence[str] = ()) -> list[Part]:
    """The marked tests of files and folders, file by file; files of few tests share a process, but for those of LONG and `alone`. Raises
    RuntimeError if pytest cannot collect them."""
    done = subprocess.run([*PYTEST, "--collect-only", *named], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pytest could not collect {' '.join(named)}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    files: dict[str, list[str]] = {}
    for test in done.stdout.splitlines():
        if "::" in test:
            files.setdefault(test.split("::")[0], []).append(test)
    found, few = list[Part](), Part("", ())
    for file, tests in files.items():
        most = len(tests) if file.endswith(QUICK) else MOST
        blocks = [tuple(tests[first : first + most]) for first in range(0, len(tests), most)]
        for i, block in enumerate(blocks):
            part = Part(file if len(blocks) == 1 else f"{file} ({i + 1} of {len(blocks)})", block)
            if len(block) == most or file in alone or file.endswith(LONG):
                found.append(part)
            elif len(few.tests) + len(block) > MOST:
                found.append(few)
                few = part
            else:
                few = Part(f"{few.name}, {part.name}".removeprefix(", "), few.tests + part.tests)
    found += [few] if few.tests else []
    return sorted(found, key=lambda part: next((i for i, name in enumerate(LONG) if name in part.name), len(LONG)))


def run(part: Part, end: float) -> Outcome:
    begun = time.monotonic()
    command = [*PYTEST, "-rfE", "--tb=short", "--no-header", *part.tests]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        status: int | None = None
        if (left := end - begun - LAST_WORDS) > 1:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            try:
                status = process.wait(left)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LAST_WORDS)
                process.kill()
                process.wait()
        log.seek(0)
        output = log.read()
    return Outcome(part, status, time.monotonic() - begun, counts(output), output)


def counts(output: str) -> Counter[str]:
    """From the line that ends pytest's output, or, where it was stopped, from its dots."""
    for line in reversed(output.splitlines()):
        if ENDED.search(line):
            return Counter({kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|errors?|skipped)", line)})
    dots = Counter("".join(line.split(" ")[0] for line in output.splitlines() if re.fullmatch(r"[.FEsx]+( +\[ *\d+%\])?", line)))
    return Counter({kind: dots[letter] for letter, kind in ((".", "passed"), ("F", "failed"), ("s", "skipped")) if dots[letter]})


def told(outcome: Outcome) -> str:
    kinds = ", ".join(f"{number} {kind}" for kind, number in outcome.counts.items()) or "nothing"
    line = f"{outcome.seconds:6.1f} s  {outcome.part.name}: {kinds}{'' if outcome.status is not None else ', then stopped'}"
    bad = outcome.status or outcome.counts["failed"] or outcome.counts["error"]
    return f"{outcome.output[-6000:]}\n{line}" if bad else line


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--alone", action="append", default=[])
    parser.add_argument("named", nargs="+")
    options = parser.parse_args(arguments)
    begun, outcomes = time.monotonic(), list[Outcome]()

    def one(part: Part, share: float = 1.0) -> None:
        outcomes.append(outcome := run(part, begun + share * options.seconds))
        print(told(outcome), flush=True)

    found = parts(options.named, options.alone)
    alone = [part for part in found if part.name.split(" ")[0] in options.alone]
    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(partial(one, share=0.9), [part for part in found if part not in alone]))
    for part in alone:
        one(part)
    total = sum((outcome.counts for outcome in outcomes), Counter[str]())
    stopped = [outcome.part.name for outcome in outcomes if outcome.status is None]
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(total.items())) or "nothing ran"
    print(f"{kinds} in {time.monotonic() - begun:.0f} s{'; stopped: ' + ', '.join(stopped) if stopped else ''}")
    return 0 if all(outcome.status == 0 for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

"""`host`: what a step costs the host, with no device to wait for, in time of the thread that runs the engine.

The engine is real, its model has no weights, and once all rows decode its device does nothing: work is dropped, and records are made up.
So what enqueues work (a copy, a patch's launch, a graph's replay: some 10 to 30 microseconds on a GPU) is not counted. Nor is what a
request makes of its tokens, text above all: no output is wanted before the end. With settings of `speculation`, steps with drafts are
measured too, of which the device keeps about half: such a step brings a row several tokens, and is counted as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from time import thread_time_ns
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from modelrunner.plugins.bench.asked import GREEDY, params_of
from modelrunner.plugins.bench.drive import undisturbed
from modelrunner.plugins.bench.parts import Clock
from modelrunner.plugins.bench.scenarios import Job

if TYPE_CHECKING:
    from modelrunner.batch import Plan, Ticket
    from modelrunner.engine import Engine
    from modelrunner.testing.null_device import NullDevice

FloatArray = npt.NDArray[np.float64]
ROWS = (1, 64, 256, 1024)
CONTEXT = 4096
PROMPT = 32  # tokens of the shortest prompt; rows start at every place of a page, so that they need new pages in turn
PAGE = 16
WARM_UP, STEPS = 64, 512


def make_engine(rows: Sequence[int], speculation: Mapping[str, Any] | None = None, most: int = 0) -> tuple[Engine, NullDevice]:
    """An engine on the null device, with a model that costs nothing, and graphs for these numbers of rows. speculation: settings of a
    drafter. most: drafts of a row in a step, for which there is to be room."""
    from modelrunner.engine import Engine
    from modelrunner.testing import ScriptedPlugin, mixed
    from modelrunner.testing.null_device import NullDevice, NullPlugin

    max_rows, longest = max(rows), PROMPT + PAGE + (WARM_UP + STEPS + 8) * (1 + most)
    settings = {
        **(speculation or {}),
        "model": "scripted",
        "graphs.bucket_rows": tuple(rows),
        "graphs.max_tokens": 0,
        "device.name": "null",
        "cache.page_size": PAGE,
        "scheduler.max_rows": max_rows,
        "scheduler.max_batched_tokens": 16384,
        "cache.num_pages": max(max_rows * -(-longest // PAGE), context(most) // PAGE),
    }
    engine = Engine(settings, plugins=[ScriptedPlugin(mixed(), context=context(most)), NullPlugin()])
    device = engine.assembly.device
    assert isinstance(device, NullDevice), "the null device was asked for by name"
    launch = engine.runner.launch

    def told(plan: Plan) -> Ticket:
        device.plan = plan
        return launch(plan)

    vars(engine.runner)["launch"] = told
    return engine, device


def context(most: int) -> int:
    """Tokens that a request may have: half of them its output, which no row comes to the end of."""
    return CONTEXT * (1 + most // 2)


def measure_host(scale: float = 1.0, speculation: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """One record for each number of rows; with settings of a drafter two, one without and one with drafts. scale: of rows and steps."""
    from modelrunner.settings_features import SpeculationSettings

    rows = sorted({max(1, round(number * scale)) for number in ROWS})
    steps = max(2 * PAGE, round(STEPS * scale) // PAGE * PAGE)
    most = int((speculation or {}).get("speculation.num_tokens", SpeculationSettings().num_tokens)) if speculation else 0
    for number in rows:
        plain = 0.0
        for drafts in sorted({0, most}):
            engine, device = make_engine(rows, speculation if drafts else None, most)
            try:
                decode(engine, number, context(most) // 2)
                found = measure_steps(engine, device, steps)
            finally:
                engine.close()
            plain = plain or found["us_per_step"]
            more = {"drafts": drafts, "over_plain": found["us_per_step"] / plain} if most else {}
            yield {"scenario": "host", "engine": "modelrunner", "rows": number, **more, **found}


def measure_steps(engine: Engine, device: NullDevice, steps: int) -> dict[str, Any]:
    """Microseconds of a steady step: of the whole and of its parts.

    A block is as many steps as a page has tokens, so that each has the same share of new pages. `us_per_step` and `parts_us` are medians
    over blocks, `best_us` is the least block; single steps are in `spread_us`.
    """
    device.hidden = True
    with undisturbed(engine), Clock(engine, thread_time_ns, lambda: device.nanoseconds) as clock:
        spend(engine, device, WARM_UP)
        clock.clear()
        total = spend(engine, device, steps)
    device.hidden = False
    blocks = means(total)
    parts = {name: float(np.median(means(np.array(entries) / 1000))) for name, entries in clock.entries.items()}
    whole = float(np.median(blocks))
    return {
        "steps": steps,
        "us_per_step": whole,
        "best_us": float(blocks.min()),
        "parts_us": {**parts, "rest": whole - sum(parts.values())},
        "spread_us": {"p50": float(np.median(total)), "p99": float(np.percentile(total, 99))},
    }


def means(values: FloatArray) -> FloatArray:
    """The mean of each block of PAGE values."""
    return np.asarray(values.reshape(-1, PAGE).mean(1))


def decode(engine: Engine, number: int, output: int = CONTEXT // 2) -> None:
    """Bring `number` requests of `output` tokens to where each has its first one, and collect every step."""
    for place in range(number):
        prompt = [7 + (place * 37 + i) % 300 for i in range(PROMPT + place % PAGE)]
        engine.add_request(str(place), {"prompt_token_ids": prompt}, params_of(Job((), output), GREEDY))
    requests = list(engine.requests.values())
    while any(request.first_token_time is None for request in requests):
        engine.step()
    engine.drain()


def spend(engine: Engine, device: NullDevice, steps: int) -> FloatArray:
    """Take steps: microseconds of each, those of the device left out."""
    taken = np.zeros(steps)
    for at in range(steps):
        hidden, start = device.nanoseconds, thread_time_ns()
        engine.step()
        taken[at] = thread_time_ns() - start - (device.nanoseconds - hidden)
    return taken / 1000

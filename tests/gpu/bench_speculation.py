"""What steps with drafts cost: `python3 -P tests/gpu/bench_speculation.py [MODEL] [ROWS,...] [K,...] [RATE,...]`.

Dummy weights, greedy, prompts of 128 tokens and 256 tokens of output. A drafter proposes noise; verification runs in full, and then a
seeded coin decides how many drafts count, so that acceptance is what it is to be. A line for each: tokens a second, steps, milliseconds a
step, the host's share, and tokens a second without drafts. `--dry`: tiny, on any machine.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from modelrunner import Engine, OutputKind, SamplingParams
from modelrunner.batch import Batch
from modelrunner.plugins.bench.models import model_folder
from modelrunner.sampler import Sampler
from modelrunner.testing import ScriptDrafterPlugin

DRY = "--dry" in sys.argv
ARGUMENTS = [argument for argument in sys.argv[1:] if argument != "--dry"]
OUTPUT, PROMPT = (24, 8) if DRY else (256, 128)
VERIFIED = Sampler.sample


RATES: dict[torch.device, torch.Tensor] = {}  # heads in a thousand


def toss(self: Sampler, logits: torch.Tensor, batch: Batch, *more: Any) -> Any:
    """`Sampler.sample`, whose count of tokens is then that of a coin's run of heads: a function of row and place."""
    tokens, counts, ok = VERIFIED(self, logits, batch, *more)
    slots = 1 + batch.num_draft
    if slots == 1:
        return tokens, counts, ok
    if logits.device not in RATES:
        RATES[logits.device] = torch.zeros((), dtype=torch.int64, device=logits.device)
    place = (batch.computed + batch.query_len).view(-1, slots)[:, 1:].long()
    mixed = (place * 40503 + batch.rows.view(-1, slots)[:, 1:] * 7919 + 12345) * 1103515 & 0x7FFFFFFF
    heads = ((mixed >> 7) % 1000 < RATES[logits.device]) & batch.samples.view(-1, slots)[:, 1:]
    run = 1 + heads.cummin(1).values.sum(1, dtype=torch.int32)
    return tokens, torch.where(counts > 0, run, 0), ok


def engine(model: str, rows: int, drafts: int) -> Engine:
    settings: dict[str, Any] = {
        "model": {"name": str(model_folder(model)), "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 1024},
        "scheduler": {"max_rows": rows},
        "graphs": {"bucket_rows": (rows,), "max_tokens": 0},
        "cache": {"prefix_caching": False},
    }
    if DRY:
        settings |= {"device": {"name": "cpu"}, "cache": {"num_pages": 200}}
    plugins: list[object] = []
    if drafts:
        settings["speculation"] = {"drafter": "script", "num_tokens": drafts}
        plugins = [ScriptDrafterPlugin(lambda request: [7] * 1000)]
    return Engine(settings, plugins=plugins)


def drive(made: Engine, rows: int) -> dict[str, float]:
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False, output_kind=OutputKind.FINAL_ONLY)
    for row in range(rows):
        made.add_request(str(row), {"prompt_token_ids": [5 + (row * 31 + place * 7) % 200 for place in range(PROMPT)]}, params)
    while made.scheduler.stats.generated_tokens < rows or made.scheduler.num_waiting:
        made.step()
    host, first, began, steps = 0.0, made.scheduler.stats.generated_tokens, time.perf_counter(), made.scheduler.stats.steps
    while made.has_unfinished():
        entered = time.thread_time()
        made.step()
        host += time.thread_time() - entered
    seconds, stats = time.perf_counter() - began, made.scheduler.stats
    count = stats.steps - steps
    tokens = stats.generated_tokens - first
    return {
        "tok_s": tokens / seconds,
        "steps": count,
        "ms_step": 1000 * seconds / count,
        "host_us": 1e6 * host / count,
        "per_step": tokens / count / rows,
    }


def main() -> None:
    model, rows, ks, rates = (*ARGUMENTS, *("tiny" if DRY else "qwen3-0.6b", "1,8,64", "1,3,5", "0.6,0.8,1.0")[len(ARGUMENTS) :])
    Sampler.sample = toss  # type: ignore[method-assign]
    for count in (int(number) for number in rows.split(",")):
        plain = 0.0
        for k in (0, *(int(number) for number in ks.split(","))):
            made = engine(model, count, k)
            drive(made, count)
            for rate in (float(number) for number in (rates.split(",") if k else ["0"])):
                with torch.inference_mode():
                    for coin in RATES.values():
                        coin.fill_(int(1000 * rate))
                found = best(made, count)
                plain = plain or found["tok_s"]
                print(json.dumps({"rows": count, "k": k, "rate": rate, **found, "speed_up": round(found["tok_s"] / plain, 3)}), flush=True)
            made.close()


def best(made: Engine, rows: int) -> dict[str, float]:
    runs = [drive(made, rows) for _ in range(1 if DRY else 3)]
    return {name: round(value, 4) for name, value in max(runs, key=lambda run: run["tok_s"]).items()}


if __name__ == "__main__":
    main()

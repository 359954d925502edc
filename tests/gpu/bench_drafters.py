"""Time per output token with a drafter that has weights: `python3 -P tests/gpu/bench_drafters.py [MODEL] [ROWS,...] [--dry]`.

Dummy weights (so hardly a draft is accepted), greedy, prompts of 100 tokens. A line for each number of rows: multi-token prediction with
one draft, two steps in flight; the same with one, where the host waits for each verification before it enqueues the next step; an EAGLE-3
head with three drafts; no drafter. `--dry`: tiny, on any machine.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelrunner import LLM, SamplingParams
from modelrunner.plugins.bench.models import MODELS

DRY = "--dry" in sys.argv
ARGUMENTS = [argument for argument in sys.argv[1:] if argument != "--dry"]
OUTPUT, REPEAT = (16, 1) if DRY else (200, 5)
ROOT = Path(tempfile.mkdtemp(prefix="modelrunner-bench-drafters-"))


def folder(name: str, config: Mapping[str, Any]) -> str:
    path = ROOT / name
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(dict(config)))
    return str(path)


def heads(model: str) -> dict[str, str]:
    """Folders of the target and of its EAGLE-3 head."""
    config = MODELS[model]
    layers = config["num_hidden_layers"]
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": min(32000, config["vocab_size"]),
        "eagle_aux_hidden_state_layer_ids": [2, layers // 2, layers - 3] if layers > 5 else [0, 1, 2],
    }
    return {"target": folder("target", config), "mtp": "", "eagle3": folder("eagle3", config | own)}


def measure(model: str, drafter: str | None, drafts: int, depth: int, batches: Sequence[int]) -> dict[int, float]:
    """Microseconds of an output token of each request, by number of requests: the difference of a long and a short run."""
    folders = heads(model)
    more = {} if drafter is None else {"speculation": {"drafter": drafter, "num_tokens": drafts, "model": folders[drafter]}}
    scheduler = {"pipeline_depth": depth, "max_rows": max(batches)}
    llm = LLM(folders["target"], load_format="dummy", skip_tokenizer_init=True, max_model_len=1024, scheduler=scheduler, **more)

    def run(rows: int, tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": [7 + row + place % 97 for place in range(100)]} for row in range(rows)]
        begun = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begun

    found = {}
    for rows in batches:
        run(rows, OUTPUT // 4)
        found[rows] = statistics.median((run(rows, OUTPUT) - run(rows, OUTPUT // 4)) / (OUTPUT - OUTPUT // 4) * 1e6 for _ in range(REPEAT))
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    model = ARGUMENTS[0] if ARGUMENTS else "tiny" if DRY else "qwen3-0.6b"
    batches = [int(rows) for rows in (ARGUMENTS[1] if len(ARGUMENTS) > 1 else "1,16").split(",")]
    runs = {
        "mtp, one draft": measure(model, "mtp", 1, 2, batches),
        "mtp, the host waits": measure(model, "mtp", 1, 1, batches),
        "eagle3, three drafts": measure(model, "eagle3", 3, 2, batches),
        "no drafter": measure(model, None, 0, 2, batches),
    }
    for rows in batches:
        ratio = runs["mtp, one draft"][rows] / runs["mtp, the host waits"][rows]
        times = ", ".join(f"{name} {found[rows]:.0f}" for name, found in runs.items())
        print(f"{model}, {rows} rows, microseconds a token: {times}; not waiting saves {100 * (1 - ratio):.1f}%", flush=True)


if __name__ == "__main__":
    main()

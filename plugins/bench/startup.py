"""`startup`: from a fresh interpreter to the first token, with an empty cache of compiled kernels and then with a filled one.

`python -m modelrunner.plugins.bench.startup JSON` is the process that is measured; it prints its stamps as one JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from modelrunner.errors import ModelRunnerError

TIMEOUT = 600.0  # seconds
PROMPT = list(range(5, 37))
STAGES = ("interpreter", "import", "engine", "first_token")


def measure_startup(settings: Mapping[str, Any], plugins: Sequence[str], model: str) -> dict[str, Any]:
    """Seconds of each stage, and in all, of two processes that share a cache of kernels which the first one finds empty."""
    with tempfile.TemporaryDirectory(prefix="modelrunner-kernels-") as cache:
        empty, filled = (start(settings, plugins, cache) for _ in range(2))
    return {"scenario": "startup", "engine": "modelrunner", "model": model, "empty_cache": empty, "filled_cache": filled}


def start(settings: Mapping[str, Any], plugins: Sequence[str], cache: str) -> dict[str, float]:
    """Run one process to its first token: seconds of each of STAGES, and their `total`."""
    argument = json.dumps({"settings": dict(settings), "plugins": list(plugins)})
    begun = time.time()
    command = [sys.executable, "-P", "-m", "modelrunner.plugins.bench.startup", argument]
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    try:
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise ModelRunnerError(f"the process that `startup` measures had no token after {TIMEOUT:.0f} s") from None
    if child.returncode:
        raise ModelRunnerError(f"the process that `startup` measures ended with {child.returncode}:\n{child.stderr[-4000:]}")
    stamps: list[float] = json.loads(child.stdout.splitlines()[-1])
    return stages([begun, *stamps])


def stages(stamps: Sequence[float]) -> dict[str, float]:
    """Seconds of each stage from the moments that part them."""
    taken = {name: after - before for name, before, after in zip(STAGES, stamps[:-1], stamps[1:], strict=True)}
    return {**taken, "total": stamps[-1] - stamps[0]}


def main(argument: str) -> None:
    """The measured process."""
    stamps = [time.time()]
    given = json.loads(argument)
    from modelrunner.engine import Engine
    from modelrunner.request import OutputKind, SamplingParams

    stamps.append(time.time())
    engine = Engine(given["settings"], plugins=given["plugins"])
    stamps.append(time.time())
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, output_kind=OutputKind.FINAL_ONLY)
    engine.add_request("first", {"prompt_token_ids": PROMPT}, params)
    while engine.has_unfinished():
        engine.step()
    stamps.append(time.time())
    engine.close()
    print(json.dumps(stamps))


if __name__ == "__main__":
    main(sys.argv[1])

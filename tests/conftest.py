"""Defaults for every test: no network, no settings left over from the caller's shell, fixed seeds."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from plugin_site import PluginSite

# Read by libraries that the tests import later.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Triton kernels are made for the interpreter or for a GPU when their modules are imported.
if not any(Path(path).exists() for path in ("/dev/nvidiactl", "/proc/driver/nvidia")):
    os.environ["TRITON_INTERPRET"] = "1"
for _name in [name for name in os.environ if name.upper().startswith("MODELRUNNER_")]:
    del os.environ[_name]


@pytest.fixture(autouse=True, scope="session")
def _builds_alone() -> None:
    """On a GPU, where processes run tests side by side, each builds its kernels: eight helpers of each would mostly import torch."""
    if "TRITON_INTERPRET" not in os.environ:
        from modelrunner.kernels import build_helpers

        build_helpers.MOST = 0


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same random numbers in whatever order the tests run; torch is seeded only where it is already there."""
    random.seed(0)
    np.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def plugin_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginSite]:
    """An empty folder, first on `sys.path`, to install plugins into."""
    site = PluginSite(tmp_path / "site")
    monkeypatch.syspath_prepend(str(site.folder))
    yield site
    site.close()

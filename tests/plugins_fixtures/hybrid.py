"""The recurrent example as a subject of tests, from its sources: a model with full attention and a state."""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

from modelrunner.testing import ByteTokenizerPlugin, Subject

SOURCE = Path(__file__).resolve().parents[2] / "docs/examples/recurrent"

if str(SOURCE) not in sys.path:
    sys.path.append(str(SOURCE))


@lru_cache(maxsize=4)
def hybrid(seed: int = 1) -> Subject:
    """The tiny recurrent hybrid: 2 layers with a state, 2 that attend, vocabulary 331, context 256 tokens, a snapshot each 16 tokens."""
    from tiny_recurrent import Recurrence, write_checkpoint

    folder = Path(tempfile.mkdtemp(prefix="modelrunner-hybrid-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_checkpoint(folder, seed)
    return Subject(str(folder), f"hybrid-{seed}", (ByteTokenizerPlugin(), "modelrunner_recurrent"), Recurrence(folder))

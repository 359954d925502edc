"""A configuration that is wrong: what an engine start says of it, whoever had to read it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from modelrunner import LLM
from modelrunner.errors import CheckpointError, ModelRunnerError, PluginError
from modelrunner.testing import tiny_dense


def start(folder: Path, **fields: Any) -> None:
    shutil.copytree(tiny_dense(), folder, dirs_exist_ok=True)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))
    LLM(folder, skip_tokenizer_init=True, device="cpu", cache={"num_pages": 32}).close()


@pytest.mark.parametrize(
    ("fields", "kind", "told"),
    [
        ({"rms_norm_eps": 0}, PluginError, "rms_norm_eps is 0.0; a finite number above 0 is needed"),
        ({"num_key_value_heads": 3}, CheckpointError, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"rope_scaling": 3}, PluginError, "rope_scaling is 3; an object is needed, or null"),
        ({"rope_theta": "x"}, PluginError, "rope_theta is 'x'; a number is needed"),
    ],
)
def test_why_the_family_declined_stands_beside_the_fallbacks_error(
    tmp_path: Path, fields: dict[str, Any], kind: type[ModelRunnerError], told: str
) -> None:
    """The fallback tries all that the family declines, and its own words for a wrong field are seldom clear."""
    with pytest.raises(kind) as caught:
        start(tmp_path, **fields)
    (note,) = caught.value.__notes__
    assert note.startswith("modelrunner:dense declined: ")
    assert note.endswith(told)


def test_what_runs_has_no_notes(tmp_path: Path) -> None:
    """Nor has an error of the family itself."""
    start(tmp_path)
    with pytest.raises(CheckpointError, match="do not fit") as caught:
        start(tmp_path, vocab_size=100)
    assert not getattr(caught.value, "__notes__", [])


def test_a_quantisation_that_is_no_object(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: `quantization_config` is 3; an object is needed, or null"):
        start(tmp_path, quantization_config=3)

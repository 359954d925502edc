"""Models and loaded states of both generations, made once."""

from __future__ import annotations

from typing import Any

import pytest

from modelrunner.model_states import qwen_vl
from tests.model_states.media_worlds import Loaded, SmallTokenizer, make_model
from tests.model_states.qwen_vl.worlds import CONFIGS, digits


@pytest.fixture(scope="session", params=sorted(CONFIGS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Loaded]:
    """A transformers model and our state with its weights."""
    model = make_model(CONFIGS[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, Loaded(folder, qwen_vl, SmallTokenizer(digits))

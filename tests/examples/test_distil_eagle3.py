"""The example that distils an EAGLE-3 head, in small: it learns, what it learns is what the drafter computes, and drafts come true."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import modelrunner
from modelrunner import SamplingParams
from modelrunner.model_states import eagle3
from tests.model_states.drafters import heads
from tests.model_states.drafters.bench import Bench

SOURCE = Path(__file__).resolve().parents[2] / "docs/examples/distil_eagle3/distil_eagle3.py"
STEPS = 3


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("distil_eagle3", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return heads.write(tmp_path_factory.mktemp("target"), heads.TARGET, heads.target_tensors())


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def written(model: Any) -> list[list[int]]:
    """What the target writes, greedily, after 48 first tokens."""
    ids = torch.arange(3, 51)[:, None]
    for _ in range(20):
        with torch.no_grad():
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), 1)
    rows: list[list[int]] = ids.tolist()
    return rows


@pytest.fixture(scope="module")
def distilled(script: ModuleType, model: Any, written: list[list[int]]) -> tuple[dict[str, Any], heads.Tensors, list[float]]:
    found: tuple[dict[str, Any], heads.Tensors, list[float]] = script.distil(
        model, written, draft_vocab=96, epochs=6, steps=STEPS, rate=3e-3
    )
    return found


class Writer:
    """Stands for the model: prompts of 40 ids, answers as long as they may be or `answer` ids. made: ids of all texts."""

    answer = 256
    made = 0

    def __init__(self, model: str, **settings: int) -> None:
        self.rows = settings["max_num_seqs"]

    def chat(self, conversations: Sequence[object], params: Sequence[SamplingParams]) -> list[SimpleNamespace]:
        assert len(conversations) == len(params) <= self.rows
        sizes = [min(self.answer, each.max_tokens or 0) for each in params]
        type(self).made += sum(40 + size for size in sizes)
        return [SimpleNamespace(prompt_token_ids=[1] * 40, outputs=[SimpleNamespace(token_ids=[2] * size)]) for size in sizes]


@pytest.mark.parametrize("answer", [256, 7])
@pytest.mark.parametrize("tokens", [1, 39, 296, 1000, 20_000])
def test_texts_have_as_many_tokens_as_asked(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tokens: int, answer: int) -> None:
    """And the model writes hardly more than that: one text at most is cut, and nothing is made behind it."""
    writer = type("Writer", (Writer,), {"answer": answer})
    monkeypatch.setattr(modelrunner, "LLM", writer)
    found = list(script.texts("", tokens, 32))
    assert sum(map(len, found)) == tokens
    assert all(len(ids) == 40 + answer for ids in found[:-1])
    assert tokens <= writer.made <= tokens + 40 + answer


@pytest.mark.parametrize("option", ["--tokens", "--rows"])
def test_numbers_below_one_are_refused(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any, option: str) -> None:
    monkeypatch.setattr("sys.argv", ["distil_eagle3.py", "head", option, "0"])
    with pytest.raises(SystemExit):
        script.main()
    assert f"{option} is 0; a whole number above 0 is needed" in capsys.readouterr().err


def test_texts_that_are_too_short(script: ModuleType, model: Any) -> None:
    with pytest.raises(ValueError, match="none of 1 texts has more than 4 tokens, as it takes to learn 3 drafts"):
        script.distil(model, [[1, 2, 3]], draft_vocab=96, epochs=1)


def test_it_learns_and_says_what_it_can_draft(
    script: ModuleType, distilled: tuple[dict[str, Any], heads.Tensors, list[float]], written: list[list[int]]
) -> None:
    config, tensors, losses = distilled
    assert losses[-1] < 0.7 * losses[0]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 1, 0]
    ids = (tensors["d2t"] + torch.arange(96)).tolist()
    assert ids == sorted(set(ids))
    assert tensors["t2d"].nonzero().flatten().tolist() == ids
    count = torch.bincount(torch.tensor(written).flatten(), minlength=heads.VOCAB)
    assert count[ids].min() >= count[[i for i in range(heads.VOCAB) if i not in set(ids)]].max()


def test_the_drafter_computes_what_was_trained(
    script: ModuleType,
    target: Path,
    model: Any,
    distilled: tuple[dict[str, Any], heads.Tensors, list[float]],
    written: list[list[int]],
    tmp_path: Path,
) -> None:
    """Along texts whose drafts come true, the training's later steps are the drafter's further passes."""
    config, tensors, _ = distilled
    script.save(tmp_path / "head", config, tensors)
    head = script.Head(config)
    head.load_state_dict({name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")})
    ids, right, drafted = tensors["d2t"] + torch.arange(96), 0, 0
    for text in written[:6]:
        trained = training_drafts(script, head, model, text, ids)
        bench = Bench(target, eagle3, tmp_path / "head")
        for known in range(6, len(text) - STEPS):
            start = 0 if known == 6 else known - 2
            states = fused(model, text[: known - 1], start)
            drafts = bench.step(text[:known], start, text[start : known - 1], states["layer.0"], states, STEPS)
            true = next((i for i in range(STEPS) if drafts[i] != text[known + i]), STEPS)
            assert drafts[: true + 1] == [trained[step][known - 2] for step in range(min(true + 1, STEPS))]
            right, drafted = right + (true > 0), drafted + 1
    assert right > drafted / 2


def fused(model: Any, ids: Sequence[int], start: int) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        hidden = model.model(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
    return {f"layer.{i}": hidden[i][0, start:].half().float() for i in range(3)}


def training_drafts(script: ModuleType, head: Any, model: Any, text: list[int], ids: torch.Tensor) -> list[list[int]]:
    """What each step of the training says at each place of `text`, in the target's ids."""
    sample, embedding = script.read(model, text, [2, 1, 0]), model.get_input_embeddings().weight
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    said = []
    with torch.no_grad():
        features = head.fc(sample.fused.float()[:-1])
        for step in range(STEPS):
            following = torch.cat((sample.ids[1 + step :], torch.zeros(step, dtype=torch.int64)))
            features = head.midlayer(embedding[following], features, keys, values)
            said.append(ids[head.lm_head(head.norm(features)).argmax(-1)].tolist())
    return said

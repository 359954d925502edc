"""Drafters propose what their papers say, whatever the steps were that brought the row there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modelrunner.model_states import draft_model, eagle, eagle3, medusa, mtp
from tests.model_states.drafters import heads, oracle
from tests.model_states.drafters.bench import Bench

PLUGINS = {"eagle": eagle, "eagle3": eagle3, "mtp": mtp, "medusa": medusa, "draft_model": draft_model}
K = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's checkpoint, with a module for multi-token prediction in it."""
    return heads.write(tmp_path_factory.mktemp("target"), heads.TARGET, heads.target_tensors() | heads.mtp_tensors())


@pytest.fixture(scope="module")
def transformers_model(target: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


def hidden_states(model: Any, ids: list[int]) -> dict[str, torch.Tensor]:
    """Of the target, for each token: `layer.i` what enters layer i, `last` the normed one that the head reads."""
    with torch.no_grad():
        found = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return {**{f"layer.{layer}": found[layer][0] for layer in range(heads.LAYERS)}, "last": found[-1][0]}


def wanted(kind: str, model: Any, known: list[int], changes: dict[str, Any]) -> list[int]:
    """K drafts after `known`, by the oracle."""
    states, weights = hidden_states(model, known[:-1]), model.state_dict()
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    if kind == "eagle":
        tensors = heads.eagle_tensors(**changes)
        own = tensors.get("embed_tokens.weight", embedding)
        return oracle.propose(oracle.eagle_head(tensors, heads.eagle_config()), lambda x: head @ x, own, known, states["last"], K)
    if kind == "mtp":
        return oracle.propose(oracle.mtp_head(heads.mtp_tensors(), heads.TARGET), lambda x: head @ x, embedding, known, states["last"], K)
    tensors = heads.eagle3_tensors(**{name: value for name, value in changes.items() if name != "config"})
    config = heads.EAGLE3 | changes.get("config", {})
    layer = changes.get("layer", "midlayer")
    fused = torch.cat([states[f"layer.{i}"] for i in config["eagle_aux_hidden_state_layer_ids"]], -1) @ tensors["fc.weight"].T

    def logits(x: torch.Tensor) -> torch.Tensor:
        own = tensors["lm_head.weight"] @ oracle.rms_norm(x, tensors["norm.weight"], config["rms_norm_eps"])
        ids = torch.arange(heads.VOCAB) if changes.get("full") else heads.draft_ids()
        return torch.full((heads.VOCAB,), -torch.inf).index_copy(0, ids, own)

    return oracle.propose(oracle.eagle3_head(tensors, config, layer), logits, embedding, known, fused, K)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {}),
    "eagle, shared embedding, bias": ("eagle", {"own_embedding": False, "bias": True}),
    "eagle3": ("eagle3", {}),
    "eagle3, own embedding": ("eagle3", {"own_embedding": True}),
    "eagle3, whole vocabulary, other order of layers": (
        "eagle3",
        {"full": True, "config": {"eagle_aux_hidden_state_layer_ids": [2, 0, 1], "draft_vocab_size": heads.VOCAB}},
    ),
    "eagle3, norm before residual": ("eagle3", {"layer": "layers.0", "config": {"norm_before_residual": True}}),
    "mtp": ("mtp", {}),
}


def bench(kind: str, target: Path, folder: Path, changes: dict[str, Any]) -> Bench:
    if kind == "mtp":
        return Bench(target, mtp, None)
    if kind == "eagle":
        return Bench(target, eagle, heads.write(folder, heads.eagle_config(), heads.eagle_tensors(**changes)))
    tensors = heads.eagle3_tensors(**{name: value for name, value in changes.items() if name != "config"})
    return Bench(target, eagle3, heads.write(folder, heads.EAGLE3 | changes.get("config", {}), tensors))


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    for _ in range(count):
        with torch.no_grad():
            ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids


def run(table: Bench, model: Any, known: list[int], start: int, queries: list[int]) -> list[int]:
    """A step of `queries` from position `start` on, after which the row knows `known`."""
    states = {name: value[start:] for name, value in hidden_states(model, [*known[:start], *queries]).items()}
    return table.step(known, start, queries, states["last"], states, K)


@pytest.mark.parametrize("case", CASES)
def test_proposals_are_the_papers(case: str, target: Path, transformers_model: Any, tmp_path: Path) -> None:
    """A prompt whole and in chunks; then steps of which some drafts were rejected, whose entries the next step writes again."""
    kind, changes = CASES[case]
    ids = greedy(transformers_model, [1, 20, 21, 22, 23, 90, 91, 92, 30, 31], 8)
    want = {n: wanted(kind, transformers_model, ids[:n], changes) for n in range(11, len(ids) + 1)}
    assert len({tuple(drafts) for drafts in want.values()}) > 3
    whole = bench(kind, target, tmp_path / "a", changes)
    assert run(whole, transformers_model, ids[:11], 0, ids[:10]) == want[11]
    chunked = bench(kind, target, tmp_path / "b", changes)
    for start, end in ((0, 4), (4, 5), (5, 9)):
        chunked.step(ids[:11], start, ids[start:end], *split(transformers_model, ids[:11], start, ids[start:end]), 0)
    assert run(chunked, transformers_model, ids[:11], 9, ids[9:10]) == want[11]
    for before, kept, wrong in ((11, 1, 2), (13, 0, 3), (14, 2, 0), (17, 0, 1)):
        queries = [*ids[before - 1 : before + kept], *[77, 78, 79][:wrong]]
        assert run(chunked, transformers_model, ids[: before + kept + 1], before - 1, queries) == want[before + kept + 1]


def test_a_draft_model_drafts_what_it_would_say(target: Path, transformers_model: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = heads.write(tmp_path / "small", heads.TARGET, heads.draft_model_tensors())
    small = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = greedy(transformers_model, [1, 20, 21, 22, 23, 90, 91, 92, 30, 31], 8)
    want = {n: greedy(small, ids[:n], K)[n:] for n in range(11, len(ids) + 1)}
    table = Bench(target, draft_model, folder)
    for start, end in ((0, 4), (4, 9)):
        table.step(ids[:11], start, ids[start:end], *split(transformers_model, ids[:11], start, ids[start:end]), 0)
    assert run(table, transformers_model, ids[:11], 9, ids[9:10]) == want[11]
    for before, kept, wrong in ((11, 1, 2), (13, 0, 3), (14, 2, 0), (17, 0, 1)):
        queries = [*ids[before - 1 : before + kept], *[77, 78, 79][:wrong]]
        assert run(table, transformers_model, ids[: before + kept + 1], before - 1, queries) == want[before + kept + 1]


def test_medusa_heads_draft_all_at_once(target: Path, transformers_model: Any, tmp_path: Path) -> None:
    """Three heads, though the configuration says two; the hidden state is that of the last token that counts."""
    tensors = heads.medusa_tensors()
    table = Bench(target, medusa, heads.write(tmp_path / "medusa", heads.MEDUSA, tensors))
    assert table.needs.max_tokens == 3
    known, queries = [1, 20, 21, 22, 23, 90], [22, 23, 77]  # 77 was rejected; 90 comes instead
    states, _ = split(transformers_model, known, 3, queries)
    hidden, want = states[1], []
    for head in range(3):
        block = hidden @ tensors[f"{head}.0.linear.weight"].T + tensors[f"{head}.0.linear.bias"]
        want.append(int((tensors[f"{head}.1.weight"] @ (hidden + block * block.sigmoid())).argmax()))
    assert table.step(known, 3, queries, *split(transformers_model, known, 3, queries), 3) == want
    assert table.step(known, 3, queries, *split(transformers_model, known, 3, queries), 1) == want[:1]


def split(model: Any, known: list[int], start: int, queries: list[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    states = {name: value[start:] for name, value in hidden_states(model, [*known[:start], *queries]).items()}
    return states["last"], states

"""Drafters propose what their papers say, whatever the steps were that brought the row there. Without an engine: see `bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelrunner.model_states import draft_model, eagle, eagle3, medusa, mtp
from tests.model_states.drafters import heads
from tests.model_states.drafters.bench import Bench
from tests.model_states.drafters.papers import Papers

K = 4
PROMPT = [1, 20, 21, 22, 23, 90, 91, 92, 30, 31]


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers(heads.write(tmp_path_factory.mktemp("target"), heads.TARGET, heads.target_tensors() | heads.mtp_tensors()))


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
    "draft_model": ("draft_model", {}),
}


def bench(kind: str, target: Path, folder: Path, changes: dict[str, Any]) -> Bench:
    own = {name: value for name, value in changes.items() if name != "config"}
    if kind == "mtp":
        return Bench(target, mtp, None)
    if kind == "draft_model":
        return Bench(target, draft_model, heads.write(folder, heads.TARGET, heads.draft_model_tensors()))
    if kind == "eagle":
        return Bench(target, eagle, heads.write(folder, heads.eagle_config(), heads.eagle_tensors(**own)))
    return Bench(target, eagle3, heads.write(folder, heads.EAGLE3 | changes.get("config", {}), heads.eagle3_tensors(**own)))


def run(table: Bench, papers: Papers, known: list[int], start: int, queries: list[int], count: int = K) -> list[int]:
    """A step of `queries` from position `start` on, after which the row knows `known`: its drafts."""
    states = {name: value[start:] for name, value in papers.hidden([*known[:start], *queries]).items()}
    return table.step(known, start, queries, states["last"], states, count)


@pytest.mark.parametrize("case", CASES)
def test_proposals_are_the_papers(case: str, papers: Papers, tmp_path: Path) -> None:
    """A prompt whole and in chunks; then steps of which some drafts were rejected, whose entries the next step writes again."""
    kind, changes = CASES[case]
    ids = papers.greedy(PROMPT, 8)
    proposed = {n: papers.propose(kind, ids[:n], K, **changes) for n in range(11, len(ids) + 1)}
    assert min(lead for drafts in proposed.values() for _, lead in drafts) > 1e-4
    want = {n: [token for token, _ in drafts] for n, drafts in proposed.items()}
    assert len({tuple(drafts) for drafts in want.values()}) > 3
    whole = bench(kind, papers.target, tmp_path / "a", changes)
    assert run(whole, papers, ids[:11], 0, ids[:10]) == want[11]
    chunked = bench(kind, papers.target, tmp_path / "b", changes)
    for start, end in ((0, 4), (4, 5), (5, 9)):
        run(chunked, papers, ids[:11], start, ids[start:end], 0)
    assert run(chunked, papers, ids[:11], 9, ids[9:10]) == want[11]
    for before, kept, wrong in ((11, 1, 2), (13, 0, 3), (14, 2, 0), (17, 0, 1)):
        queries = [*ids[before - 1 : before + kept], *[77, 78, 79][:wrong]]
        assert run(chunked, papers, ids[: before + kept + 1], before - 1, queries) == want[before + kept + 1]


def test_medusa_heads_draft_all_at_once(papers: Papers, tmp_path: Path) -> None:
    """Three heads, though the configuration says two; the hidden state is that of the last token that counts."""
    table = Bench(papers.target, medusa, heads.write(tmp_path / "medusa", heads.MEDUSA, heads.medusa_tensors()))
    assert table.needs.max_tokens == 3
    known, queries = [1, 20, 21, 22, 23, 90], [22, 23, 77]  # 77 was rejected; 90 comes instead
    want = [token for token, _ in papers.propose("medusa", known, 3)]
    assert run(table, papers, known, 3, queries, 3) == want
    assert run(table, papers, known, 3, queries, 1) == want[:1]

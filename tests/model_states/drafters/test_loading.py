"""What heads take and refuse: tensors that are missing or that nobody expects, other sizes, maps that lead astray."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from modelrunner.checkpoint import ModelCard
from modelrunner.errors import CheckpointError
from modelrunner.model_states import draft_model, eagle, eagle3, medusa, mtp
from modelrunner.model_states.common.card import called
from modelrunner.model_states.common.drafting import tensor_names
from modelrunner.model_states.draft_model.vocabulary import require_same_ids
from modelrunner.model_states.eagle3.config import fused_layers
from modelrunner.model_states.mtp.config import mtp_config
from modelrunner.offers import Decline
from modelrunner.testing import ByteTokenizer
from tests.model_states.drafters import heads
from tests.model_states.drafters.bench import Bench, read_card


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return heads.write(tmp_path_factory.mktemp("loading") / "target", heads.TARGET, heads.target_tensors() | heads.mtp_tensors())


def published(kind: str) -> tuple[ModuleType, dict[str, Any], heads.Tensors]:
    return {
        "eagle": (eagle, heads.eagle_config(), heads.eagle_tensors()),
        "eagle3": (eagle3, heads.EAGLE3, heads.eagle3_tensors()),
        "mtp": (mtp, heads.TARGET, heads.target_tensors() | heads.mtp_tensors()),
        "medusa": (medusa, heads.MEDUSA, heads.medusa_tensors()),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "gone"),
    [
        ("eagle", "layers.0.self_attn.k_proj.weight"),
        ("eagle3", "midlayer.hidden_norm.weight"),
        ("eagle3", "d2t"),
        ("eagle3", "lm_head.weight"),
        ("mtp", "model.mtp_layers.0.input_proj.weight"),
        ("medusa", "1.0.linear.bias"),
    ],
)
def test_missing_and_unexpected_tensors_are_listed(kind: str, gone: str, target: Path, tmp_path: Path) -> None:
    plugin, config, tensors = published(kind)
    del tensors[gone]
    stray = "model.mtp_layers.0.gate.weight" if kind == "mtp" else "input_norm.weight"
    tensors[stray] = torch.ones(64)
    with pytest.raises(CheckpointError) as error:
        Bench(target, plugin, heads.write(tmp_path / "head", config, tensors))
    assert f"1 tensors missing: {gone}. 1 tensors not expected: {stray}" in str(error.value)


@pytest.mark.parametrize(
    ("kind", "config", "tensors", "message"),
    [
        ("eagle", {"hidden_size": 32}, {}, "drafter head has hidden_size 32, target target has 64"),
        ("eagle", {"vocab_size": 300}, {}, "drafter head has a vocabulary of 300 ids, target target one of 331"),
        ("eagle3", {"hidden_size": 32}, {}, "drafter head has hidden_size 32, target target has 64"),
        ("eagle3", {"draft_vocab_size": 400}, {}, "draft_vocab_size is 400; 1 to 331 are possible"),
        ("eagle3", {"num_hidden_layers": 2}, {}, "num_hidden_layers is 2; an EAGLE-3 head has 1 decoder layer"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, {}, r"fuses the hidden states \[0, 1, 9\].*3 numbers from 0 to 3"),
        ("eagle3", {}, {"d2t": torch.full((128,), 300)}, "maps a draft id to 331, which is not in the target's vocabulary of 331 ids"),
        (
            "eagle3",
            {},
            {"fc.weight": torch.ones(64, 128)},
            r"fc.weight -> fc: weight of part 0 has shape \(64, 128\); \(64, 192\) is needed",
        ),
        ("medusa", {"hidden_size": 32}, {}, "hidden_size is 32 in the heads' configuration and 64 in the target's"),
    ],
)
def test_what_does_not_fit_the_target(
    kind: str, config: dict[str, Any], tensors: heads.Tensors, message: str, target: Path, tmp_path: Path
) -> None:
    plugin, full, stored = published(kind)
    with pytest.raises((ValueError, CheckpointError), match=message):
        Bench(target, plugin, heads.write(tmp_path / "head", full | config, stored | tensors))


def test_a_checkpoint_without_the_module(tmp_path: Path) -> None:
    """The offer sees it from the names alone, and so does the drafter that reads them all."""
    _, card = read_card(heads.write(tmp_path / "plain", heads.TARGET, heads.target_tensors()))
    told = r"none of its 30 tensors is called model.mtp_layers.0.\*"
    answer = mtp.drafter(None, SimpleNamespace(card=card))
    assert isinstance(answer, Decline)
    assert re.search(f"^plain has no module for multi-token prediction: {told}$", answer.reason)
    with pytest.raises(ValueError, match=told):
        mtp_config(card, tensor_names(card))


def test_the_names_that_tell_of_the_module(tmp_path: Path) -> None:
    """Those of an index, without a look into its files; of a GGUF file those of the card. Where they are not told, the offer stands."""
    folder = heads.write(tmp_path / "plain", heads.TARGET, heads.target_tensors())
    _, card = read_card(folder)

    def answer(card: ModelCard) -> str:
        return type(mtp.drafter(card, SimpleNamespace(card=None))).__name__

    own = f"{mtp.SOURCE}.input_proj.weight"
    for names, said in (([own, "a"], "Offer"), (["a", "b"], "Decline")):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
        assert answer(card) == said
        assert answer(replace(card, format="gguf", metadata={"gguf.tensor_names": tuple(names)})) == said
    assert answer(replace(card, format="dummy")) == answer(replace(card, format="torch")) == "Offer"
    (folder / "model.safetensors.index.json").write_text("{")
    assert answer(card) == "Offer", "what is wrong with the file is told when it is read"


def test_which_hidden_states_are_fused(tmp_path: Path) -> None:
    """Those that the head names, in either of two places; else a low, a middle and a high one. A nested layout is read like a flat one."""
    plain = {name: value for name, value in heads.EAGLE3.items() if not name.startswith("eagle")}
    heads.write(tmp_path / "plain", plain, {})
    _, card = read_card(tmp_path / "plain")
    assert fused_layers(card, 32) == (2, 16, 29)
    with pytest.raises(ValueError, match=r"\[2, 1, -1\] \(the default of a head whose configuration lacks"):
        fused_layers(card, 2)


def test_other_spellings_of_the_configuration(target: Path, tmp_path: Path) -> None:
    inner = {**heads.eagle_config(), "num_key_value_heads": 4, "vocab_size": 331}
    outer = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": inner,
        "draft_vocab_size": heads.DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": heads.FUSED,
        "norm_before_residual": True,
    }
    bench = Bench(target, eagle3, heads.write(tmp_path / "nested", outer, heads.eagle3_tensors(layer="layers.0", own_embedding=True)))
    config: Any = bench.drafter.config  # type: ignore[attr-defined]
    assert (config.source, config.norm_before_residual, config.own_embedding, config.layer_ids) == ("layers.0", True, True, (0, 1, 2))
    nested = {name: value for name, value in heads.EAGLE3.items() if not name.startswith("eagle")}
    nested["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [2, 1, 0]}
    bench = Bench(target, eagle3, heads.write(tmp_path / "ids", nested, heads.eagle3_tensors()))
    assert bench.needs.tap_points == ("layer.2", "layer.1", "layer.0")


@pytest.mark.parametrize("plugin", [eagle, eagle3, medusa, draft_model])
def test_heads_without_a_checkpoint_decline(plugin: ModuleType) -> None:
    answer = plugin.drafter(card=None)
    assert isinstance(answer, Decline)
    assert "speculation.model" in answer.reason


def test_a_draft_model_of_another_vocabulary(target: Path, tmp_path: Path) -> None:
    folder = heads.write(tmp_path / "other", heads.TARGET | {"vocab_size": 300}, {})
    with pytest.raises(ValueError, match="draft model other has a vocabulary of 300 ids, target target one of 331; they must share one"):
        Bench(target, draft_model, folder)


def test_ids_that_mean_something_else() -> None:
    class Swapped(ByteTokenizer):
        def token_bytes(self) -> list[bytes]:
            spelled = super().token_bytes()
            spelled[10], spelled[11] = spelled[11], spelled[10]
            return spelled

    require_same_ids(ByteTokenizer(), ByteTokenizer(), "target", "drafter")
    message = (
        r"target a and drafter b do not share a vocabulary \(of 331 and 331 ids\): id 10 is b'\\x07' in .* and b'\\x08' in the drafter's"
    )
    with pytest.raises(ValueError, match=message):
        require_same_ids(ByteTokenizer(), Swapped(), "a", "b")


def test_ids_are_compared_as_text_where_a_tokenizer_says_no_bytes() -> None:
    class Textual:
        vocab_size = 331

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return ByteTokenizer().decode([{10: 11, 11: 10}.get(token, token) for token in ids], skip_special_tokens)

    with pytest.raises(ValueError, match=r"id 10 is '\\x07' in the target's tokenizer and '\\x08' in the drafter's"):
        require_same_ids(ByteTokenizer(), Textual(), "a", "b")  # type: ignore[arg-type]


def test_a_target_that_nobody_named_has_its_files_name() -> None:
    card = ModelCard("", Path("/models/small.gguf"), "gguf", (), "llama")
    assert called(card) == "small.gguf"
    assert called(replace(card, name="org/small")) == "org/small"

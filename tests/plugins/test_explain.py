"""`modelrunner explain`: every question of an engine start, every answer, and the winner."""

from __future__ import annotations

import json
import re
import shutil
from argparse import Namespace
from pathlib import Path

import pytest

from modelrunner.checkpoint import ModelCard
from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Offer
from modelrunner.plugin_manager import PluginManager
from modelrunner.plugins.commands import explain
from modelrunner.settings import load_settings
from modelrunner.testing import ByteTokenizerPlugin, ScriptedPlugin, mixed, tiny_dense

HOOKS = ["model_source", "checkpoint_readers", "model_config", "tokenizer", "model_state", "device", "linear_scheme"]
HOOKS += ["attention_backend", "grammar_backend"]


def run(capsys: pytest.CaptureFixture[str], model: Path, *plugins: object, **settings: str) -> tuple[int, str]:
    code = explain.run(Namespace(model=str(model), settings=settings), PluginManager.load([ByteTokenizerPlugin(), *plugins], {}))
    return code, capsys.readouterr().out


def test_every_question_has_a_winner_for_a_model_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, tiny_dense(), device="cpu")
    assert code == 0
    assert [line.split(" for ")[0] for line in out.splitlines() if " for " in line and not line.startswith(" ")] == HOOKS
    assert "winner: dense of modelrunner:dense" in out
    assert "device for this engine, pinned to 'cpu'" in out
    assert out.count("winner: ") == len(HOOKS)


def test_a_drafter_is_asked_for_if_the_settings_name_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, tiny_dense(), device="cpu", **{"speculation.drafter": "ngram"})
    assert code == 0
    asked = [line.split(" for ")[0] for line in out.splitlines() if " for " in line and not line.startswith(" ")]
    assert asked == [*HOOKS[:6], "drafter", *HOOKS[6:]]
    assert "winner: ngram of modelrunner:ngram" in out


def test_a_checkpoint_without_the_module_that_should_draft(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, tiny_dense(), device="cpu", **{"speculation.drafter": "mtp"})
    assert code == 1
    assert re.search(r"modelrunner:mtp declined: .* tensors is called model\.mtp_layers\.0\.\*", out)
    assert "offers mtp" not in out


@pytest.mark.parametrize(("setting", "value"), [("speculation.model", "some/head"), ("pin.drafter", "ngram")])
def test_what_says_what_drafts_while_nothing_does_is_told(capsys: pytest.CaptureFixture[str], setting: str, value: str) -> None:
    """An engine refuses to start with it, so the report says so, and its status too."""
    code, out = run(capsys, tiny_dense(), device="cpu", **{setting: value})
    assert code == 1
    assert f"drafter is not asked for: {setting} is {value!r}, but speculation.drafter is none" in out
    assert "winner: paged" in out or "winner: rows" in out, "the questions behind it are put all the same"


def test_who_loses_and_why_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    class Rival:
        @hookimpl
        def model_state(self, card: object) -> Offer[object]:
            return Offer("rival", lambda: None, reason="always there")

        @hookimpl
        def device(self) -> None:
            raise RuntimeError("no driver")

    code, out = run(capsys, tiny_dense(), Rival(), device="cpu")
    assert code == 1
    assert "Rival offers rival (exact): always there" in out
    assert "no winner: Equally good offers (exact)" in out
    assert "pin.model_state=" in out
    assert "Rival failed: RuntimeError: no driver" in out
    assert "winner: cpu of modelrunner:devices" in out


def test_a_broken_plugin_that_keeps_a_fallback_out_is_named_with_its_cause() -> None:
    class Broken:
        @hookimpl
        def tokenizer(self) -> None:
            raise RuntimeError("no vocabulary")

    manager = PluginManager.load([Broken(), Fallback()], {}, discover=False)
    choice, lines = explain.Report(manager, load_settings({})).ask("tokenizer", card=None, settings=None)
    assert choice is None
    assert "is broken: plugin 'argument:" in lines[-1]
    assert "Broken' (an object of module " in lines[-1]
    assert "failed in hook 'tokenizer': RuntimeError: no vocabulary" in lines[-1]


class Fallback:
    @hookimpl
    def tokenizer(self) -> Offer[object]:
        return Offer("plain", lambda: None, "fallback")


def test_an_unknown_architecture_is_told_near_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(tiny_dense(), tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"architectures": ["LamaForCausalLM"], "model_type": "lama"}))
    code, out = run(capsys, tmp_path / "m", device="cpu")
    assert code == 1
    assert "No plugin offers a model_state for architectures ['LamaForCausalLM']" in out
    assert "Near names: LlamaForCausalLM" in out


def test_a_model_that_is_nowhere_stops_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, tmp_path / "nothing")
    assert code == 1
    assert "model_state for" not in out


@pytest.mark.parametrize("method", ["__init__", "declare"])
def test_a_model_state_that_raises_is_reported(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It ended in a traceback."""

    def fail(*_: object) -> None:
        raise ValueError("no such heads")

    plugin = ScriptedPlugin(mixed())
    plugin.state = type("Broken", (plugin.state,), {method: fail})
    code = explain.run(Namespace(model="scripted", settings={"device": "cpu"}), PluginManager.load([plugin], {}))
    out = capsys.readouterr().out
    assert code == 1
    assert re.search(r"winner: (packed of modelrunner:cpu_kernels|plain of modelrunner:linear_schemes)", out), "the other questions are put"
    assert "attention_backend is not asked for: model_state scripted (" in out
    assert "ValueError: no such heads" in out


def test_a_name_in_the_lists_that_is_no_plugin_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    manager = PluginManager.load([ByteTokenizerPlugin()], {"MODELRUNNER_DISABLE_PLUGINS": "demo_modl"})
    explain.run(Namespace(model=str(tiny_dense()), settings={"device": "cpu"}), manager)
    assert "warning: MODELRUNNER_DISABLE_PLUGINS names 'demo_modl', which is not installed. Did you mean" in capsys.readouterr().out


def test_a_fallback_that_wins_over_a_near_name_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    class Near:
        @hookimpl
        def model_state(self, card: object) -> Decline:
            return Decline("another architecture", accepts=("SCRIPTEDForCausalLM",))

    class Fallback:
        @hookimpl
        def model_state(self, card: object) -> Offer[object]:
            return Offer("any", lambda: None, "fallback")

    manager = PluginManager.load([Near(), Fallback()], {}, discover=False)
    card = ModelCard("m", Path("m"), "dummy", ("ScriptedForCausalLM",), "scripted")
    _, lines = explain.Report(manager, load_settings()).ask("model_state", card=card, settings=None)
    text = "\n".join(lines)
    assert "  winner: any of " in text
    assert "  notice: the fallback 'any' runs" in text
    assert "it accepts 'SCRIPTEDForCausalLM', which is nearly 'ScriptedForCausalLM'" in text

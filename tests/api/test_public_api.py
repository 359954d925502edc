"""What plugins and users build on changes only together with the interface's version.

`public_api.txt` is the interface of the version in its first line. After a change, raise API_VERSION in core/hookspecs.py (its second
number for additions, its first for what breaks a plugin) and run `python -P tests/api/test_public_api.py`.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "plugins_fixtures"))
from signatures import describe, signature

from modelrunner import hookspecs
from modelrunner.plugin_contract import HOOKS

SNAPSHOT = Path(__file__).with_name("public_api.txt")
PUBLIC = {
    "offers": ["Offer", "Decline"],
    "model_state": [
        *["ModelState", "Needs", "CacheGroup", "FullAttention", "SlidingWindow", "RecurrentState", "StaticBuffer"],
        *["BuildContext", "Shard", "Yes", "No"],
    ],
    "media": ["MediaNeeds", "MediaProcessor", "MediaItem", "MediaRun", "Expanded", "Video", "EncoderInput", "MediaBatch"],
    "weights": ["WeightMap", "Target"],
    "batch": ["Batch"],
    "request_table": ["Column"],
    "attention": ["AttentionBackend", "AttentionMeta", "BoundAttention"],
    "linear": ["LinearScheme", "Linear", "LinearFactory"],
    "ops": ["Register", "Ops", "Tolerance"],
    "device": ["Device", "Event", "PinnedBuffer"],
    "taps": ["Tap", "Result", "ModelInfo"],
    "logits_processors": ["LogitsProcessor", "RegisterProcessor"],
    "observers": ["Observer", "StepReport", "RequestStart", "RequestFinish"],
    "speculation": ["Drafter", "DrafterNeeds", "TargetModel", "DraftBuild", "DraftStep", "DraftPass"],
    "checkpoint": ["CheckpointReader", "ModelCard"],
    "text": ["Tokenizer"],
    "grammar": ["GrammarBackend", "Grammar", "Matcher", "Vocabulary"],
    "structured_outputs": ["StructuredOutputsParams"],
    "cli": ["Command"],
    "request": ["SamplingParams", "RequestOutput", "CompletionOutput"],
    "logprobs": ["Logprob"],
    "llm": ["LLM"],
    "beam_search": ["BeamSearchParams", "BeamSearchSequence", "BeamSearchOutput"],
    "async_llm": ["AsyncLLM"],
    "testing.conformance": [
        *["KernelConformance", "LinearSchemeConformance", "DeviceConformance", "LogitsProcessorConformance", "DrafterConformance"],
        "transformers_checkpoint",
    ],
    "testing.conformance.case": ["StateCase"],
}


def interface() -> str:
    """The public interface as text, without the version."""
    lines = [f"hook {name}{signature(getattr(hookspecs.HookSpecs, name), drop_self=True)}" for name in HOOKS]
    for module, names in PUBLIC.items():
        for name in names:
            head, *rest = describe(getattr(importlib.import_module(f"modelrunner.{module}"), name))
            lines += ["", f"modelrunner.{module}: {head}", *rest]
    return "\n".join(lines) + "\n"


def complaint(snapshot: str, version: str, now: str) -> str:
    """Why `snapshot` does not go with the interface `now` of `version`; empty when it does."""
    head, _, old = snapshot.partition("\n")
    again = "run python -P tests/api/test_public_api.py"
    if old == now:
        return "" if head == f"API {version}" else f"{head!r} is the snapshot's version, API_VERSION is {version}: {again}"
    changes = "\n".join(difflib.unified_diff(old.splitlines(), now.splitlines(), "snapshot", "now", lineterm="", n=0))
    advice = again if head != f"API {version}" else f"raise API_VERSION in core/hookspecs.py, then {again}"
    return f"the public interface changed: {advice}\n{changes}"


def test_the_interface_changes_only_with_its_version() -> None:
    problem = complaint(SNAPSHOT.read_text(encoding="utf-8"), hookspecs.API_VERSION, interface())
    assert not problem, problem


def test_a_changed_signature_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hook, a method, a setting of a request: none can change unseen."""
    from modelrunner.device import Device
    from modelrunner.observers import Observer

    before = f"API 1.0\n{interface()}"
    assert complaint(before, "1.0", interface()) == ""

    def on_step(self: Observer, report: object, again: int = 0) -> None: ...

    monkeypatch.setattr(Observer, "on_step", on_step)
    found = complaint(before, "1.0", interface())
    assert "raise API_VERSION" in found
    assert "+  on_step(self: Observer, report: object, again: int = 0) -> None" in found
    assert "raise API_VERSION" not in complaint(before, "1.1", interface())
    monkeypatch.delattr(Device, "trim")
    assert "-  trim(self) -> None" in complaint(before, "1.0", interface())


def test_a_new_version_needs_a_new_snapshot() -> None:
    assert "API_VERSION is 1.1" in complaint(f"API 1.0\n{interface()}", "1.1", interface())


def test_nothing_of_it_depends_on_the_process() -> None:
    text = interface()
    assert " at 0x" not in text
    for name in ("hook observer(", "abstract forward(", "temperature: float = ", "num_generated: int", "wait(self) -> None"):
        assert name in text


if __name__ == "__main__":
    SNAPSHOT.write_text(f"API {hookspecs.API_VERSION}\n{interface()}", encoding="utf-8")

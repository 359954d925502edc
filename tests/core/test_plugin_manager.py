"""Registering, asking and loading: every plugin on its own, and every error by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plugin_objects import broken, choose, load, offering, plugin, refused

from modelrunner.checkpoint import ModelCard
from modelrunner.errors import CheckpointError, PluginError, PluginWarning
from modelrunner.hookspecs import HookSpecs, hookimpl
from modelrunner.offers import Decline, Offer
from modelrunner.plugin_contract import COMPONENTS, HOOKS, INSTANCES, VALUES
from modelrunner.plugin_manager import PluginManager, forget

CARD = ModelCard("tiny", Path("tiny"), "dummy", ("LlamaForCausalLM",), "llama")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    forget()


# Loading what was chosen


def load_error(hook: str, value: Callable[[], Any], **arguments: Any) -> str:
    manager = load(plugin("a", **{hook: lambda: Offer("x", value)}))
    with pytest.raises(PluginError) as caught:
        manager.choose(hook, **arguments).load()
    return str(caught.value)


def test_an_error_while_loading_names_plugin_distribution_and_cause() -> None:
    text = load_error("device", lambda: 1 / 0, settings=None)
    for part in (
        "device 'x' of plugin 'argument:a'",
        "an object of module 'a', given by plugins=[...]",
        "ZeroDivisionError: division by zero",
    ):
        assert part in text


def test_our_own_errors_pass_through_with_a_note() -> None:
    def missing() -> Path:
        raise CheckpointError("config.json is missing")

    manager = load(plugin("a", model_source=lambda name: Offer("x", missing)))
    with pytest.raises(CheckpointError, match=r"^config.json is missing") as caught:
        manager.choose("model_source", name="m", settings=None).load()
    assert "argument:a" in caught.value.__notes__[0]


def test_a_component_that_is_no_subclass_is_refused() -> None:
    assert "a subclass of modelrunner.device.Device is needed" in load_error("device", lambda: int, settings=None)
    assert "Path is needed" in load_error("model_source", lambda: "m", name="m", settings=None)
    assert "int lacks" in load_error("tokenizer", lambda: 3, card=CARD, settings=None)


def test_every_component_hook_has_a_check() -> None:
    """A new hook that makes offers must say what they load."""
    assert set(HOOKS) - {*COMPONENTS, *VALUES, *INSTANCES, "tokenizer"} == {
        "settings_sections",
        "cli_commands",
        "kernels",
        "logits_processors",
    }
    assert set(HOOKS) == {name for name in vars(HookSpecs) if not name.startswith("_")}


# Registering


def test_registering_again_changes_nothing() -> None:
    module = plugin("a", device=lambda settings: Offer("x", lambda: None))
    manager = load(module, module)
    assert manager.register(module) == "argument:a"
    assert [info.name for info in manager.describe()] == ["argument:a"]
    assert len(manager.ask("device", settings=None)) == 1


def test_two_objects_of_one_class_are_two_plugins() -> None:
    class Plugin:
        @hookimpl
        def device(self, settings: object) -> None:
            return None

    assert [info.name.rpartition(".")[2] for info in load(Plugin(), Plugin()).describe()] == ["Plugin", "Plugin#2"]


def test_a_refused_plugin_leaves_nothing_registered() -> None:
    manager = load()
    half = plugin("half", device=lambda settings: Offer("x", lambda: None), model_config=lambda card, extra: None)
    with pytest.raises(PluginError) as caught:
        manager.register(half)
    assert "hook 'model_config'" in str(caught.value)
    assert "card, extra" in str(caught.value)
    assert manager.ask("device", settings=None) == ()
    assert manager.describe() == []


@pytest.mark.parametrize(
    ("hooks", "says"),
    [
        ({"modelstate": lambda card: None}, "unknown hook 'modelstate', defined as modelstate(card); did you mean 'model_state'?"),
        ({"device": lambda *arguments: None}, "it is not given *arguments; its arguments are (settings)"),
        ({}, "no function marked @modelrunner.hookimpl"),
    ],
)
def test_what_is_wrong_is_said_with_hook_and_signature(hooks: dict[str, Any], says: str) -> None:
    for hook, function in hooks.items():
        function.__name__ = hook
    with pytest.raises(PluginError) as caught:
        load(plugin("a", **hooks))
    assert says in str(caught.value)


def test_all_problems_of_a_plugin_are_reported_at_once() -> None:
    with pytest.raises(PluginError) as caught:
        load(plugin("a", nonsense=lambda: None, device=lambda gpu: None))
    assert "'nonsense'" in str(caught.value)
    assert "gpu" in str(caught.value)


def test_wrappers_are_refused() -> None:
    module = plugin("a")
    module.__dict__["device"] = hookimpl(wrapper=True)(lambda settings: (yield))
    with pytest.raises(PluginError, match="wrappers are not supported"):
        load(module)


def test_a_class_is_refused() -> None:
    class Plugin: ...

    with pytest.raises(PluginError, match="is a class; pass an instance"):
        load(Plugin)


def test_a_module_named_by_text_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_by_name.py").write_text(
        "from modelrunner.hookspecs import hookimpl\nMODELRUNNER_API = '>=1'\n@hookimpl\ndef device(settings): return None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load("acme_by_name").describe()[0].name == "argument:acme_by_name"
    alone = PluginManager.load("acme_by_name", {}, discover=False)
    assert [info.name for info in alone.describe()] == ["argument:acme_by_name"]
    with pytest.raises(PluginError, match="'acme_nowhere', asked for by name, could not be imported"):
        load("acme_nowhere")


@pytest.mark.parametrize("body", ["raise OSError('no driver')", "return 'cuda'"])
@pytest.mark.parametrize("hook", ["device(settings)", "settings_sections()", "kernels(register, device)"])
def test_a_module_named_by_text_whose_hook_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str, body: str) -> None:
    stage = hook.partition("(")[0]
    name = f"acme_fails_{stage}_{len(body)}"
    text = f"from modelrunner.hookspecs import hookimpl\nMODELRUNNER_API = '>=1'\n@hookimpl\ndef {hook}: {body}\n"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    manager = load(name, offering("a", "cpu"))
    asked: dict[str, Callable[[], Any]] = {
        "device": lambda: choose(manager),
        "settings_sections": lambda: manager.collect(stage),
        "kernels": lambda: manager.call(stage, register=Names([]), device=None),
    }
    with pytest.raises(PluginError) as caught:
        asked[stage]()
    origin = f"plugin 'argument:{name}' (module '{name}', given by -p or plugins=[...]) failed in hook '{stage}'"
    assert str(caught.value).startswith(origin)
    assert str(caught.value).endswith(f"Repair it, or drop `-p {name}`, or its name from plugins=[...]")


def test_arguments_with_a_default_are_filled_in_too() -> None:
    seen: list[object] = []
    manager = load(plugin("a", model_state=lambda card, settings=None: seen.append(settings)))
    manager.ask("model_state", card=CARD, settings="settings")
    assert seen == ["settings"]


# Collecting and calling


def test_collect_leaves_out_the_failing_and_the_silent() -> None:
    manager = load(
        plugin("a", settings_sections=lambda: {"a": int}),
        plugin("b", settings_sections=lambda: 1 / 0),
        plugin("c", settings_sections=lambda: None),
        plugin("d", settings_sections=lambda: ["d"]),
    )
    assert manager.collect("settings_sections") == [("argument:a", {"a": int})]
    assert {failure.plugin: failure.stage for failure in manager.failures} == {
        "argument:b": "settings_sections",
        "argument:d": "settings_sections",
    }


class Names:
    """A register of names and their owners."""

    def __init__(self, names: list[tuple[str, str]], owner: str = "") -> None:
        self.names = names
        self.owner = owner

    def for_plugin(self, plugin: str) -> Names:
        return Names(self.names, plugin)

    def snapshot(self) -> Callable[[], None]:
        before = list(self.names)
        return lambda: self.names.__setitem__(slice(None), before)

    def op(self, name: str) -> None:
        self.names.append((self.owner, name))


def half_done(register: Names, device: object) -> None:
    register.op("one")
    raise RuntimeError("no second")


def test_call_undoes_half_done_work_and_goes_on() -> None:
    names = Names([])
    manager = load(plugin("half", kernels=half_done), plugin("a", kernels=lambda register: register.op("mine")))
    with pytest.warns(PluginWarning, match="no second"):
        manager.call("kernels", register=names, device=None)
    assert names.names == [("argument:a", "mine")]


def test_call_without_a_way_back_is_fatal() -> None:
    manager = load(plugin("half", kernels=lambda register: register.clear()))
    with pytest.raises(PluginError, match=r"'argument:half'.*hook 'kernels'.*no attribute 'clear'"):
        manager.call("kernels", register=object(), device=None)


def test_call_is_fatal_when_the_plugin_supplies_a_chosen_component() -> None:
    manager = load(plugin("npu", device=lambda settings: Offer("npu", lambda: None), kernels=half_done))
    choose(manager)
    with pytest.raises(PluginError, match="no second"):
        manager.call("kernels", register=Names([]), device=None)


def test_strict_makes_a_failing_answer_fatal() -> None:
    manager = load(offering("a", "cpu"), plugin("npu", device=broken), MODELRUNNER_STRICT_PLUGINS="1")
    assert "MODELRUNNER_STRICT_PLUGINS" in refused(manager)


def test_trace_prints_calls_and_answers(capsys: pytest.CaptureFixture[str]) -> None:
    manager = load(plugin("a", device=lambda settings: Decline("none here")), MODELRUNNER_TRACE_PLUGINS="1")
    manager.ask("device", settings=None)
    assert "hook device(settings) of argument:a -> Decline(reason='none here'" in capsys.readouterr().err


def test_nothing_is_warned_of_when_all_is_well() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager = load(offering("a", "cpu"))
        manager.warn_failures()
        assert choose(manager) == "cpu"

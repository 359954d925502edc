"""Registering, asking and choosing: every plugin on its own, and every error by name."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelrunner.checkpoint import ModelCard
from modelrunner.errors import CheckpointError, PluginError, PluginWarning
from modelrunner.hookspecs import HookSpecs, hookimpl
from modelrunner.offers import Decline, Offer
from modelrunner.plugin_contract import COMPONENTS, HOOKS, INSTANCES, VALUES
from modelrunner.plugin_manager import PluginManager, forget

CARD = ModelCard("tiny", Path("tiny"), "dummy", ("LlamaForCausalLM",), "llama")


def plugin(name: str, **hooks: Callable[..., Any]) -> types.ModuleType:
    """A plugin module with these hook implementations."""
    module = types.ModuleType(name)
    module.__dict__.update({hook: hookimpl(function) for hook, function in hooks.items()}, MODELRUNNER_API=">=1,<2")
    return module


def offering(name: str, offer: str, fit: Any = "exact", **more: Any) -> types.ModuleType:
    return plugin(name, device=lambda settings: Offer(offer, lambda: None, fit, **more))


def load(*plugins: object, **environ: str) -> PluginManager:
    return PluginManager.load(plugins, environ, discover=False)


def choose(manager: PluginManager, pin: str | None = None) -> str:
    return manager.choose("device", pin=pin, settings=None).offer.name


def refused(manager: PluginManager, pin: str | None = None) -> str:
    with pytest.raises(PluginError) as caught:
        choose(manager, pin)
    return str(caught.value)


def broken(settings: object) -> None:
    raise RuntimeError("no driver")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    forget()


# Choosing


def test_the_best_fit_wins_whatever_the_order() -> None:
    plugins = [offering("a", "any", "fallback"), offering("b", "family", "family"), offering("c", "mine")]
    assert choose(load(*plugins)) == choose(load(*reversed(plugins))) == "mine"
    assert choose(load(*plugins[:2])) == "family"


def test_a_tie_names_both_and_how_to_pin() -> None:
    text = refused(load(offering("a", "x"), offering("b", "y")))
    for part in ("'x' of plugin 'argument:a'", "'y' of plugin 'argument:b'", "pin.device=x or pin.device=y"):
        assert part in text


def test_replaces_settles_a_tie_and_only_at_equal_fit() -> None:
    assert choose(load(offering("a", "x"), offering("b", "y", replaces=frozenset({"x"})))) == "y"
    assert choose(load(offering("a", "x"), offering("b", "y", "family", replaces=frozenset({"x"})))) == "x"


def test_two_that_replace_each_other_tie() -> None:
    rivals = [offering("a", "x", replaces=frozenset({"y"})), offering("b", "y", replaces=frozenset({"x"}))]
    assert "Equally good" in refused(load(*rivals))


def test_a_pin_takes_a_worse_fit_and_an_unknown_one_lists_the_names() -> None:
    manager = load(offering("a", "mine"), offering("b", "other", "fallback"))
    assert choose(manager, "other") == "other"
    text = refused(manager, "othr")
    assert "pin.device = 'othr'" in text
    assert "Offered: mine, other" in text
    assert "Did you mean 'other'?" in text
    assert "Did you mean 'other'?" in refused(manager, "OTHER")


def test_equal_names_are_told_apart_by_plugin() -> None:
    manager = load(offering("a", "npu"), offering("b", "npu"))
    assert "pin.device=argument:a or pin.device=argument:b" in refused(manager)
    assert manager.choose("device", pin="argument:b", settings=None).plugin == "argument:b"


def test_a_fallback_needs_everybody_well_unless_pinned() -> None:
    manager = load(offering("a", "cpu", "fallback"), plugin("npu", device=broken))
    text = refused(manager)
    assert "Only the fallback 'cpu' fits" in text
    assert "RuntimeError: no driver" in text
    assert "Repair argument:npu, or leave it out of plugins=[...];" in text
    assert "MODELRUNNER_DISABLE_PLUGINS" not in text, "which does not touch plugins that are passed"
    with pytest.warns(PluginWarning, match="no driver"):
        assert choose(manager, "cpu") == "cpu"


def test_a_failure_in_one_hook_does_not_spoil_the_others() -> None:
    manager = load(
        plugin("a", device=lambda settings: Offer("cpu", lambda: None, "fallback"), model_config=lambda card: 1 / 0),
    )
    manager.ask("model_config", card=CARD)
    with pytest.warns(PluginWarning, match="ZeroDivisionError"):
        assert choose(manager) == "cpu"


def test_a_failing_answer_does_not_stop_a_good_one_and_warns_once_per_process() -> None:
    plugins = [offering("a", "cpu", "family"), plugin("npu", device=broken)]
    with pytest.warns(PluginWarning, match=r"'argument:npu'.*failed in hook 'device': RuntimeError: no driver") as caught:
        assert [choose(load(*plugins)) for _ in range(2)] == ["cpu", "cpu"]
    assert len(caught) == 1


def test_an_answer_of_the_wrong_type_is_named() -> None:
    manager = load(plugin("a", device=lambda settings: "cuda"))
    assert "answered 'cuda' (str); Offer, Decline, a list of these, or None is needed" in refused(manager)


def test_a_plugin_may_offer_several() -> None:
    manager = load(
        plugin("a", device=lambda settings: [Offer("cpu", lambda: 1, "family"), Decline("no cuda here"), Offer("x", lambda: 2, "fallback")])
    )
    assert choose(manager) == "cpu"
    assert choose(manager, "x") == "x"


def test_nothing_fits_tells_who_said_what_and_near_names() -> None:
    manager = load(
        plugin("dense", model_state=lambda card: Decline("only these", ("LlamaForCausalLM", "Qwen3ForCausalLM"))),
        plugin("quiet", model_state=lambda card: None),
        plugin("ill", model_state=lambda card: 1 / 0),
    )
    card = ModelCard("m", Path("m"), "dummy", ("LamaForCausalLM",), "lama")
    with pytest.raises(PluginError) as caught:
        manager.choose("model_state", card=card, settings=None)
    text = str(caught.value)
    for part in (
        "architectures ['LamaForCausalLM'] (model_type 'lama') of model 'm'",
        "Near names: LlamaForCausalLM.\n",
        "`modelrunner new-plugin NAME --kind model-state --architecture LamaForCausalLM` writes one",
        "argument:dense declined: only these (accepts LlamaForCausalLM, Qwen3ForCausalLM)",
        "not their business: argument:quiet",
        "'argument:ill'",
        "ZeroDivisionError",
        "`modelrunner plugins` lists the 3 that are loaded, 3 of them with this hook.",
    ):
        assert part in text


def test_a_pinned_plugin_that_declines_says_why_and_nobody_else_does() -> None:
    manager = load(
        plugin("eagle", drafter=lambda card: Decline("it has weights: name them")),
        plugin("medusa", drafter=lambda card: Decline("so has this")),
        plugin("ngram", drafter=lambda card: Offer("ngram", lambda: None)),
    )
    with pytest.raises(PluginError) as caught:
        manager.choose("drafter", pin="eagle", pinned_by="speculation.drafter", card=None, target=None, settings=None)
    first, second = str(caught.value).splitlines()
    assert first == "speculation.drafter = 'eagle', which declined this engine: it has weights: name them. Offered: ngram."
    assert second.startswith("`modelrunner plugins` lists the 3")


@pytest.mark.parametrize("pin", ["dens", None])
def test_plugins_that_were_not_asked_are_counted_and_not_listed(pin: str | None) -> None:
    """The list of all that is installed would bury what was asked for, what was heard and what is near."""
    others = [plugin(f"other{i}", device=lambda settings: None) for i in range(30)]
    offers = [Offer("dense", lambda: None)] if pin else []
    manager = load(plugin("mine", model_state=lambda card: [*offers, Decline("no", ("LlamaForCausalLM",))]), *others)
    card = ModelCard("m", Path("m"), "dummy", ("LamaForCausalLM",), "lama")
    with pytest.raises(PluginError) as caught:
        manager.choose("model_state", pin=pin, card=card, settings=None)
    text = str(caught.value)
    assert "other" not in text.replace("another", "")
    assert "`modelrunner plugins` lists the 31 that are loaded, 1 of them with this hook" in text
    assert ("Did you mean 'dense'?" if pin else "Near names: LlamaForCausalLM.") in text.splitlines()[1]
    assert len(text) < 700


def test_the_common_ending_makes_no_name_near() -> None:
    manager = load(plugin("dense", model_state=lambda card: Decline("only these", ("LlamaForCausalLM", "Qwen3ForCausalLM"))))
    card = ModelCard("m", Path("m"), "dummy", ("GlmForCausalLM",), "glm")
    with pytest.raises(PluginError) as caught:
        manager.choose("model_state", card=card, settings=None)
    assert "Near names" not in str(caught.value)


def test_a_wrong_pin_is_told_near_offers_only() -> None:
    offers = plugin("mine", model_state=lambda card: [Offer("dense", lambda: None), Decline("no", ("LlamaForCausalLM",))])
    card = ModelCard("m", Path("m"), "dummy", ("LamaForCausalLM",), "lama")
    with pytest.raises(PluginError, match="Did you mean 'dense'") as caught:
        load(offers).choose("model_state", pin="dens", card=card, settings=None)
    assert "Near names" not in str(caught.value)


def test_the_default_model_is_called_that() -> None:
    with pytest.raises(PluginError, match=r"for the default model \(small\.gguf\) \(gguf\)"):
        load().choose("tokenizer", card=ModelCard("", Path("small.gguf"), "gguf", (), ""), settings=None)
    with pytest.raises(PluginError, match="for the default model"):
        load().choose("model_source", name="", settings=None)


def declining(accepts: str) -> types.ModuleType:
    return plugin("mine", model_state=lambda card: Decline("another architecture", (accepts,)))


def wants(architecture: str) -> ModelCard:
    return ModelCard("m", Path("m"), "dummy", (architecture,), "llama")


@pytest.mark.parametrize("pin", [None, "mine"])
def test_near_names_are_found_whatever_the_case(pin: str | None) -> None:
    with pytest.raises(PluginError, match=r"Near names: ORCHIDForCausalLM\."):
        load(declining("ORCHIDForCausalLM")).choose("model_state", pin=pin, card=wants("orchidforcausallm"), settings=None)


FALLBACK = plugin("any", model_state=lambda card: Offer("any", lambda: None, "fallback"))


@pytest.mark.parametrize(("accepts", "wanted"), [("OrchidForCausalLM", "ORCHIDForCausalLM"), ("LlamaForCausalLM", "LamaForCausalLM")])
def test_a_fallback_that_wins_over_a_near_name_is_told(accepts: str, wanted: str) -> None:
    with pytest.warns(PluginWarning, match=f"argument:mine declined; it accepts '{accepts}', which is nearly '{wanted}'") as caught:
        load(declining(accepts), FALLBACK).choose("model_state", card=wants(wanted), settings=None)
    assert "\n" not in str(caught[0].message)


@pytest.mark.parametrize(
    ("accepts", "wanted", "pin"),
    [
        ("Gemma3ForCausalLM", "Gemma2ForCausalLM", None),  # another version
        ("MistralForCausalLM", "MixtralForCausalLM", None),  # another family
        ("LlamaForCausalLM", "OrchidForCausalLM", None),  # the card's model_type is llama
        ("OrchidForCausalLM", "OrchidForCausalLM", None),  # declined for another reason
        ("OrchidForCausalLM", "ORCHIDForCausalLM", "any"),  # asked for
    ],
)
def test_a_fallback_that_is_right_is_not_remarked_on(accepts: str, wanted: str, pin: str | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(declining(accepts), FALLBACK).choose("model_state", pin=pin, card=wants(wanted), settings=None)


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

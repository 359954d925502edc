"""Choosing between offers: who wins, and what is said when nobody does."""

from __future__ import annotations

import types
import warnings
from pathlib import Path

import pytest
from plugin_objects import broken, choose, load, offering, plugin, refused

from modelrunner.checkpoint import ModelCard
from modelrunner.errors import PluginError, PluginWarning
from modelrunner.offers import Decline, Offer
from modelrunner.plugin_manager import forget

CARD = ModelCard("tiny", Path("tiny"), "dummy", ("LlamaForCausalLM",), "llama")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    forget()


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

"""B59: a broken plugin is loud. Four small distributions: one works, one raises at import, one raises half-way through its registration,
one returns the wrong type."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from plugin_site import PluginSite

from modelrunner.checkpoint import ModelCard
from modelrunner.errors import PluginError, PluginWarning
from modelrunner.ops import Registry
from modelrunner.plugin_manager import PluginManager
from modelrunner.testing import mixed, scripted

ALL = ("acme-good", "acme-import-error", "acme-half", "acme-wrong-type")
CARD = ModelCard("m", Path("m"), "dummy", ("AcmeGoodForCausalLM",), "acme")
BROKEN = {
    "acme-import-error:npu": ("acme-import-error 0.3.0", "RuntimeError: libnpu.so.7 is missing"),
    "acme-half:half": ("acme-half 0.4.0", "RuntimeError: no second operation"),
    "acme-wrong-type:answer": ("acme-wrong-type 0.5.0", "answered 'AcmeState' (str)"),
    "acme-wrong-type:number": ("acme-wrong-type 0.5.0", "42 (int) with no function marked @modelrunner.hookimpl"),
}


class FakeDevice:
    """The `kernels` hook asks only for the type."""

    type = "cpu"
    name = "cpu"


def test_default_start_uses_the_good_one_and_warns_once_of_each_broken_one(plugin_site: PluginSite) -> None:
    plugin_site.install(*ALL)

    def start() -> Registry:
        manager = PluginManager.load(environ={})
        manager.warn_failures()
        assert manager.choose("model_state", card=CARD, settings=None).plugin == "acme-good:good"
        registry = Registry()
        manager.call("kernels", register=registry, device=FakeDevice())
        return registry

    with pytest.warns(PluginWarning) as caught:
        registry, _ = start(), start()  # two engines in one process
    texts = [str(warning.message) for warning in caught]
    for plugin, (distribution, cause) in BROKEN.items():
        (text,) = [text for text in texts if plugin in text.split(" (")[0]]
        for part in (f"distribution {distribution}", "group 'modelrunner'", cause):
            assert part in text
    explained = registry.resolve("cpu").explain()
    assert "acme_double" in explained
    assert "half_one" not in explained


def test_an_engine_starts_beside_broken_plugins_and_says_so(plugin_site: PluginSite) -> None:
    plugin_site.install(*ALL)
    subject = scripted(mixed(), "mixed")
    with pytest.warns(PluginWarning) as caught:
        engine = subject.engine()
    assert engine.assembly.device.name == "cpu"
    for plugin in BROKEN:
        assert len([w for w in caught if f"'{plugin}'" in str(w.message).split(" (")[0]]) == 1
    engine.close()


def test_strict_start_fails_naming_it(plugin_site: PluginSite) -> None:
    plugin_site.install(*ALL)
    with pytest.raises(PluginError) as caught:
        PluginManager.load(environ={"MODELRUNNER_STRICT_PLUGINS": "1"})
    assert "acme-import-error:npu" in str(caught.value)
    assert "libnpu.so.7 is missing" in str(caught.value)


@pytest.mark.parametrize("pin", ["npu", "acme-import-error", "acme-import-error:npu"])
def test_a_pinned_broken_plugin_stops_the_start(plugin_site: PluginSite, pin: str) -> None:
    plugin_site.install(*ALL)
    manager = PluginManager.load(environ={})
    with pytest.raises(PluginError, match=r"The pinned plugin 'acme-import-error:npu'.*libnpu\.so\.7 is missing"):
        manager.choose("model_state", pin=pin, card=CARD, settings=None)


@pytest.mark.filterwarnings("ignore::modelrunner.errors.PluginWarning")
def test_a_broken_plugin_that_supplies_the_device_stops_the_start(plugin_site: PluginSite) -> None:
    """The selected device is named by a setting; there is no change to another device."""
    plugin_site.install(*ALL)
    with pytest.raises(PluginError, match=r"The pinned plugin 'acme-import-error:npu'.*libnpu\.so\.7 is missing"):
        scripted(mixed(), "mixed").engine(device="npu")


def test_a_plugin_whose_offer_was_taken_must_register_all(plugin_site: PluginSite) -> None:
    plugin_site.install("acme-half")
    manager = PluginManager.load(environ={})
    card = ModelCard("m", Path("m"), "dummy", (), "half")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        assert manager.choose("linear_scheme", pin="half", card=card, device=FakeDevice(), settings=None).offer.name == "half"
    with pytest.raises(PluginError, match=r"'acme-half:half'.*acme-half 0\.4\.0.*no second operation"):
        manager.call("kernels", register=Registry(), device=FakeDevice())


def test_a_mistyped_allow_list_lists_the_names_found(plugin_site: PluginSite) -> None:
    plugin_site.install(*ALL)
    manager = PluginManager.load(environ={"MODELRUNNER_ONLY_PLUGINS": "typo-plugin"})
    with pytest.warns(PluginWarning) as caught:
        manager.warn_failures()
    (text,) = [str(w.message) for w in caught if "typo-plugin" in str(w.message)]
    assert all(name in text for name in ("acme-good:good", "acme-half:half", "acme-import-error:npu", "modelrunner:commands"))


def test_stale_metadata_beside_the_good_one(plugin_site: PluginSite) -> None:
    plugin_site.install("acme-good")
    plugin_site.metadata("acme-good", "1.1.0", {"good": "acme_good_before", "gone": "acme_good_before"})
    manager = PluginManager.load(environ={})
    asked = [answer.plugin for answer in manager.ask("model_state", card=CARD, settings=None)]
    assert asked.count("acme-good:good") == 1
    assert not [failure for failure in manager.failures if failure.plugin.startswith("acme-good")]
    (notice,) = manager.notices
    assert "acme-good 1.1.0" in notice
    assert "acme-good 1.2.0" in notice


def test_the_command_line_lists_them_and_goes_on(plugin_site: PluginSite) -> None:
    plugin_site.install(*ALL)
    code = f"import sys; sys.path.insert(0, {str(plugin_site.folder)!r}); from modelrunner.cli import main; sys.exit(main(['plugins']))"
    shown = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True).stdout
    assert all(plugin in shown for plugin in BROKEN if plugin != "acme-half:half")
    assert "libnpu.so.7 is missing" in shown

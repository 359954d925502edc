"""B62: old-interface plugins are refused at load, with plugin, needed and offered version or the exact method; the good one works."""

from __future__ import annotations

from pathlib import Path

import pytest
from plugin_site import PluginSite

from modelrunner import hookspecs
from modelrunner.checkpoint import ModelCard
from modelrunner.errors import PluginError
from modelrunner.plugin_manager import PluginManager

HEAD = "from modelrunner.hookspecs import hookimpl\nfrom modelrunner.offers import Offer\n"
HOOK = "@hookimpl\ndef model_state(card): return None\n"
STATE = """
MODELRUNNER_API = ">=1,<3"
def load():
    from modelrunner.model_state import ModelState
    class OldState(ModelState):
        def declare(self, card, settings): ...
        def weight_map(self, card): ...
        def build(self, ctx): ...
        def embed(self, batch, out): ...
        def forward(self, hidden, positions, attention, caches, tap): ...
        {last}
    return OldState
@hookimpl
def model_state(card): return Offer("old", load)
"""
REFUSED = {
    "interface-1": (f'MODELRUNNER_API = ">=1,<2"\n{HOOK}', "it needs interface '>=1,<2', modelrunner offers 2.0"),
    "declares-nothing": (HOOK, "it declares no MODELRUNNER_API; modelrunner offers interface 2.0"),
    "unknown-hook": (
        f'MODELRUNNER_API = ">=1,<3"\n{HOOK}@hookimpl\ndef sampler_step(logits): return logits\n',
        "unknown hook 'sampler_step', defined as sampler_step(logits)",
    ),
    "one-argument-too-many": (
        'MODELRUNNER_API = ">=1,<3"\n@hookimpl\ndef model_state(card, settings, world_size): return None\n',
        "hook 'model_state', defined as model_state(card, settings, world_size): it is not given world_size",
    ),
}
COMPONENTS = {
    "lacks-a-method": ("", "OldState lacks the required method logits(self, hidden"),
    "method-with-one-too-many": (
        "def logits(self, hidden, temperature): ...",
        "OldState.logits(self, hidden, temperature) cannot be called",
    ),
}
pytestmark = pytest.mark.filterwarnings("ignore::modelrunner.errors.PluginWarning")
GOOD_CARD = ModelCard("m", Path("m"), "dummy", ("AcmeGoodForCausalLM",), "acme")


@pytest.fixture(autouse=True)
def _interface_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core has moved on (and left the built-in plugins behind, which is no matter here)."""
    monkeypatch.setattr(hookspecs, "API_VERSION", "2.0")


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_load(plugin_site: PluginSite, name: str, together: bool) -> None:
    source, says = REFUSED[name]
    plugin_site.write(f"acme-{name}", HEAD + source)
    if together:
        plugin_site.write("acme-wide", f'{HEAD}MODELRUNNER_API = ">=1,<3"\n{HOOK}')
    manager = PluginManager.load(environ={})
    (failure,) = [failure for failure in manager.failures if failure.plugin == f"acme-{name}:main"]
    assert says in str(failure)
    asked = [answer.plugin for answer in manager.ask("model_state", card=GOOD_CARD, settings=None) if "acme" in answer.plugin]
    assert asked == (["acme-wide:main"] if together else [])


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_component_of_the_old_interface_is_refused_before_it_runs(plugin_site: PluginSite, name: str) -> None:
    last, says = COMPONENTS[name]
    plugin_site.write("acme-old", HEAD + STATE.format(last=last))
    choice = PluginManager.load(environ={}).choose("model_state", pin="old", card=GOOD_CARD, settings=None)
    with pytest.raises(PluginError) as caught:
        choice.load()
    for part in ("plugin 'acme-old:main'", "acme-old 1.0", says):
        assert part in str(caught.value)


def test_a_component_that_overrides_everything_well_loads(plugin_site: PluginSite) -> None:
    plugin_site.write("acme-old", HEAD + STATE.format(last="def logits(self, hidden): ..."))
    choice = PluginManager.load(environ={}).choose("model_state", pin="old", card=GOOD_CARD, settings=None)
    assert choice.load().__name__ == "OldState"

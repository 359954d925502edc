"""Discovery: one try per entry point, one registration per plugin, whatever lies on the path."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types
from pathlib import Path

import pytest
from plugin_site import TREES, PluginSite

from modelrunner import hookspecs
from modelrunner.errors import PluginError, PluginWarning, SettingsError
from modelrunner.plugin_loader import discover
from modelrunner.plugin_manager import PluginInfo, PluginManager

MODULE = """
from modelrunner.hookspecs import hookimpl
MODELRUNNER_API = ">=1,<2"
@hookimpl
def settings_sections(): return None
"""


def found(manager: PluginManager) -> dict[str, PluginInfo]:
    return {info.name: info for info in manager.describe() if info.distribution != "modelrunner"}


def test_built_ins_come_first_and_the_rest_by_name(plugin_site: PluginSite) -> None:
    plugin_site.write("zeta", MODULE)
    plugin_site.write("acme-b", MODULE, entry_point="b")
    plugin_site.write("acme-a", MODULE, entry_point="a")
    names = [candidate.name for candidate in discover().candidates]
    assert names[-3:] == ["acme-a:a", "acme-b:b", "zeta:main"]
    assert names[:-3] == sorted(names[:-3])
    assert {name.partition(":")[0] for name in names[:-3]} == {"modelrunner"}


def test_two_plugins_may_share_an_entry_point_name(plugin_site: PluginSite) -> None:
    plugin_site.write("acme-a", MODULE)
    plugin_site.write("acme-b", MODULE)
    assert {name: info.state for name, info in found(PluginManager.load(environ={})).items()} == {
        "acme-a:main": "loaded",
        "acme-b:main": "loaded",
    }


def test_a_broken_plugin_is_reported_with_its_origin_and_the_good_one_loads(plugin_site: PluginSite) -> None:
    plugin_site.install("acme-good", "acme-import-error")
    manager = PluginManager.load(environ={})
    (failure,) = [f for f in manager.failures if f.plugin == "acme-import-error:npu"]
    for part in ("'npu'", "'modelrunner'", "acme-import-error 0.3.0", "RuntimeError: libnpu.so.7 is missing"):
        assert part in str(failure)
    assert found(manager)["acme-good:good"].hooks == ("cli_commands", "kernels", "model_state")


def test_a_failing_module_is_executed_once_per_process(plugin_site: PluginSite, tmp_path: Path) -> None:
    log = tmp_path / "log"
    plugin_site.write("acme", f"with open({str(log)!r}, 'a') as file:\n    file.write('x')\nraise ValueError('no')")
    assert PluginManager.load(environ={}).failures
    assert PluginManager.load(environ={}).failures
    assert log.read_text() == "x"


def test_exit_at_import_is_a_failure_and_not_the_end(plugin_site: PluginSite) -> None:
    plugin_site.write("acme", "raise SystemExit('no licence')")
    assert "SystemExit: no licence" in found(PluginManager.load(environ={}))["acme:main"].error


def test_stale_metadata_beside_the_good_one_registers_once_and_is_reported(plugin_site: PluginSite) -> None:
    plugin_site.write("acme", MODULE, version="2.0")
    plugin_site.metadata("acme", "1.9", {"main": "acme_that_is_gone", "older": "acme_that_is_gone"})
    manager = PluginManager.load(environ={})
    assert found(manager)["acme:main"].state == "shadowed"  # the last of this name; the other one is listed before it
    states = [(i.name, i.version, i.state) for i in manager.describe() if i.distribution == "acme"]
    assert states == [("acme:main", "2.0", "loaded"), ("acme:main", "1.9", "shadowed"), ("acme:older", "1.9", "shadowed")]
    assert not [f for f in manager.failures if f.plugin.startswith("acme")]
    (notice,) = manager.notices
    assert "stale metadata of plugin distribution acme 1.9" in notice
    assert "acme 2.0" in notice
    with pytest.warns(PluginWarning) as caught:
        manager.warn_failures()
    assert notice in [str(warning.message) for warning in caught]


def test_the_first_folder_on_the_path_wins_even_when_older(
    plugin_site: PluginSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin_site.write("acme", MODULE, version="3.0")
    front = PluginSite(tmp_path / "front")
    monkeypatch.syspath_prepend(str(front.folder))
    front.write("acme", MODULE, version="1.0")
    states = {i.version: i.state for i in PluginManager.load(environ={}).describe() if i.distribution == "acme"}
    front.close()
    assert states == {"1.0": "loaded", "3.0": "shadowed"}


def test_the_same_metadata_twice_is_no_news(plugin_site: PluginSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin_site.write("acme", MODULE)
    again = PluginSite(tmp_path / "again")
    monkeypatch.syspath_prepend(str(again.folder))
    again.metadata("acme", "1.0", {"main": "acme"})
    manager = PluginManager.load(environ={})
    again.close()
    assert [i.state for i in manager.describe() if i.distribution == "acme"] == ["loaded"]
    assert manager.notices == ()


def test_unreadable_metadata_is_a_failure_of_its_own(plugin_site: PluginSite) -> None:
    plugin_site.write("acme", MODULE)
    broken = plugin_site.folder / "nameless-1.0.dist-info"
    broken.mkdir()
    (broken / "entry_points.txt").write_text("[modelrunner]\nmain = acme\n")
    plugin_site.refresh()
    manager = PluginManager.load(environ={})
    (failure,) = [f for f in manager.failures if f.stage == "discovery"]
    assert "nameless-1.0.dist-info" in str(failure)
    assert found(manager)["acme:main"].state == "loaded"


@pytest.mark.parametrize("name", ["good", "acme-good:good", "Acme_Good:good"])
def test_disable(plugin_site: PluginSite, name: str) -> None:
    plugin_site.install("acme-good")
    info = found(PluginManager.load(environ={"MODELRUNNER_DISABLE_PLUGINS": f"x, {name}"}))["acme-good:good"]
    assert (info.state, info.error) == ("disabled", "named by MODELRUNNER_DISABLE_PLUGINS")
    assert "acme_good" not in sys.modules


def test_only_keeps_the_built_ins(plugin_site: PluginSite) -> None:
    plugin_site.install("acme-good", "acme-import-error")
    manager = PluginManager.load(environ={"MODELRUNNER_ONLY_PLUGINS": "good"})
    assert found(manager)["acme-import-error:npu"].state == "disabled"
    assert found(manager)["acme-good:good"].state == "loaded"
    assert all(info.state != "disabled" for info in manager.describe() if info.distribution == "modelrunner")


@pytest.mark.parametrize("variable", ["MODELRUNNER_ONLY_PLUGINS", "MODELRUNNER_DISABLE_PLUGINS"])
def test_an_unknown_name_lists_the_names_found(plugin_site: PluginSite, variable: str) -> None:
    plugin_site.install("acme-good")
    manager = PluginManager.load(environ={variable: "acme-god:good"})
    with pytest.warns(PluginWarning) as caught:
        manager.warn_failures()
    (text,) = [str(w.message) for w in caught if str(w.message).startswith(variable)]
    assert "'acme-god:good', which is not installed. Did you mean 'acme-good:good'?" in text
    assert "modelrunner:commands" in text


def test_strict_makes_any_failure_fatal(plugin_site: PluginSite) -> None:
    plugin_site.install("acme-import-error")
    with pytest.raises(PluginError, match="acme-import-error"):
        PluginManager.load(environ={"MODELRUNNER_STRICT_PLUGINS": "1"})
    assert PluginManager.load(environ={"MODELRUNNER_STRICT_PLUGINS": "1"}, strict=False).failures


def test_a_flag_that_is_neither_on_nor_off_is_refused() -> None:
    with pytest.raises(SettingsError, match="MODELRUNNER_STRICT_PLUGINS='maybe'"):
        PluginManager.load(environ={"MODELRUNNER_STRICT_PLUGINS": "maybe"})


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        (">=2,<3", f"it needs interface '>=2,<3', modelrunner offers {hookspecs.API_VERSION}"),
        ("one", "no version specifier"),
        (1, "MODELRUNNER_API is 1 (int)"),
        (None, "declares no MODELRUNNER_API"),
    ],
)
def test_a_module_of_another_interface_is_refused(declared: object, says: str) -> None:
    module = types.ModuleType("acme_versioned")
    module.__dict__.update(settings_sections=hookspecs.hookimpl(lambda: None), MODELRUNNER_API=declared)
    with pytest.raises(PluginError) as caught:
        PluginManager.load([module], {}, discover=False)
    assert says in str(caught.value)
    assert "acme_versioned" in str(caught.value)


class Undeclared:
    """A plugin object, in a module that says nothing of versions either."""

    @hookspecs.hookimpl
    def settings_sections(self) -> None:
        return None


def test_an_object_may_leave_its_interface_out_where_it_is_passed(plugin_site: PluginSite) -> None:
    """As docs/plugins.md says: whoever passes an object has just written it. What is installed or named as a module must say so."""
    (info,) = PluginManager.load([Undeclared()], {}, discover=False).describe()
    assert (info.state, info.api) == ("loaded", "")
    declared = Undeclared()
    declared.MODELRUNNER_API = ">=2,<3"  # type: ignore[attr-defined]
    with pytest.raises(PluginError, match="it needs interface '>=2,<3'"):
        PluginManager.load([declared], {}, discover=False)
    source = inspect.getsource(Undeclared)
    head = "from __future__ import annotations\nfrom modelrunner import hookspecs\n"
    (plugin_site.folder / "acme_object.py").write_text(f"{head}{source}\nplugin = Undeclared()\n")
    plugin_site.metadata("acme-object", "1.0", {"main": "acme_object:plugin"})
    plugin_site.refresh()
    (failure,) = [failure for failure in PluginManager.load(environ={}).failures if failure.plugin == "acme-object:main"]
    assert "it declares no MODELRUNNER_API" in failure.reason
    with pytest.raises(PluginError, match=r"acme_object.*declares no MODELRUNNER_API"):
        PluginManager.load(["acme_object"], {}, discover=False)


def test_discovery_and_listing_do_not_import_torch() -> None:
    code = (
        "import sys; from modelrunner.plugin_manager import PluginManager; PluginManager.load().describe(); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "False"


def test_a_plugin_installed_by_pip_is_found(tmp_path: Path) -> None:
    target = tmp_path / "target"
    tree = tmp_path / "acme-good"
    tree.mkdir()
    for file in (TREES / "acme-good").iterdir():
        if file.is_file():
            (tree / file.name).write_bytes(file.read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    subprocess.run([*pip, str(tree)], check=True, capture_output=True)
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r})\nfrom modelrunner.plugin_manager import PluginManager\n"
        "print([(i.name, i.version, i.state) for i in PluginManager.load().describe() if i.distribution == 'acme-good'])"
    )
    shown = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True).stdout
    assert shown.strip() == "[('acme-good:good', '1.2.0', 'loaded')]"

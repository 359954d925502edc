"""The command line: commands of plugins, settings among the options, errors without tracebacks."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from plugin_site import PluginSite

from modelrunner.cli import Command, _plain_warnings, collect_commands, main, settings_arguments, split_settings
from modelrunner.errors import CapacityWarning, PluginError, SettingsError, warn_caller
from modelrunner.hookspecs import hookimpl
from modelrunner.plugin_manager import PluginManager
from modelrunner.settings import load_settings

PLUGIN = '''
"""A plugin with a command that takes settings."""
import json
from modelrunner.cli import Command
from modelrunner.errors import CapacityError
from modelrunner.hookspecs import hookimpl

MODELRUNNER_API = ">=1,<2"

def arguments(parser):
    parser.add_argument("word", nargs="?")
    parser.add_argument("--seed", type=int)

def echo(args, manager):
    print(json.dumps([args.word, args.seed, args.settings, args.plugins]))
    return 7

def fail(args, manager):
    raise CapacityError("too small by half")

@hookimpl
def cli_commands():
    return [Command("echo", "say it", arguments, echo, takes_settings=True), Command("fail", "fail", arguments, fail)]
'''


@pytest.fixture
def acme(plugin_site: PluginSite) -> str:
    """A module to name with `-p`."""
    (plugin_site.folder / "acme_cli.py").write_text(PLUGIN)
    plugin_site.refresh()
    return "acme_cli"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.mark.parametrize("before", [True, False])
def test_a_module_brings_commands_wherever_p_stands(acme: str, before: bool, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["-p", acme, "echo", "hi"] if before else ["echo", "hi", "-p", acme]
    path = list(sys.path)
    code, out, _ = run(capsys, *arguments)
    assert (code, json.loads(out)) == (7, ["hi", None, {}, [acme]])
    assert sys.path == path, "the current folder is on it only while the command runs"


def test_settings_and_own_options_mix(acme: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["-p", acme, "echo", "--cache.page-size", "32", "hi", "--seed", "3", "--max-num-seqs=8", "--enforce-eager"]
    code, out, _ = run(capsys, *line)
    word, seed, settings, _ = json.loads(out)
    assert (code, word, seed) == (7, "hi", 3)
    assert settings == {"cache.page_size": "32", "max_num_seqs": "8", "enforce_eager": True}
    loaded = load_settings(settings, environ={})
    assert (loaded.cache.page_size, loaded.scheduler.max_rows, loaded.graphs.eager) == (32, 8, True)


def test_an_error_of_ours_is_one_message_and_status_2(acme: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "-p", acme, "fail") == (2, "", "modelrunner: error: too small by half\n")
    code, _, err = run(capsys, "-p", acme, "fail", "--traceback")
    assert code == 2
    assert "Traceback" in err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["ech"], "no command 'ech'; did you mean 'echo'?"),
        (["echo", "--max-num-seq", "8"], "unknown option '--max-num-seq'"),
        (["echo", "--max-num-seq", "8"], "near names are --max-num-seqs"),
        (["fail", "--cache.page_size", "8"], "unrecognized arguments: --cache.page_size"),
        (["-p", "acme_nowhere", "echo"], "'acme_nowhere', asked for by name, could not be imported"),
    ],
)
def test_a_wrong_call_is_explained(acme: str, line: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "-p", acme, *line)
    assert code == 2
    assert says in err


def test_two_plugins_with_one_command_are_named() -> None:
    class Plugin:
        @hookimpl
        def cli_commands(self) -> list[Command]:
            return [Command("serve", "serve", lambda parser: None, lambda args, manager: 0)]

    manager = PluginManager.load([Plugin(), Plugin()], {}, discover=False)
    with pytest.raises(PluginError) as caught:
        collect_commands(manager)
    for part in ("Plugin'", "Plugin#2'", "the command 'serve'"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "settings"),
    [
        (["--model", "7"], {"model": "7"}),
        (["--model=a=b"], {"model": "a=b"}),
        (["--model.seed", "-1"], {"model.seed": "-1"}),
        (["--cache.memory-fraction", "-.5"], {"cache.memory_fraction": "-.5"}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": "false"}),
        (["--no-cache.prefix-caching", "--seed", "2"], {"cache.prefix_caching": "false", "seed": "2"}),
        (["--cache", '{"page_size": 4}'], {"cache": '{"page_size": 4}'}),
        (["--config-file", "x.toml"], {"config_file": "x.toml"}),
        ([], {}),
    ],
)
def test_settings_arguments(tokens: list[str], settings: dict[str, Any]) -> None:
    assert settings_arguments(tokens) == settings


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (["--block-sise", "4"], "near names are --block-size"),
        (["--seed", "1", "--seed=2"], "--seed is given twice"),
        (["-x"], "unknown option '-x'"),
    ],
)
def test_wrong_settings_arguments(tokens: list[str], says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        settings_arguments(tokens)
    assert says in str(caught.value)


def test_both_forms_of_one_setting_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"cache\.page_size is given twice"):
        load_settings(settings_arguments(["--block-size", "8", "--cache.page_size", "8"]), environ={})


def test_nothing_after_a_double_dash_is_a_setting() -> None:
    line = ["echo", "--seed", "1", "--cache.page_size", "4", "--", "--x"]
    assert split_settings(line, own={"--seed"}) == (["echo", "--seed", "1", "--", "--x"], ["--cache.page_size", "4"])


def test_plugins_lists_broken_ones_and_goes_on(plugin_site: PluginSite, capsys: pytest.CaptureFixture[str]) -> None:
    plugin_site.install("acme-good", "acme-import-error")
    code, out, _ = run(capsys, "plugins")
    assert code == 0
    assert "acme-good:good" in out
    assert "libnpu.so.7 is missing" in out
    code, out, _ = run(capsys, "plugins", "--json")
    by_name = {info["name"]: info for info in json.loads(out)}
    assert by_name["acme-good:good"]["hooks"] == ["cli_commands", "kernels", "model_state"]
    assert by_name["acme-import-error:npu"]["state"] == "failed"
    code, out, _ = run(capsys, "plugins", "--json", "--hook", "cli_commands")
    assert {"acme-good:good", "modelrunner:commands"} <= {info["name"] for info in json.loads(out)}
    assert "acme-import-error:npu" not in out


def test_a_plugins_command_runs(plugin_site: PluginSite, capsys: pytest.CaptureFixture[str]) -> None:
    plugin_site.install("acme-good")
    assert run(capsys, "acme-hello")[:2] == (0, "hello from acme\n")


@pytest.mark.parametrize("line", [["plugins"], ["plugins", "--json"], ["settings", "show"]])
def test_listing_goes_on_in_strict_mode_and_fails(
    plugin_site: PluginSite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: list[str]
) -> None:
    plugin_site.install("acme-import-error")
    plain, strict = run(capsys, *line), None
    monkeypatch.setenv("MODELRUNNER_STRICT_PLUGINS", "1")
    strict = run(capsys, *line)
    assert (plain[0], strict[0]) == (0, 2)
    assert strict[1:] == plain[1:]
    assert "acme-import-error" in "".join(strict[1:])


@pytest.mark.parametrize("line", [["--version"], ["plugins"], ["--help"], ["generate", "--help"]])
def test_quick_commands_do_not_import_torch(line: list[str], tmp_path: Path) -> None:
    code = f"import sys; from modelrunner.cli import main; code = main({line!r}); print(code, 'torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert shown.stdout.splitlines()[-1] == "0 False", shown.stderr


def test_warnings_for_users_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with _plain_warnings():
            warn_caller("a small cache", CapacityWarning)
    assert capsys.readouterr().err == "modelrunner: warning: a small cache\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("size", [1, 1_000_000], ids=["at the end", "on the way"])
def test_output_that_cannot_be_written_is_an_error(acme: str, plugin_site: PluginSite, size: int) -> None:
    """It was a traceback: of `print` when there is much, else of the interpreter's end."""
    code = f"import sys; sys.path.insert(0, {str(plugin_site.folder)!r}); from modelrunner.cli import main; sys.exit(main())"
    line = [sys.executable, "-P", "-c", code, "-p", acme, "echo", "x" * 100_000 if size > 1 else "x"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "modelrunner: error: the output could not be written: No space left on device\n")


def test_other_system_errors_of_a_command_are_not_taken_for_output(acme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_it(head: Any, rest: list[str]) -> int:
        raise FileNotFoundError(2, "No such file or directory", "x")

    monkeypatch.setattr("modelrunner.cli._run", run_it)
    with pytest.raises(FileNotFoundError):
        main(["plugins"])


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-P", "-m", "modelrunner", "--version"], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("modelrunner ")

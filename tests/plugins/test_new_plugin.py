"""`modelrunner new-plugin`: what it writes installs in a new virtual environment, is found there, runs, and passes its own tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from modelrunner import Decline, Offer, cli
from modelrunner.checkpoint import ModelCard
from modelrunner.plugins.commands.new_plugin import KINDS

NAMES = {"model-state": "night-orchid", "logits-processor": "slow-fade", "drafter": "old-habit", "observer": "tally", "tap": "soft-nudge"}


def python(executable: Path | str, *arguments: str, cwd: Path) -> str:
    """Output of a python process away from the checkout; its exit status must be 0."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "MODELRUNNER_"))}
    done = subprocess.run(
        [str(executable), *arguments], cwd=cwd, env=environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A new package of each kind, by kind."""
    folder = tmp_path_factory.mktemp("new")
    for kind, name in NAMES.items():
        assert cli.main(["new-plugin", name, "--kind", kind, "--into", str(folder)]) == 0
    return {kind: folder / f"modelrunner-{name}" for kind, name in NAMES.items()}


@pytest.fixture(scope="module")
def fresh(packages: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of a new virtual environment that sees this one's packages, with the new packages installed into it by pip."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "outer.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    executable = folder / "bin" / "python"
    pip = ("-m", "pip", "--python", str(executable), "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    python(sys.executable, *pip, *map(str, packages.values()), cwd=folder)
    installed = {path.name for path in site.glob("modelrunner_*.dist-info")}
    assert installed == {f"modelrunner_{name.replace('-', '_')}-0.1.0.dist-info" for name in NAMES.values()}
    return executable


def test_every_kind_is_tried() -> None:
    assert set(NAMES) == set(KINDS)


def test_installed_and_listed(fresh: Path, tmp_path: Path) -> None:
    listed = json.loads(python(fresh, "-P", "-m", "modelrunner.cli", "plugins", "--json", cwd=tmp_path))
    found = {info["entry_point"]: info for info in listed if not info["name"].startswith("modelrunner:")}
    assert {name: (info["state"], info["error"]) for name, info in found.items()} == dict.fromkeys(NAMES.values(), ("loaded", ""))


@pytest.mark.parametrize("kind", list(KINDS))
def test_passes_its_own_tests(fresh: Path, packages: dict[str, Path], kind: str) -> None:
    """Warnings are errors, as a careful author would have it."""
    out = python(fresh, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error:::modelrunner_", cwd=packages[kind])
    assert " passed" in out
    assert "failed" not in out


def test_the_model_wins_and_runs(fresh: Path, tmp_path: Path) -> None:
    """Chosen for a checkpoint by its architecture, and run there with random weights; the observer speaks when it is asked to, and the
    taps and the processor, too, act on a request that asks, and the drafter on the others."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"architectures": ["NightOrchidForCausalLM"], "rms_norm_eps": 1e-5, "max_position_embeddings": 64, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = "; ".join(
        [
            "from modelrunner import LLM, SamplingParams",
            "more = {'plugin': {'tally': {'interval': 60}}, 'speculation': {'drafter': 'old_habit'}}",
            "llm = LLM('.', load_format='dummy', skip_tokenizer_init=True, cache={'num_pages': 32}, **more)",
            "asked = {'soft_nudge': [1.0] * 32, 'soft_nudge_read': True}",
            "fade = {'slow_fade': {'amount': 1e6}}",
            "greedy = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, extra_args=asked, logits_processors=fade)",
            "(out,) = llm.generate([[1, 2, 3]], greedy)",
            "assert len({1, 2, 3, *out.outputs[0].token_ids}) == 8",
            "print(len(out.outputs[0].token_ids), type(llm.engine.assembly.state).__name__)",
            "print(out.outputs[0].extra['soft_nudge_read'].shape)",
            "biased = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, logit_bias={7: 100.0})",
            "(out,) = llm.generate([[1, 2, 3]], biased)",
            "print(set(out.outputs[0].token_ids), llm.engine.scheduler.stats.num_accepted > 10)",
            "llm.close()",
        ]
    )
    out = python(fresh, "-P", "-c", run, cwd=tmp_path)
    assert "5 NightOrchidState" in out
    assert "tally: " in out
    assert "(5, 32)" in out
    assert "{7} True" in out


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_code_is_clean(packages: dict[str, Path], kind: str) -> None:
    ruff = shutil.which("ruff", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if ruff is None:
        pytest.skip("ruff is not installed")
    for arguments in (["check", "--select", "E,F,W,I,B,UP,SIM,RUF"], ["format", "--check"]):
        python(ruff, *arguments, "--no-cache", ".", cwd=packages[kind])


def written(package: Path) -> ModuleType:
    """The plugin's module, imported from where it was written."""
    (file,) = package.glob("modelrunner_*/__init__.py")
    spec = spec_from_file_location(file.parent.name, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where pydantic looks names up
    spec.loader.exec_module(module)
    return module


def test_what_a_package_cannot_do_is_declined(packages: dict[str, Path]) -> None:
    """The model another activation, which it would ignore; the drafter weights, which it would not read."""
    bid = written(packages["model-state"]).model_state
    card = ModelCard("m", Path("m"), "dummy", ("NightOrchidForCausalLM",), "x", {"hidden_act": "relu"})
    assert isinstance(answer := bid(card), Decline)
    assert answer.reason == "hidden_act is 'relu'; silu is supported"
    assert isinstance(bid(replace(card, config={})), Offer)
    drafts = written(packages["drafter"]).drafter
    assert isinstance(answer := drafts(card), Decline)
    assert "speculation.model names 'm'" in answer.reason
    assert isinstance(drafts(None), Offer)


@pytest.mark.parametrize("kind", list(KINDS))
def test_no_placeholder_is_left(packages: dict[str, Path], kind: str) -> None:
    files = [path for path in packages[kind].rglob("*") if path.is_file()]
    assert {"pyproject.toml", "README.md"} < {path.name for path in files}
    assert [path for path in files if "$" in path.read_text() or "PACKAGE" in str(path)] == []
    project = tomllib.loads((packages[kind] / "pyproject.toml").read_text())["project"]
    assert project["name"] == packages[kind].name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Orchid", "NAME is 'Orchid'; accepted: lower-case letters"),
        ("or_chid", "accepted: lower-case letters"),
        ("1orchid", "accepted: lower-case letters"),
        ("dense", "NAME is 'dense', which is already a plugin of modelrunner"),
    ],
)
def test_a_name_that_cannot_be_is_refused(name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["new-plugin", name, "--kind", "observer", "--into", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "modelrunner-orchid"
    mine.mkdir()
    (mine / "mine.txt").write_text("mine")
    assert cli.main(["new-plugin", "orchid", "--kind", "model-state", "--into", str(tmp_path)]) == 2
    assert f"{mine} exists already; nothing was written" in capsys.readouterr().err
    assert [path.name for path in mine.iterdir()] == ["mine.txt"]


def test_an_unknown_kind_is_told_the_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["new-plugin", "orchid", "--kind", "engine"]) == 2
    assert "model-state" in capsys.readouterr().err


def test_an_architecture_is_guessed_unless_it_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, given in (("guessed", []), ("given", ["--architecture", "NightORCHIDForCausalLM"])):
        assert cli.main(["new-plugin", "night-orchid", "--kind", "model-state", "--into", str(tmp_path / folder), *given]) == 0
        package, out = tmp_path / folder / "modelrunner-night-orchid", capsys.readouterr().out
        plugin = (package / "modelrunner_night_orchid" / "__init__.py").read_text()
        name = given[-1] if given else "NightOrchidForCausalLM"
        assert f'ARCHITECTURES = ("{name}",)' in plugin
        assert "It must equal the entry of `architectures` in config.json, upper and lower case too" in plugin
        assert ("# A guess." in plugin) is (not given)
        assert (f"{name} is a guess." in out) is (not given)
        assert name in (package / "tests" / "test_modelrunner_night_orchid.py").read_text()


@pytest.mark.parametrize(("architecture", "told"), [("LlamaForCausalLM", True), ("OrchidForCausalLM", False)])
def test_who_bids_already_is_told(architecture: str, told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["new-plugin", "orchid", "--kind", "model-state", "--architecture", architecture, "--into", str(tmp_path)]) == 0
    said = "LlamaForCausalLM is run by modelrunner:dense too: while both are installed, choose one with pin.model_state=orchid."
    assert (said in capsys.readouterr().out) is told


@pytest.mark.parametrize(("kind", "name", "message"), [("model-state", "a b", "accepted: a class name"), ("observer", "X", "has none")])
def test_an_architecture_that_cannot_be_is_refused(
    kind: str, name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["new-plugin", "orchid", "--kind", kind, "--architecture", name, "--into", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err

"""What importing does and does not bring along. Each test runs in a process of its own, since modules stay imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"core": "modelrunner"} | {folder: f"modelrunner.{folder}" for folder in ("kernels", "model_states", "plugins")}
TORCH_FREE = ("hookspecs", "offers", "settings", "resolved", "plugin_manager", "cli", "errors")
BLOCK = """
import importlib, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name in BLOCKED or name.startswith(tuple(b + "." for b in BLOCKED)):
            raise ModuleNotFoundError(f"{name} is blocked by this test", name=name)
sys.meta_path.insert(0, Blocker())
"""


def python(code: str, cwd: Path | None = None, flags: tuple[str, ...] = ("-P",)) -> str:
    """The output of `code` in a new process, away from the checkout unless `cwd` says otherwise."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *flags, "-c", code], cwd=cwd or ROOT.anchor, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def modules(*folders: str) -> list[str]:
    """Names of all modules in the tree's `folders`."""
    names = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            names.append(".".join([FOLDERS[folder], *(parts[:-1] if parts[-1] == "__init__" else parts)]))
    return names


def may_use_triton(name: str) -> bool:
    """Modules of `kernels/` that are neither packages nor references."""
    path = ROOT / name.replace("modelrunner.kernels", "kernels", 1).replace(".", "/")
    return name.startswith("modelrunner.kernels") and not path.is_dir() and path.name != "reference"


def test_listing_plugins_does_not_import_torch() -> None:
    code = """
import sys
from modelrunner.cli import main
status = main(["plugins"])
heavy = sorted({"torch", "transformers", "triton"} & set(sys.modules))
print("HEAVY", status, heavy)
"""
    assert python(code).splitlines()[-1] == "HEAVY 0 []"


def test_hook_specs_and_plugin_modules_do_not_import_torch() -> None:
    names = [*modules("plugins"), "modelrunner", *(f"modelrunner.{name}" for name in TORCH_FREE)]
    code = f"import importlib, sys\nfor n in {names!r}:\n    importlib.import_module(n)\n    assert 'torch' not in sys.modules, n\n"
    python(code)


def test_everything_but_kernels_imports_without_triton() -> None:
    names = [n for n in modules(*FOLDERS) if not may_use_triton(n)]
    assert len(names) > 40
    python(f"BLOCKED = ('triton',)\n{BLOCK}\nfor n in {names!r}:\n    importlib.import_module(n)\n")


def test_cpu_answers_without_triton() -> None:
    """A real pass through the engine: dense model, attention, sampler, all from entry points."""
    code = f"""
BLOCKED = ('triton',)
{BLOCK}
from modelrunner import SamplingParams
from modelrunner.testing.subjects import dense
params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
(output,) = dense().llm().generate([{{'prompt_token_ids': [5, 6, 7]}}], params, use_tqdm=False)
assert 'triton' not in sys.modules
print(len(output.outputs[0].token_ids))
"""
    assert python(code).splitlines()[-1] == "4"


def test_core_imports_without_models_and_plugins() -> None:
    blocked = ("modelrunner.model_states", "modelrunner.plugins")
    python(f"BLOCKED = {blocked!r}\n{BLOCK}\nfor n in {modules('core', 'kernels')!r}:\n    importlib.import_module(n)\n")


def test_the_blocker_blocks() -> None:
    attempt = "sys.modules.pop('json', None)\ntry:\n    import json\nexcept ModuleNotFoundError:\n    print('blocked')"
    code = f"BLOCKED = ('json',)\n{BLOCK}\n{attempt}"
    assert python(code) == "blocked"


def test_no_import_name_shadows_a_package() -> None:
    """From the repository root, `import kernels` finds our folder; -P and pytest's importlib mode keep the root off sys.path."""
    shown = "import importlib.util as u; print([n for n in ('core', 'kernels', 'model_states', 'plugins', 'tests') if u.find_spec(n)])"
    assert "kernels" in python(shown, cwd=ROOT, flags=())  # the trap is there
    assert "kernels" not in python(shown, cwd=ROOT)  # and -P avoids it
    roots = {str(ROOT), ""}
    assert not roots & set(sys.path), "pytest must run with --import-mode=importlib, and as `python -P -m pytest`"


def test_make_uses_safe_path() -> None:
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("PY :=") and line.endswith("python -P") for line in lines)
    unsafe = [line for line in lines if line.startswith("\t") and "$(VENV)/bin/python -" in line and "$(VENV)/bin/python -P" not in line]
    assert unsafe == []

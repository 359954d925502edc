"""The one import rule of the repository, and proof that its check finds what it is for."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
STANDARD = frozenset(sys.stdlib_module_names)


def _load() -> ModuleType:
    spec = spec_from_file_location("modelrunner_import_rule", Path(__file__).with_name("imports.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


rule = _load()


def test_core_knows_neither_models_nor_plugins() -> None:
    assert rule.core_violations(ROOT) == []


def test_kernels_know_only_kernels() -> None:
    assert rule.kernel_violations(ROOT, STANDARD) == []


def test_plugin_modules_do_not_import_torch_at_the_top() -> None:
    """`modelrunner plugins` imports them all; with torch that takes seconds."""
    assert rule.heavy_imports(ROOT, ("plugins",), frozenset({"torch", "transformers", "triton"})) == []


def test_the_tree_is_really_read() -> None:
    seen = {i.name for i in rule.imports_of(ROOT / "core/settings.py", ROOT)}
    assert {"pydantic", "modelrunner.errors", "modelrunner.errors.SettingsError"} <= seen


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for folder in ("core/deep", "kernels/area", "plugins"):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    "source",
    [
        "import modelrunner.plugins",
        "import modelrunner.plugins.hub as h",
        "from modelrunner import plugins",
        "from modelrunner.model_states.dense import state",
        "from .. import model_states",
        "from ..plugins.hub import find",
        "def f():\n    from modelrunner.model_states import dense\n",
        "class C:\n    def f(self):\n        if True:\n            import modelrunner.plugins.hub\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from modelrunner.plugins import hub\n",
        "try:\n    import modelrunner.model_states\nexcept ImportError:\n    pass\n",
        "from importlib import import_module\nimport_module('modelrunner.plugins.hub')",
        "import importlib\nimportlib.import_module('..plugins.hub', __package__)",
        "__import__('modelrunner.model_states')",
    ],
)
def test_planted_import_in_core_is_found(tree: Path, source: str) -> None:
    (tree / "core/deep/planted.py").write_text(source)
    (violation,) = {line.partition(" imports ")[0].partition(":")[0] for line in rule.core_violations(tree)}
    assert violation == "core/deep/planted.py"


@pytest.mark.parametrize(
    "source",
    [
        "import modelrunner.pluginsx",
        "from . import plugins",
        "import plugins",
        "from modelrunner import settings",
        "# import modelrunner.plugins\nx = 'import modelrunner.plugins'",
    ],
)
def test_innocent_import_in_core_is_not(tree: Path, source: str) -> None:
    (tree / "core/deep/innocent.py").write_text(source)
    assert rule.core_violations(tree) == []


@pytest.mark.parametrize(
    "source",
    [
        "import modelrunner",
        "from modelrunner.ops import Ops",
        "from ... import settings",
        "def f():\n    import transformers\n",
        "from modelrunner import kernels_of_another",
    ],
)
def test_planted_import_in_kernels_is_found(tree: Path, source: str) -> None:
    (tree / "kernels/area/planted.py").write_text(source)
    assert rule.kernel_violations(tree, STANDARD)


def test_innocent_imports_in_kernels_are_not(tree: Path) -> None:
    lines = ["import math", "import torch", "from torch import nn", "import triton.language as tl", "from . import reference"]
    lines += ["from ..norm import reference", "from modelrunner.kernels.norm import rms_norm"]
    (tree / "kernels/area/innocent.py").write_text("\n".join(lines))
    assert rule.kernel_violations(tree, STANDARD) == []


def test_planted_torch_in_a_plugin_is_found(tree: Path) -> None:
    (tree / "plugins/lazy.py").write_text("def f():\n    import torch\n")
    assert rule.heavy_imports(tree, ("plugins",), frozenset({"torch"})) == []
    (tree / "plugins/eager.py").write_text("from torch import nn\n")
    assert rule.heavy_imports(tree, ("plugins",), frozenset({"torch"}))

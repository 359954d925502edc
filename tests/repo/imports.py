"""The import rule, read from the syntax tree: `kernels <- core <- model_states, plugins`.

An import linter passes vacuously on an editable install and does not see imports inside functions; this sees every import statement, and
`import_module` and `__import__` with a literal name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "modelrunner"
FOLDERS = {"core": PACKAGE, "kernels": f"{PACKAGE}.kernels", "model_states": f"{PACKAGE}.model_states", "plugins": f"{PACKAGE}.plugins"}
# What a kernel may use besides the standard library and other kernels.
KERNEL_LIBRARIES = frozenset({"torch", "triton", "numpy"})


@dataclass(frozen=True)
class Import:
    """One imported module, made absolute, and the line that does it."""

    name: str
    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.name}"


def module_of(path: Path, root: Path) -> tuple[str, bool]:
    """The dotted name of a source file, and whether it is a package's `__init__`."""
    folder, *rest = path.relative_to(root).with_suffix("").parts
    is_package = rest[-1:] == ["__init__"]
    return ".".join([FOLDERS[folder], *(rest[:-1] if is_package else rest)]), is_package


def imports_of(path: Path, root: Path) -> Iterator[Import]:
    """Every module that `path` imports anywhere, names imported from a package included (they may be modules)."""
    module, is_package = module_of(path, root)
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node.module or "", node.level, package)
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and node.args and _called(node) in ("import_module", "__import__"):
            literal = node.args[0]
            if isinstance(literal, ast.Constant) and isinstance(literal.value, str):
                level = len(literal.value) - len(literal.value.lstrip("."))
                names = [_absolute(literal.value.lstrip("."), level, package)]
        for name in names:
            yield Import(name, path.relative_to(root), node.lineno)


def _absolute(name: str, level: int, package: str) -> str:
    if level == 0:
        return name
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - level + 1], *([name] if name else [])])


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def core_violations(root: Path) -> list[str]:
    """Imports in core/** of model_states or plugins."""
    upper = (FOLDERS["model_states"], FOLDERS["plugins"])
    found = (imported for path in sorted((root / "core").rglob("*.py")) for imported in imports_of(path, root))
    return [str(imported) for imported in found if any(_within(imported.name, package) for package in upper)]


def kernel_violations(root: Path, standard: frozenset[str]) -> list[str]:
    """Imports in kernels/** of anything but kernels, torch, triton, numpy and the standard library."""
    wrong = []
    for path in sorted((root / "kernels").rglob("*.py")):
        for imported in imports_of(path, root):
            top = imported.name.partition(".")[0]
            if not (_within(imported.name, FOLDERS["kernels"]) or top in KERNEL_LIBRARIES or top in standard):
                wrong.append(str(imported))
    return wrong


def heavy_imports(root: Path, folders: tuple[str, ...], libraries: frozenset[str]) -> list[str]:
    """Imports of `libraries` at the top level of the modules in `folders` (outside functions, classes and TYPE_CHECKING)."""
    wrong = []
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            top = {
                node.lineno for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, (ast.Import, ast.ImportFrom))
            }
            wrong += [str(i) for i in imports_of(path, root) if i.line in top and i.name.partition(".")[0] in libraries]
    return wrong

"""Writes the table of operations in docs/hooks/kernels.md from their references: `python -P tests/docs/operations_table.py`."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from modelrunner.ops import EXACT, Registry, Tolerance
from modelrunner.plugins import fusions, reference_kernels

PAGE = Path(__file__).resolve().parents[2] / "docs/hooks/kernels.md"
HEAD = "| operation | arguments | returns | tolerance | |\n| --- | --- | --- | --- | --- |"
START, END = "<!-- operations start -->", "<!-- operations end -->"


def table() -> str:
    """A line for each operation and fusion of the built-in plugins."""
    registry = Registry()
    reference_kernels.kernels(registry, None)  # type: ignore[arg-type]  (it looks at no device)
    functions, tolerances = vars(registry.resolve("cpu")), registry.tolerances()
    lines = []
    for name in sorted(tolerances):
        signature = inspect.signature(functions[name])
        arguments = ", ".join(f"`{'*' * (p.kind is p.VAR_POSITIONAL)}{p.name}`" for p in signature.parameters.values())
        told = (inspect.getdoc(getattr(fusions, name, functions[name])) or "").partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        lines.append(
            f"| `{name}` | {arguments} | {returned(signature)} | {spelt(tolerances[name])} | {told.partition('. ')[0].rstrip('.')} |"
        )
    return "\n".join([HEAD, *lines])


def returned(signature: inspect.Signature) -> str:
    """The annotation of the result, without modules; `None` for an operation that writes into its arguments."""
    annotation = signature.return_annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return f"`{text.replace('torch.', '')}`"


def spelt(tolerance: Tolerance) -> str:
    return "exact" if tolerance == EXACT else "close"


def page_with(text: str) -> str:
    """The page with the table between its marks."""
    before, _, rest = text.partition(START)
    return f"{before}{START}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)

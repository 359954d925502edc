"""Public signatures as text: annotations as they stand in the source, so that the text is the same on every Python."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined


class Text(str):
    """Shown as it is, where `inspect` shows the repr of an annotation."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def signature(function: Any, *, drop_self: bool = False) -> str:
    """`(name: type = default, ...) -> type`"""
    found = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=annotation(parameter.annotation))
        for name, parameter in found.parameters.items()
        if not (drop_self and name == "self")
    ]
    return str(found.replace(parameters=parameters, return_annotation=annotation(found.return_annotation)))


def annotation(value: Any) -> Any:
    if value is inspect.Signature.empty:
        return value
    value = getattr(value, "__forward_arg__", value)  # of a named tuple
    return Text(value if isinstance(value, str) else inspect.formatannotation(value))


def describe(kind: Any) -> Iterator[str]:
    """A public class, line by line: its bases, the call that makes one, and what it defines itself, by name. Or a function, in one line."""
    if not inspect.isclass(kind):
        yield f"{kind.__name__}{signature(kind)}"
        return
    bases = ", ".join(base.__name__ for base in kind.__bases__ if base is not object)
    yield f"class {kind.__name__}({bases})"
    if issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            default = "" if field.default is PydanticUndefined else f" = {field.default!r}"
            yield f"  {name}: {inspect.formatannotation(field.annotation)}{default}"
    elif hasattr(kind, "_fields"):
        yield f"  __new__{signature(kind)}"
        return
    elif "__init__" in vars(kind) and "Protocol" not in bases:
        yield f"  __init__{signature(kind.__init__)}"
    for name, value in sorted(vars(kind).items()):
        if name == "__call__" or not name.startswith(("_", "test_", "model_post_init")):
            yield from member(kind, name, value)


def member(kind: type, name: str, value: Any) -> Iterator[str]:
    """The lines of one attribute of a class; none for what pydantic or enum made of it."""
    abstract = "abstract " if getattr(value, "__isabstractmethod__", False) else ""
    if isinstance(value, property):
        yield f"  {abstract}property {name}{signature(value.fget)}"
    elif isinstance(value, (classmethod, staticmethod)):
        yield f"  {type(value).__name__} {name}{signature(value.__func__)}"
    elif inspect.isfunction(value):
        yield f"  {abstract}{name}{signature(value)}"
    elif not callable(value) and name in vars(kind).get("__annotations__", {}) and "__dataclass_fields__" not in vars(kind):
        yield f"  {name}: {annotation(vars(kind)['__annotations__'][name])} = {value!r}"

"""Values of sampling parameters that have a form of their own: logits processors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

FUNCTIONS = "functions"  # the name under which `logits_processors` holds Python functions, and their one argument


def read_processors(value: object) -> dict[str, Mapping[str, Any]]:
    """`SamplingParams.logits_processors` as name -> arguments. Functions of a list stand under FUNCTIONS, in their order.

    Raises ValueError for what is no mapping of names to mappings, no list of names and functions, and for a function that cannot be
    called with three arguments.
    """
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {_name(name): _arguments(name, given) for name, given in value.items()}
    if not isinstance(value, (list, tuple)):
        raise ValueError("not a list")
    found: dict[str, Mapping[str, Any]] = {}
    functions: list[Callable[..., Any]] = []
    for item in value:
        if callable(item):
            functions.append(_function(item))
        else:
            found[_name(item)] = {}
    return found | ({FUNCTIONS: {FUNCTIONS: tuple(functions)}} if functions else {})


def _name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ValueError(f"it contains {name!a:.60}")
    return name


def _arguments(name: str, given: object) -> Mapping[str, Any]:
    if name == FUNCTIONS:
        functions = given.get(FUNCTIONS) if isinstance(given, Mapping) else given
        if not isinstance(functions, (list, tuple)) or not functions:
            raise ValueError(f"it contains {name!r}: {given!a:.60}")
        return {FUNCTIONS: tuple(_function(function) for function in functions)}
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ValueError(f"it contains {name!r}: {given!a:.60}")
    return dict(given)


def _function(function: Any) -> Callable[..., Any]:
    if not callable(function):
        raise ValueError(f"it contains {function!a:.60}")
    try:
        inspect.signature(function).bind([], [], None)
    except TypeError:
        raise ValueError("it contains a function that does not take (prompt_ids, output_ids, logits)") from None
    except ValueError:  # a built-in one without a signature
        pass
    checked: Callable[..., Any] = function
    return checked

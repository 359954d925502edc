"""Small operations in a row, without Python between them.

On a CPU one operation on a few hundred numbers takes less time than the way to it. TorchScript runs a function's operations one after the
other in C++; where torch has it no more, or cannot compile a function, the function itself runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def chained(function: F) -> F:
    """A decorator: `function` as one call. Its arguments are annotated with TorchScript's types; it calls only torch, and other such."""
    try:
        with warnings.catch_warnings():  # that torch means to drop TorchScript
            warnings.simplefilter("ignore")
            script: F = torch.jit.script(function)
    except Exception:
        return function
    return script

"""What is launched ahead is built once for each kind of launch, and not run; other threads' launches are run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime import build
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from modelrunner.kernels import ahead
from modelrunner.kernels.ahead import built_ahead


def add(x_ptr, n, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    pass


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, Any]]:
    """(warmup, arguments) of what reaches Triton."""
    found: list[tuple[bool, Any]] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append((warmup, (*args[1:], *options.values())))

    monkeypatch.setattr(JITFunction, "run", run)
    return found


def test_each_kind_of_launch_is_built_once(launches: list[tuple[bool, Any]]) -> None:
    kernel, x = JITFunction(add), torch.zeros(64)
    with built_ahead(torch.device("cpu")):
        for n in (1, 16, 32, 7, 9, 2**40):  # one, two multiples of 16, two others, a 64-bit one (of 16)
            kernel[(1,)](x, n, 2.0, BLOCK=8)
            kernel[(1,)](x, n, 3.0, BLOCK=8)
        kernel[(1,)](x, 7, 2.0, BLOCK=16)
        kernel[(1,)](x.half(), 7, 2.0, BLOCK=8)
        kernel[(1,)](x[1:], 7, 2.0, BLOCK=8)
        kernel[(1,)](x, 7, 2.0, BLOCK=8, num_warps=8)
    assert launches[:4] == [(True, (n, 2.0, 8)) for n in (1, 16, 7, 2**40)]
    assert len(launches) == 8
    kernel[(1,)](x, 7, 2.0, BLOCK=8)
    assert launches[-1] == (False, (7, 2.0, 8))


def test_blocks_of_another_shape_are_another_kind(launches: list[tuple[bool, Any]]) -> None:
    """Gluon's kernels take the sizes of their tiles from them: gate and up of 16 rows and of 32 differ in nothing else."""
    kernel, x = JITFunction(add), torch.zeros(32, 64)
    blocks = [TensorDescriptor(x, [32, 64], [64, 1], [rows, 64]) for rows in (32, 16, 16)]
    with built_ahead(torch.device("cpu")):
        for each in (*blocks, replace(blocks[0], base=x.half())):
            kernel[(1,)](x, 16, each, BLOCK=8)
    assert [(each.base.dtype, each.block_shape) for _, (_, each, _) in launches] == [
        (torch.float32, [32, 64]),
        (torch.float32, [16, 64]),
        (torch.float16, [32, 64]),
    ]


def test_another_threads_launch_is_run(launches: list[tuple[bool, Any]]) -> None:
    kernel, x = JITFunction(add), torch.zeros(64)
    other = threading.Thread(target=lambda: kernel[(1,)](x, 3, 1.0, BLOCK=8))
    with built_ahead(torch.device("cpu")):
        other.start()
        other.join()
        kernel[(1,)](x, 3, 1.0, BLOCK=8)
    assert [warmup for warmup, _ in launches] == [False, True]


LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) {{ return PyLong_FromLong({number}); }}
static PyMethodDef methods[] = {{{{"launch", launch, METH_VARARGS, NULL}}, {{NULL, NULL, 0, NULL}}}};
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "same_name", NULL, -1, methods}};
PyMODINIT_FUNC PyInit_same_name(void) {{ return PyModule_Create(&module); }}
"""


@pytest.mark.parametrize("apart", [False, True])
def test_launchers_loaded_again_stay_apart(apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two modules of one name, each loaded twice: without the guard, the first one is the second one afterwards."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sources = [LAUNCHER.format(number=number) for number in (1, 2)]
    with built_ahead(torch.device("cpu")) if apart else nullcontext():
        first = [build.compile_module_from_src(source, "same_name") for source in sources]
        again = [build.compile_module_from_src(source, "same_name") for source in sources]
    assert [module.launch() for module in first] == [1, 2]
    assert [module.launch() for module in again] == ([1, 2] if apart else [2, 2])


def test_an_error_leaves_nothing_behind(launches: list[tuple[bool, Any]]) -> None:
    kernel, x = JITFunction(add), torch.zeros(64)
    with pytest.raises(ZeroDivisionError), built_ahead(torch.device("cpu")):
        _ = 1 / 0
    kernel[(1,)](x, 3, 1.0, BLOCK=8)
    assert [warmup for warmup, _ in launches] == [False]


def long(x_ptr, n, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """More code."""


def test_what_has_most_code_is_built_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is likely to take longest, and what starts last should not."""
    built, gate = list[str](), threading.Event()
    monkeypatch.setattr(ahead, "MOST", 1)
    monkeypatch.setattr(ahead, "_loaded", lambda work: work())

    def build_of(function: Any) -> Callable[[], None]:
        src = SimpleNamespace(fn=JITFunction(function))
        return lambda: built.append(src.fn.fn.__name__)

    def broken() -> None:
        raise ValueError("no such type")

    with ahead._Builders(torch.device("cpu")) as builders:
        builders.submit(gate.wait)
        for function in (add, long, add):
            builders.submit(build_of(function))
        failed = builders.submit(broken)
        gate.set()
    assert built == ["long", "add", "add"]
    assert isinstance(failed.exception(), ValueError)


def test_threads_without_the_gpu_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever waits for what they build would wait for ever."""

    def broken(_: torch.device) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch.cuda, "set_device", broken)
    with ahead._Builders(torch.device("cuda", 7)) as builders:
        failed = builders.submit(lambda: "kernel")
        assert isinstance(failed.exception(timeout=20), RuntimeError)


def even(n: tl.constexpr):  # type: ignore[no-untyped-def]
    odd(n - 1)


def odd(n: tl.constexpr):  # type: ignore[no-untyped-def]
    even(n - 1)


def test_functions_may_call_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = [JITFunction(even), JITFunction(odd)]
    monkeypatch.setitem(globals(), "even", functions[0])
    monkeypatch.setitem(globals(), "odd", functions[1])
    src = SimpleNamespace(fn=functions[0])
    assert ahead._code_of(lambda: src) == sum(len(each.src) for each in functions)

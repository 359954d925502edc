"""Processes that build kernels: what they build is found in the cache, and without them everything is built here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from modelrunner.kernels import build_helpers, build_process
from modelrunner.kernels.build_helpers import Helpers, Job, job_of

BUILD_ONE = textwrap.dedent(
    """
    import json, sys
    from triton import compile, knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from modelrunner.kernels.build_helpers import Helpers, job_of
    from modelrunner.kernels.linear.tiles import sum_kernel

    names = {"part_ptr": "*fp32", "out_ptr": "*bf16", "T": "i32", "N": "i32", "x_stride": "i32", "residual_stride": "i32", "eps": "fp32"}
    constants = {"x_ptr": None, "scale_ptr": None, "residual_ptr": None, "K": 64, "BLOCK_K": 64, "BLOCK": 32}
    constants |= {"SPLIT": 2, "ACT": 0, "PDL": True}
    signature = {name: names.get(name, "constexpr") for name in sum_kernel.arg_names}

    class Options:
        def __init__(self, warps):
            self.num_warps = warps

    def build_of(src, target, options):
        return lambda: compile(src, target=target, options=options.__dict__)

    hits = []
    knobs.compilation.listener = lambda src, metadata, metadata_group, times, cache_hit: hits.append(cache_hit)
    helpers = Helpers()
    target = GPUTarget("cuda", 90, 32)
    for warps in (1, 2, 4, 8):
        build = build_of(ASTSource(sum_kernel, signature, constants, {}), target, Options(warps))
        assert job_of(build) is not None
        if warps == 4:
            helpers.server.kill()
            helpers.server.wait()
        helpers.build(build)
        helpers.start(1)
    helpers.close()
    print(json.dumps(hits))
    """
)


def test_what_a_process_builds_is_found_in_the_cache(tmp_path: Path) -> None:
    """Of four builds the first starts the processes, the second is theirs, and the third is done here, as they are gone, and starts others,
    which do the fourth."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-P", "-c", BUILD_ONE], env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[false, true, false, true]"


def test_a_job_that_a_process_cannot_read_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a constant is of a module that is not found there, or needs more of torch than its names."""
    pytest.importorskip("triton")
    here = ModuleType("only_here")
    here.Kind = type("Kind", (), {"__module__": "only_here"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "only_here", here)
    helpers = Helpers()
    helpers.start(1)
    try:
        for _ in range(2):
            helpers._let(Job(object, "no_such_module", "kernel", "", {}, here.Kind(), {}, None, {}))
            assert helpers.free.qsize() == 1
    finally:
        helpers.close()


def closed_over(**values: Any) -> Callable[[], Any]:
    src, target, options = (values.get(name) for name in ("src", "target", "options"))
    return lambda: (src, target, options)


class Source:
    """As Triton's: a function with its types, constants and attributes."""

    def __init__(self, module: str, constants: Any) -> None:
        self.fn = type("Function", (), {"__module__": module, "__name__": "kernel", "cache_key": "abc"})()
        self.signature, self.constants, self.attrs = {"x_ptr": "*fp32"}, constants, {}


class Options:
    def __init__(self) -> None:
        self.num_warps = 4


def test_only_what_another_process_can_build_is_a_job() -> None:
    job = job_of(closed_over(src=Source("somewhere", {(1,): 32}), target="cuda:90", options=Options()))
    assert job is not None
    assert (job.module, job.name, job.source, job.options) == ("somewhere", "kernel", "abc", {"num_warps": 4})
    assert job_of(closed_over(src=Source("__main__", {}), target="cuda:90", options=Options())) is None
    assert job_of(closed_over(src=Source("somewhere", {(1,): lambda: 1}), target="cuda:90", options=Options())) is None
    assert job_of(closed_over()) is None
    assert job_of(print) is None


def test_quick_builds_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers, asked = Helpers(), list[int]()
    monkeypatch.setattr(helpers, "start", lambda: asked.append(1))
    assert helpers.build(lambda: "kernel") == "kernel"
    assert not asked
    monkeypatch.setattr(build_helpers, "SLOW", -1.0)
    assert helpers.build(lambda: "kernel") == "kernel"
    assert len(asked) == 1


def test_what_goes_wrong_here_is_told() -> None:
    def broken() -> None:
        raise ValueError("no such type")

    with pytest.raises(ValueError, match="no such type"):
        Helpers().build(broken)


def test_processes_that_do_not_start_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was built is not lost, and no pipes are left, however often it is tried."""
    monkeypatch.setattr(build_helpers, "SLOW", -1.0)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    helpers, before = Helpers(), os.listdir("/proc/self/fd")
    assert [helpers.build(lambda: "kernel") for _ in range(2)] == ["kernel"] * 2
    assert len(os.listdir("/proc/self/fd")) == len(before)
    helpers.close()


FIND = textwrap.dedent(
    """
    import json
    from importlib import import_module
    from modelrunner.plugins.triton_kernels import AREAS

    builds = [build for area in AREAS for build in import_module(f"modelrunner.kernels.{area}.gpu").BUILDS]
    print(json.dumps(sorted({(build.kernel.__module__, build.kernel.__name__) for build in builds})))
    """
)
KEYS = textwrap.dedent(
    """
    import json, sys
    from importlib import import_module
    from modelrunner.kernels import build_process

    if sys.argv[1] == "without torch":
        build_process.get_ready()
    build_process.same_keys()
    keys = {name: getattr(import_module(module), name).cache_key for module, name in json.loads(sys.argv[2])}
    print(json.dumps([keys, hasattr(sys.modules.get("torch"), "__version__")]))
    """
)


def told(code: str, *arguments: str) -> Any:
    """What a process of its own prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", code, *arguments]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=True).stdout)


@pytest.mark.slow
def test_a_process_without_torch_finds_the_same_kernels() -> None:
    """In whatever order it meets them: else it would say that they are not the same, and everything was built here."""
    pytest.importorskip("triton")
    kernels = told(FIND)
    here, torch = told(KEYS, "as usual", json.dumps(kernels))
    there, torch_there = told(KEYS, "without torch", json.dumps(kernels[::-1]))
    assert torch
    assert not torch_there
    assert here == there
    assert len(here) > 30


def test_a_triton_that_makes_keys_otherwise_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is mended is of its inner parts, which another version may not have."""
    jit = pytest.importorskip("triton.runtime.jit")
    monkeypatch.delattr(jit.DependenciesFinder, "_update_hash")
    build_process.same_keys()
    assert not hasattr(jit.DependenciesFinder, "_update_hash")


def test_the_record_of_a_start_is_that_of_these_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that finds none has the processes started at once."""
    started = list[int]()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build_helpers.HELPERS, "start", lambda: started.append(1))
    build_helpers.begin()
    build_helpers.begun()
    assert started == [1]
    build_helpers.done()
    build_helpers.begin()
    assert started == [1]
    monkeypatch.setattr(build_helpers, "version", lambda name: "another")
    build_helpers.begin()
    assert started == [1, 1]


def test_without_triton_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on systems that have a GPU and no Triton, where there might be no such processes either."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(build_helpers.HELPERS, "start", lambda: pytest.fail("started"))
    build_helpers.begin()


def test_a_user_without_a_home_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton needs none, least of all where its folder is given."""

    def homeless(_: int) -> None:
        raise KeyError("no such user")

    for name in ("HOME", "TRITON_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", homeless)
    assert build_helpers.cache_folder() == Path("~/.triton/cache")
    monkeypatch.setenv("TRITON_HOME", "/t")
    assert build_helpers.cache_folder() == Path("/t/.triton/cache")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/c")
    assert build_helpers.cache_folder() == Path("/c")

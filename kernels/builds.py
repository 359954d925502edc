"""Ahead-of-time builds of the Triton kernels: what tests compile for several GPUs without having one.

Every `kernels/<area>/gpu.py` lists its shipped configurations as `BUILDS`. The report (registers, spilled bytes, shared memory, SASS) comes
from the `cuobjdump` in Triton's package. None of this runs where TRITON_INTERPRET is set: kernels are then decorated for the interpreter.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CAPABILITIES = (80, 90, 100)  # A100, H100/H200, B200
PDL_SINCE = 90


@dataclass(frozen=True)
class Build:
    """A kernel with the types and constants of one configuration.

    kernel: the `@triton.jit` function. signature: argument -> Triton type ("*bf16", "i32"); it needs none of those in
    `constexprs`, and may name what other kernels take. constexprs: values of the constants; one named PDL is False below
    capability 90. max_spill_bytes: stack bytes a thread may use. divisible: integer arguments that the launch finds divisible
    by 16 (pointers always are). capabilities: what it is compiled for. registers: of a thread where a program starts, if not as many as
    the compiler likes.
    """

    kernel: Callable[..., Any]
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    max_spill_bytes: int = 0
    divisible: tuple[str, ...] = ()
    capabilities: tuple[int, ...] = CAPABILITIES
    registers: int | None = None

    @property
    def name(self) -> str:
        """The kernel and what tells its builds apart."""
        kinds = [self.signature[name] for name in self.kernel.arg_names if name not in self.constexprs]  # type: ignore[attr-defined]
        types = dict.fromkeys(kind for kind in kinds if kind.startswith("*"))
        return (
            f"{self.kernel.__name__}[{' '.join(types)}]({', '.join(f'{k}={v}' for k, v in self.constexprs.items())}) {self.num_warps} warps"
        )


@dataclass(frozen=True)
class Report:
    """What the compiler made of a build: per thread registers and stack bytes (spills), shared memory in bytes, and the machine code."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    cubin: bytes

    def sass(self) -> str:
        return _cuobjdump(self.cubin, "-sass")


def compile_build(build: Build, capability: int) -> Report:
    """Compile for `capability` (90 for sm_90); raises what Triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget

    constants = dict(build.constexprs)
    if capability < PDL_SINCE and "PDL" in constants:
        constants["PDL"] = False
    names: list[str] = build.kernel.arg_names  # type: ignore[attr-defined]
    signature = {name: "constexpr" if name in constants else build.signature[name] for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name].startswith("*") or name in build.divisible]
    source = _source_type(build.kernel)(build.kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages, "enable_fp_fusion": True, "maxnreg": build.registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return _report(compiled.asm["cubin"], compiled.metadata.shared)


def _source_type(kernel: Callable[..., Any]) -> Any:
    """Of Triton, or of Gluon."""
    if kernel.is_gluon():  # type: ignore[attr-defined]
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


def _report(cubin: bytes, shared: int) -> Report:
    usage = _cuobjdump(cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump -res-usage names no registers; it printed {usage!r}")
    return Report(int(found[1]), int(found[2]), shared, cubin)


def _cuobjdump(cubin: bytes, flag: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([tool, flag, path], capture_output=True, text=True, check=True).stdout

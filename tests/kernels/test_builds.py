"""Every shipped kernel configuration compiles for A100, H100 and B200, without a GPU and without spilling registers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from modelrunner.kernels.builds import CAPABILITIES
from modelrunner.plugins.triton_kernels import AREAS

FOLDER = Path(__file__).parent
# Kernels are decorated for the interpreter or for the compiler once a process: this one has none of the test's environment.
CODE = """
import sys
from importlib import import_module
from modelrunner.kernels.builds import compile_build
capability = int(sys.argv[2])
for build in import_module(sys.argv[1]).BUILDS:
    if capability not in build.capabilities:
        continue
    try:
        report = compile_build(build, capability)
    except Exception as error:
        print(f"BAD {build.name}: {error!r}")
        continue
    bad = report.spill_bytes > build.max_spill_bytes
    print(f"{'BAD' if bad else 'good'} {build.name}: {report.registers} registers, "
          f"{report.spill_bytes} bytes spilled, {report.shared_bytes} bytes shared")
"""


def build_all(module: str, capability: int) -> list[str]:
    """Compile the BUILDS of `module`; a line for each."""
    pytest.importorskip("triton")
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(FOLDER)}
    command = [sys.executable, "-P", "-c", CODE, module, str(capability)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("area", AREAS)
def test_builds(area: str, capability: int) -> None:
    lines = build_all(f"modelrunner.kernels.{area}.gpu", capability)
    assert lines
    assert [line for line in lines if not line.startswith("good")] == []


FETCHED_AHEAD = """
from modelrunner.kernels.attention.gpu import BUILDS
from modelrunner.kernels.builds import compile_build
build = next(build for build in BUILDS if build.constexprs.get("R"))
sass = compile_build(build, 90).sass()
print(0 < sass.find("LDGSTS") < sass.find("ACQBULK"))
"""
WEIGHTS_AHEAD = """
from modelrunner.kernels.builds import compile_build
from modelrunner.kernels.linear.gpu import BUILDS
build = next(build for build in BUILDS if build.constexprs.get("EARLY"))
sass = compile_build(build, 90).sass()
print(0 < sass.find("UTMALDG") < sass.find("ACQBULK"))
"""
IN_A_ROW = """
from modelrunner.kernels.builds import compile_build
from modelrunner.kernels.linear.gpu import BUILDS
rings = [compile_build(build, 90).sass() for build in BUILDS if build.kernel.__name__ in ("ring_kernel", "wide_kernel")]
print(len(rings) > 3 and all(2 * sass.count("WARPGROUP.DEPBAR") <= sass.count("HGMMA") for sass in rings))
"""
KEPT_IN_CACHE = """
import re
from modelrunner.kernels.builds import compile_build
from modelrunner.kernels.linear.gpu import BUILDS
def sass(kernel, keep):
    parts = (b for b in BUILDS if b.kernel.__name__ == kernel and b.constexprs.get("part_ptr", "") is not None and 90 in b.capabilities)
    return compile_build(next(b for b in parts if b.constexprs.get("KEEP", keep) == keep), 90).sass()
policy = re.compile("UMOV UR[0-9]+, 0x140 ")  # the descriptor's upper half of what is to be evicted last
kept = [bool(policy.search(sass(*build))) for build in (("ring_kernel", True), ("stream_kernel", True), ("tile_kernel", False))]
print(kept == [True, True, False])
"""
MADE_SMALLER = """
import re
from modelrunner.kernels.attention.gpu import BUILDS
from modelrunner.kernels.builds import compile_build
build = next(build for build in BUILDS if build.kernel.__name__ == "prefill_attention" and build.constexprs["IN_HALF"])
sass = compile_build(build, 90).sass()
print(bool(re.search(r"H(MUL2|FMA2)\\.BF16", sass)) and not re.search(r"H(MUL2|FMA2)(?!\\.BF16|\\.MMA)", sass))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [FETCHED_AHEAD, WEIGHTS_AHEAD, IN_A_ROW, KEPT_IN_CACHE, MADE_SMALLER],
    ids=["keys", "weights", "products in a row", "parts", "queries in half"],
)
def test_machine_code(code: str) -> None:
    """Keys and weights are on their way to shared memory before the wait for the kernel before; products of a step do not wait for each
    other; parts of large weights stay in the L2 cache; queries become small, then float16."""
    pytest.importorskip("triton")
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environ, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stdout + done.stderr


def test_a_build_that_does_not_compile_or_spills_is_found() -> None:
    lines = build_all("bad_builds", 90)
    assert [(line.split()[0], line.split()[1].partition("[")[0]) for line in lines] == [
        ("good", "copy"),
        ("BAD", "misspelt"),
        ("BAD", "spilling"),
    ]


def test_every_area_with_kernels_is_registered() -> None:
    """And so built above."""
    folder = Path(__file__).parents[2] / "kernels"
    assert sorted(AREAS) == sorted(path.parent.name for path in folder.glob("*/gpu.py"))

"""The operation registry: who owns a name, and which implementation it gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from modelrunner.errors import PluginError, PluginWarning
from modelrunner.hookspecs import hookimpl
from modelrunner.ops import CLOSE, EXACT, Ops, Registry
from modelrunner.plugin_manager import PluginManager
from modelrunner.plugins import reference_kernels


def add(a: int, b: int) -> int:
    return a + b


def double(a: int) -> int:
    return 2 * a


def add_double(ops: Ops) -> Callable[..., Any]:
    return lambda a, b: ops.double(ops.add(a, b))


@pytest.fixture
def registry() -> Registry:
    """Two operations of plugin `base` and a fusion of both."""
    registry = Registry()
    base = registry.for_plugin("base")
    base.op("add", add, area="math")
    base.op("double", double, area="math", tolerance=CLOSE)
    base.fusion("add_double", ("add", "double"), add_double)
    return registry


def test_references_run_when_nothing_else_is_there(registry: Registry) -> None:
    ops = registry.resolve("cpu")
    assert (ops.add(1, 2), ops.double(4), ops.add_double(1, 2)) == (3, 8, 6)
    assert ops.explain() == {
        "add": "reference of base",
        "double": "reference of base",
        "add_double": "plain chain of add + double (no fused form for cpu)",
    }
    assert registry.tolerances()["add"] == EXACT
    assert registry.tolerances()["double"] == CLOSE


def test_a_second_owner_is_refused_naming_both(registry: Registry) -> None:
    other = registry.for_plugin("other")
    with pytest.raises(PluginError, match=r"'other'.*'add'.*'base' has registered already"):
        other.op("add", add, area="math")
    with pytest.raises(PluginError, match=r"'other'.*'add_double'.*'base' has registered already"):
        other.fusion("add_double", ("add",), add_double)
    other.override("add", add, device_type="cuda")
    with pytest.raises(PluginError, match=r"'third'.*'add' on 'cuda'.*'other' overrides already"):
        registry.for_plugin("third").override("add", add, device_type="cuda")
    registry.for_plugin("third").override("add", add, device_type="cpu")


def test_an_override_counts_on_its_device_only(registry: Registry) -> None:
    registry.for_plugin("fast").override("add", lambda a, b: 100 + a + b, device_type="cuda")
    assert registry.resolve("cpu").add(1, 2) == 3
    ops = registry.resolve("cuda")
    assert ops.add(1, 2) == 103
    assert ops.explain()["add"] == "override of fast for cuda"
    assert ops.add_double(1, 2) == 206, "the plain chain is made of what was chosen"


def test_an_unsupported_override_leaves_the_reference_and_says_why(registry: Registry) -> None:
    registry.for_plugin("fast").override("add", lambda a, b: -1, device_type="cpu", supports=lambda: "needs AVX-512")
    registry.for_plugin("fast").override("double", lambda a: -a, device_type="cpu", supports=lambda: None)
    ops = registry.resolve("cpu")
    assert (ops.add(1, 2), ops.double(4)) == (3, -4)
    assert ops.explain()["add"] == "reference of base (fast's override does not support it: needs AVX-512)"


def test_an_override_that_cannot_tell_whether_it_runs_is_named(registry: Registry) -> None:
    registry.for_plugin("fast").override("add", lambda a, b: -1, device_type="cpu", supports=lambda: str(1 // 0))
    with pytest.raises(PluginError, match=r"plugin 'fast' cannot tell .* operation 'add' runs on 'cpu': ZeroDivisionError"):
        registry.resolve("cpu")


def fused(a: int, b: int) -> int:
    return 1000 + 2 * (a + b)


def test_a_fused_form_runs_while_nobody_else_overrides_a_part(registry: Registry) -> None:
    fast = registry.for_plugin("fast")
    fast.override("add_double", fused, device_type="cuda")
    fast.override("add", add, device_type="cuda")  # by the same plugin: it knows what it fuses
    assert registry.resolve("cuda").add_double(1, 2) == 1006
    assert registry.resolve("cuda").explain()["add_double"] == "fused by fast for cuda: add + double"
    assert registry.resolve("cpu").add_double(1, 2) == 6
    registry.for_plugin("stranger").override("double", double, device_type="cuda")
    ops = registry.resolve("cuda")
    assert ops.add_double(1, 2) == 6
    assert ops.explain()["add_double"] == "plain chain of add + double (double is overridden by stranger)"


@pytest.mark.parametrize("part", ["add", "add_double"])
def test_a_fused_form_needs_every_part_supported(registry: Registry, part: str) -> None:
    fast = registry.for_plugin("fast")
    if part != "add_double":
        fast.override("add_double", fused, device_type="cuda")
    fast.override(part, fused, device_type="cuda", supports=lambda: "head size 96")
    ops = registry.resolve("cuda")
    assert ops.add_double(1, 2) == 6
    assert "head size 96" in ops.explain()["add_double"]


def test_a_fusion_may_bring_its_fused_form(registry: Registry) -> None:
    fast = registry.for_plugin("fast")
    fast.fusion("twice", ("double",), lambda ops: lambda a: ops.double(ops.double(a)), lambda a: 7, device_type="cuda")
    assert (registry.resolve("cpu").twice(3), registry.resolve("cuda").twice(3)) == (12, 7)
    with pytest.raises(PluginError, match=r"'fast'.*'thrice'.*give both, or neither"):
        fast.fusion("thrice", ("double",), add_double, lambda a: 7)


def test_names_that_nobody_registered_are_reported_together(registry: Registry) -> None:
    registry.for_plugin("fast").override("ad", add, device_type="cuda")
    registry.for_plugin("odd").fusion("pair", ("add", "halve"), add_double)
    with pytest.raises(PluginError, match=r"'fast'.*'ad' on 'cuda'.*'odd'.*'pair' of 'halve'.*registered are add, add_double, double"):
        registry.resolve("cpu")


@pytest.mark.parametrize("name", ["", "two words", "_reasons", "explain"])
def test_a_name_must_work_as_an_attribute(registry: Registry, name: str) -> None:
    with pytest.raises(PluginError, match="must be a Python identifier"):
        registry.op(name, add, area="math")


def test_an_unknown_operation_lists_the_known_ones(registry: Registry) -> None:
    with pytest.raises(AttributeError, match=r"no operation 'subtract'.*add.*double"):
        registry.resolve("cpu").subtract(1, 2)


def test_a_snapshot_undoes_half_a_plugin(registry: Registry) -> None:
    before = registry.resolve("cpu").explain()
    undo = registry.snapshot()
    broken = registry.for_plugin("broken")
    broken.op("negate", double, area="math")
    broken.override("add", double, device_type="cpu")
    assert registry.resolve("cpu").explain() != before
    undo()
    assert registry.resolve("cpu").explain() == before


class Rival:
    """A plugin that registers a name the built-in kernels own."""

    @hookimpl
    def kernels(self, register: Any) -> None:
        register.op("only_mine", double, area="norm")
        register.op("rms_norm", double, area="norm")


def test_plugins_register_under_their_own_names() -> None:
    """Through the real hook: the message names both owners, and the late one's registrations are undone."""
    manager = PluginManager.load([reference_kernels, Rival()], environ={}, discover=False)
    registry = Registry()
    with pytest.warns(PluginWarning, match=r"Rival.*rms_norm.*reference_kernels' has registered already"):
        manager.call("kernels", register=registry, device=None)
    explained = registry.resolve("cpu").explain()
    assert explained["rms_norm"].endswith("reference_kernels")
    assert "only_mine" not in explained


def test_the_built_in_operations_resolve_and_run() -> None:
    registry = Registry()
    reference_kernels.kernels(registry.for_plugin("modelrunner:reference_kernels"), None)
    ops = registry.resolve("cpu")
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, ops.rms_norm(total, weight, 1e-6))
    reasons = ops.explain()
    assert reasons["add_rms_norm"] == "plain chain of rms_norm (no fused form for cpu)"
    chains = {name: reason for name, reason in reasons.items() if reason.startswith("plain chain of ")}
    assert sorted(chains) == [
        "add_rms_norm",
        "finish_step",
        "gather_step",
        "greedy_rows",
        "matmul_add",
        "matmul_add_in_place",
        "norm_gated_matmul",
        "norm_matmul",
        "qkv_attention",
        "qkv_rope_write",
        "sample_rows",
    ]
    assert {reason for name, reason in reasons.items() if name not in chains} == {"reference of modelrunner:reference_kernels"}

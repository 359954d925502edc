"""The setting `device.deterministic` where it cannot be kept, and which operations it takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from modelrunner import Engine
from modelrunner.choosing import require_deterministic
from modelrunner.errors import PluginError, SettingsError
from modelrunner.linear import PlainScheme
from modelrunner.model_state import required_features
from modelrunner.ops import Registry
from modelrunner.plugins import fusions, reference_kernels, triton_kernels
from modelrunner.settings import load_settings
from modelrunner.testing import dense, options


def test_a_device_without_such_operations_is_an_error() -> None:
    subject = dense()
    with pytest.raises(SettingsError, match=r"device\.deterministic is set, but with device 'cpu' .*device\.name"):
        Engine({"model": {"name": subject.model}, "deterministic": True} | options(), plugins=subject.plugins)


def test_components_are_asked() -> None:
    on, off = load_settings({"deterministic": True}), load_settings({})
    mixing = SimpleNamespace(deterministic=False)
    require_deterministic(off, mixing, "a", "b")
    require_deterministic(on, PlainScheme, "a", "b")
    with pytest.raises(SettingsError, match=r"with linear scheme packed a request.*linear\.scheme"):
        require_deterministic(on, mixing, "linear scheme packed", "linear.scheme")
    assert "deterministic" in required_features(on)
    assert "deterministic" not in required_features(off)


def resolved(deterministic: bool) -> dict[str, str]:
    """Why each operation is what it is, on CUDA."""
    device: Any = SimpleNamespace(type="cuda", settings=load_settings({"deterministic": deterministic}))
    registry = Registry()
    for plugin in (reference_kernels, triton_kernels):
        plugin.kernels(registry.for_plugin(plugin.__name__), device)
    ops = registry.resolve("cuda")
    assert ops.matmul.__name__ == ("fixed_matmul" if deterministic else "matmul")
    return ops.explain()


def test_fusions_that_mix_rows_give_way_to_plain_chains() -> None:
    pytest.importorskip("triton")
    fixed, fast = resolved(True), resolved(False)
    for name in (
        "norm_matmul",
        "norm_gated_matmul",
        "matmul_add",
        "matmul_add_in_place",
        "add_rms_norm",
        "qkv_attention",
        "qkv_rope_write",
    ):
        assert fast[name].startswith("fused by")
        assert fixed[name].startswith("plain chain of")
        assert hasattr(fusions, name)
    assert fixed["gather_step"] == fast["gather_step"], "what mixes nothing stays"


def test_without_triton_the_mode_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(triton_kernels, "import_module", missing)
    device: Any = SimpleNamespace(type="cuda", settings=load_settings({"deterministic": True}))
    with pytest.raises(PluginError, match="written in Triton"):
        triton_kernels.kernels(Registry(), device)

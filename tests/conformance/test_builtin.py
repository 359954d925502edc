"""The built-in devices and linear schemes pass their suites."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from modelrunner import packed_scheme
from modelrunner.devices.cpu import CpuDevice
from modelrunner.devices.cuda import CudaDevice
from modelrunner.devices.deferred import DeferredCpuDevice
from modelrunner.kernels.linear import fbgemm, onednn
from modelrunner.linear import Int8Scheme, PlainScheme
from modelrunner.packed_scheme import PackedFloatScheme, PackedHalfScheme, PackedInt8Scheme
from modelrunner.testing.conformance import DeviceConformance, LinearSchemeConformance


class TestPlain(LinearSchemeConformance):
    scheme = PlainScheme
    dtypes = (torch.float32, torch.bfloat16, torch.float16)


class TestInt8(LinearSchemeConformance):
    scheme = Int8Scheme
    error = 0.02


needs_fbgemm = pytest.mark.skipif(fbgemm.problem() is not None, reason=str(fbgemm.problem()))


@needs_fbgemm
class TestPackedBfloat16(LinearSchemeConformance):
    scheme = PackedHalfScheme
    dtypes = (torch.bfloat16,)


@needs_fbgemm
class TestPackedFloat16(LinearSchemeConformance):
    scheme = PackedHalfScheme
    dtypes = (torch.float16,)


@pytest.mark.skipif(onednn.problem() is not None, reason=str(onednn.problem()))
class TestPackedFloat32(LinearSchemeConformance):
    scheme = PackedFloatScheme
    dtypes = (torch.float32,)

    @pytest.fixture(autouse=True)
    def _sizes_of_both_kinds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packed_scheme, "LARGE", 1000)


@needs_fbgemm
class TestPackedInt8(LinearSchemeConformance):
    scheme = PackedInt8Scheme
    error = 0.02


@pytest.mark.gpu
class TestPlainOnCuda(LinearSchemeConformance):
    scheme = PlainScheme
    device_type = "cuda"


@pytest.mark.gpu
class TestInt8OnCuda(LinearSchemeConformance):
    scheme = Int8Scheme
    error = 0.02
    device_type = "cuda"


class TestCpu(DeviceConformance):
    device = CpuDevice


class TestDeferredCpu(DeviceConformance):
    device = DeferredCpuDevice


class TestDeferredCpuThatNeverRunsEarly(DeviceConformance):
    device = DeferredCpuDevice
    settings: ClassVar = {"plugin.deferred_cpu.run_probability": 0.0}


@pytest.mark.gpu
class TestCuda(DeviceConformance):
    device = CudaDevice

"""The suites of kernels, linear schemes and devices find broken ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from modelrunner.devices.cpu import CpuDevice, copy_bytes
from modelrunner.devices.deferred import DeferredCpuDevice
from modelrunner.errors import PluginError
from modelrunner.hookspecs import hookimpl
from modelrunner.kernels.attention import indexed_attention, indexed_write
from modelrunner.kernels.batch import gather_rows, slot_mapping
from modelrunner.kernels.norm import rms_norm
from modelrunner.kernels.table import update_state
from modelrunner.linear import Int8Scheme, PlainScheme
from modelrunner.testing.conformance import DeviceConformance, Draw, KernelConformance, LinearSchemeConformance
from modelrunner.testing.conformance.kernel_cases import CASES

# ---- kernels -----------------------------------------------------------------------------------------------------------


def kernel(op: str, function: Callable[..., Any] | None = None, **attributes: Any) -> KernelConformance:
    if function is not None:
        attributes["function"] = staticmethod(function)
    suite: KernelConformance = type("Suite", (KernelConformance,), {"op": op, **attributes})()
    return suite


@pytest.mark.parametrize("op", CASES)
def test_a_copy_of_the_reference_passes(op: str) -> None:
    """And the cases are about something: first results are not all zero, and attention outputs are finite."""
    suite = kernel(op)
    suite.test_equals_the_reference()
    suite.test_gives_the_same_bits_again()
    plain, _, _ = suite.registered()
    for case, size in suite.cases():
        first, *others = suite.results(plain, case, size, torch.float32, 0)
        assert first.nan_to_num().ne(0).any()
        assert "attention" not in op or others[0].item() is True


def test_every_built_in_operation_has_cases() -> None:
    assert set(kernel("matmul").registered()[0].explain()) == set(CASES)


def coarse(x, weight, eps):
    return rms_norm(x, weight, eps + 1e-3)


def wide(x, weight, eps):
    return rms_norm(x.float(), weight.float(), eps)


def flat_only(x, weight, eps):
    return rms_norm(x.contiguous().view(-1, weight.numel()), weight, eps)


def ignores_strides(x, weight, eps):
    return rms_norm(x.as_strided(x.shape, torch.empty(x.shape).stride()), weight, eps)


def revives_the_dead(*arguments):
    rows, num_query, generations, computed, known, finished, *rest = arguments
    gather_rows(rows, num_query, generations, computed, known, torch.zeros_like(finished), *rest)


def forgets_the_null_page(block_table, token_row, positions, token_valid, tokens_per_page, out):
    slot_mapping(block_table + 1, token_row, positions, token_valid, tokens_per_page, out)
    out[out >= 0] -= tokens_per_page


def ignores_stops(*arguments):
    *rest, seat, stop_ids = arguments
    return update_state(*rest, torch.full_like(seat, -1), stop_ids)


def ignores_softcap(q, cache, index, *, scale, softcap=None):
    return indexed_attention(q, cache, index, scale=scale)


def dirties_the_null_page(cache, k, v, index):
    indexed_write(cache, k, v, index)
    cache[0, 0] = 1.0


BROKEN_KERNELS = [
    ("rms_norm", coarse, "result 0"),
    ("rms_norm", wide, "dtype"),
    ("rms_norm", flat_only, "shape"),
    ("rms_norm", ignores_strides, "result 0"),
    ("gather_rows", revives_the_dead, "result 0"),
    ("slot_mapping", forgets_the_null_page, "result 0"),
    ("update_state", ignores_stops, "result 0"),
    ("indexed_attention", ignores_softcap, "softcap=20.0"),
    ("indexed_write", dirties_the_null_page, "result"),
]


@pytest.mark.parametrize(("op", "function", "message"), BROKEN_KERNELS, ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_kernel_is_found(op: str, function: Callable[..., Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        kernel(op, function).test_equals_the_reference()


def test_a_kernel_with_an_accident_in_it_is_found() -> None:
    calls = iter(range(1_000_000))

    def unsteady(x, weight, eps):
        return rms_norm(x, weight, eps) * (1 + 1e-7 * (next(calls) % 97))

    kernel("rms_norm", unsteady).test_equals_the_reference()
    with pytest.raises(AssertionError, match="rms_norm run again"):
        kernel("rms_norm", unsteady).test_gives_the_same_bits_again()


class OwnOperation:
    """A plugin with an operation of its own, overridden on the CPU."""

    MODELRUNNER_API = ">=1,<2"

    def __init__(self, override: Callable[..., Any]) -> None:
        self.override = override

    @hookimpl
    def kernels(self, register: Any) -> None:
        register.op("halve", lambda x: x / 2, area="tests")
        register.override("halve", self.override, device_type="cpu")


def halve(ops: Any, draw: Draw, size: int) -> Any:
    return ops.halve(draw.noise(size))


def test_an_operation_of_ones_own_brings_its_cases() -> None:
    def suite(override: Callable[..., Any]) -> KernelConformance:
        return kernel("halve", plugins=(OwnOperation(override),), cases=lambda self: [(halve, (63,))])

    suite(lambda x: x * 0.5).test_equals_the_reference()
    with pytest.raises(AssertionError, match=r"halve in torch.float32, sizes \(63,\)"):
        suite(lambda x: x * 0.25).test_equals_the_reference()
    with pytest.raises(KeyError, match="no cases for operation 'halve'"):
        kernel("halve", plugins=(OwnOperation(lambda x: x),)).test_equals_the_reference()
    with pytest.raises(KeyError, match="no operation 'double' is registered"):
        kernel("double").test_equals_the_reference()


# ---- linear schemes ----------------------------------------------------------------------------------------------------


class SwapsParts(PlainScheme):
    def load(self, layer, rows, weight):
        super().load(layer, slice(layer.out_features - rows.stop, layer.out_features - rows.start), weight)


class CountsLoads(PlainScheme):
    """The second load adds to the first."""

    def create(self, layer):
        super().create(layer)
        layer.weight.data.zero_()

    def load(self, layer, rows, weight):
        layer.weight.data[rows] += weight.to(self.dtype)


class MovesWeights(PlainScheme):
    def load(self, layer, rows, weight):
        new = layer.weight.data.clone()
        new[rows] = weight.to(self.dtype)
        layer.weight = torch.nn.Parameter(new, requires_grad=False)


class OneScale(Int8Scheme):
    """One scale for a whole part."""

    def load(self, layer, rows, weight):
        wide = weight.float()
        scale = wide.abs().max() / 127
        layer.qweight[rows].copy_((wide / scale).round())
        layer.scale[rows] = scale
        layer.packed_scale[rows] = scale


class QuantisesActivations(PlainScheme):
    """To 8 bits over all rows together."""

    def apply(self, layer, x):
        scale = x.abs().amax() / 127
        return super().apply(layer, (x / scale).round() * scale)


class Widens(PlainScheme):
    def apply(self, layer, x):
        return super().apply(layer, x).float()


class ChangesX(PlainScheme):
    def apply(self, layer, x):
        return super().apply(layer, x.mul_(1.0001))


class WritesTheEmbedding(PlainScheme):
    def load(self, layer, rows, weight):
        super().load(layer, rows, weight * 1.001)


BROKEN_SCHEMES = {
    SwapsParts: ("test_applies_its_weight", "of the product's norm away"),
    CountsLoads: ("test_reloads_in_place", "differs from a fresh one"),
    MovesWeights: ("test_reloads_in_place", "elsewhere after a reload"),
    OneScale: ("test_zero_and_large_rows", "beside an output row ten thousand times as large"),
    QuantisesActivations: ("test_rows_do_not_mix", "beside rows a thousand times as large"),
    Widens: ("test_applies_its_weight", "got torch.float32"),
    ChangesX: ("test_applies_its_weight", "x was changed"),
    WritesTheEmbedding: ("test_tied", "the embedding was changed"),
}


@pytest.mark.parametrize("scheme", BROKEN_SCHEMES, ids=lambda scheme: scheme.__name__)
def test_a_broken_scheme_is_found(scheme: type[PlainScheme]) -> None:
    name, message = BROKEN_SCHEMES[scheme]
    suite = type("Suite", (LinearSchemeConformance,), {"scheme": scheme, "error": 0.02})()
    with pytest.raises(AssertionError, match=message):
        getattr(suite, name)()


# ---- devices -----------------------------------------------------------------------------------------------------------


class LastFirst(DeferredCpuDevice):
    def _run_work(self) -> None:
        self._work.rotate(1)
        super()._run_work()


class CopiesAtOnce(DeferredCpuDevice):
    """Does not wait for the work before the copy."""

    def download(self, source, target):
        copy_bytes(source(), target)
        return super().download(lambda: target.tensor[:0], target)


class LosesWork(CpuDevice):
    def launch(self, work):
        self.count = getattr(self, "count", 0) + 1
        if self.count % 50:
            work()


class TwoMemories(CpuDevice):
    def pinned(self, num_bytes):
        buffer = super().pinned(num_bytes)
        buffer.array = buffer.array.copy()
        return buffer


class CopiesTooMuch(CpuDevice):
    def download(self, source, target):
        target.tensor.zero_()
        return super().download(source, target)


class DoesNotWait(DeferredCpuDevice):
    def synchronize(self) -> None:
        return None


class Greedy(CpuDevice):
    def cache_budget(self, memory_fraction):
        return self.memory()[1] * 2


class CountsNothing(CpuDevice):
    measures = True

    def peak(self, work):
        work()
        return 0


class ReadsLate(DeferredCpuDevice):
    """Runs work only when the next work comes."""

    def launch(self, work):
        held, self.held = getattr(self, "held", None), work
        if held is not None:
            super().launch(held)


BROKEN_DEVICES = {
    LastFirst: ("test_work_runs_in_order_and_all_of_it", "out of order"),
    CopiesAtOnce: ("test_a_download_has_all_work_before_it", "the work before it wrote"),
    LosesWork: ("test_work_runs_in_order_and_all_of_it", "not at all"),
    TwoMemories: ("test_a_pinned_buffer_is_one_memory", "does not see"),
    CopiesTooMuch: ("test_a_download_fills_the_start_of_its_buffer", "bytes past the source"),
    DoesNotWait: ("test_synchronize_waits_for_everything", "has not happened"),
    Greedy: ("test_memory", "cache_budget"),
    CountsNothing: ("test_peak", "peak is 0 bytes"),
    ReadsLate: ("test_work_reads_pinned_memory_as_it_was_left", "work read a pinned buffer"),
}


@pytest.mark.parametrize("device", BROKEN_DEVICES, ids=lambda device: device.__name__)
def test_a_broken_device_is_found(device: type[CpuDevice]) -> None:
    name, message = BROKEN_DEVICES[device]
    suite = type("Suite", (DeviceConformance,), {"device": device})()
    with pytest.raises(AssertionError, match=message):
        getattr(suite, name)()


def test_a_device_with_a_copy_too_early_breaks_an_engine() -> None:
    suite = type("Suite", (DeviceConformance,), {"device": CopiesAtOnce})()
    with pytest.raises((AssertionError, PluginError)):
        suite.test_an_engine_gives_its_reference_results()


# ---- the package -------------------------------------------------------------------------------------------------------


def test_the_other_helpers_do_without_pytest() -> None:
    code = "import sys, modelrunner.testing; assert 'pytest' not in sys.modules and '_pytest' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)

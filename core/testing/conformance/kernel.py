"""The conformance suite of a kernel: an override of a named operation against its reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import pytest
import torch

from modelrunner.assemble import resolve_ops, settle
from modelrunner.device import Device
from modelrunner.ops import Ops, Registry, Tolerance
from modelrunner.plugin_manager import PluginManager
from modelrunner.testing.conformance.kernel_cases import Draw, cases_of

SEEDS = (0, 1)


class KernelConformance:
    """An override gives what the reference gives, within the operation's tolerance. Subclass it in a test file:

        class TestFastNorm(KernelConformance):
            op = "rms_norm"
            function = staticmethod(fast_rms_norm)     # left out: what the installed plugins give for `device_type`

    op: the operation. device_type: where it runs ("cpu", "cuda"); the tests are skipped where that device is absent. dtypes: of
    activations. plugins: more plugin objects or module names. An operation of your own needs cases, functions of (ops, draw, *sizes) as
    `kernel_cases` has them:

            def cases(self):
                return [(my_case, (7, 63)), (my_case, (1, 1))]
    """

    op: ClassVar[str]
    function: ClassVar[Callable[..., Any] | None] = None
    device_type: ClassVar[str] = "cpu"
    dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float32, torch.bfloat16)
    plugins: ClassVar[Sequence[object]] = ()

    def cases(self) -> Iterable[tuple[Callable[..., Any], tuple[Any, ...]]]:
        return cases_of(self.op)

    # ---- the two implementations -----------------------------------------------------------------------------------

    def registered(self) -> tuple[Ops, Ops, Tolerance]:
        """References of all operations, the same with the override in its place, and the tolerance."""
        manager = PluginManager.load(self.plugins)
        settings = settle({"device.name": self.device_type}, manager)
        device: Device = manager.choose("device", pin=self.device_type, settings=settings).load()(settings)
        registry = Registry()
        manager.call("kernels", register=registry, device=device)
        if self.op not in registry.tolerances():
            raise KeyError(f"no operation {self.op!r} is registered; there are {', '.join(sorted(registry.tolerances()))}")
        plain = registry.resolve("a device that nobody overrides")
        chosen = resolve_ops(manager, device)
        function = type(self).function or getattr(chosen, self.op)
        names = {name: getattr(plain, name) for name in registry.tolerances()}
        return plain, Ops(names | {self.op: function}, plain.explain()), registry.tolerances()[self.op]

    def results(self, ops: Ops, case: Callable[..., Any], size: tuple[Any, ...], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
        """What a case returns, as a flat list of tensors."""
        generator = torch.Generator().manual_seed(seed)
        with torch.inference_mode():
            return _flat(case(ops, Draw(generator, dtype, torch.device(self.device_type)), *size))

    # ---- tests -----------------------------------------------------------------------------------------------------

    @pytest.fixture(autouse=True)
    def _device_is_there(self) -> None:
        if self.device_type == "cuda" and not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")

    def test_equals_the_reference(self) -> None:
        """Over awkward sizes, strided views, padding and dead rows; arguments changed in place included."""
        plain, override, tolerance = self.registered()
        for dtype in self.dtypes:
            relative, absolute = tolerance.by_dtype.get(dtype, (0.0, 0.0))
            for case, size in self.cases():
                for seed in SEEDS:
                    want, got = (self.results(ops, case, size, dtype, seed) for ops in (plain, override))
                    where = f"{self.op} in {dtype}, sizes {size}, seed {seed}"
                    assert len(want) == len(got), f"{where}: {len(got)} results; the reference has {len(want)}"
                    for place, (one, other) in enumerate(zip(got, want, strict=True)):
                        exact = not other.is_floating_point()
                        torch.testing.assert_close(
                            one,
                            other,
                            rtol=0.0 if exact else relative,
                            atol=0.0 if exact else absolute,
                            equal_nan=True,
                            msg=_explain(f"{where}, result {place}"),
                        )

    def test_gives_the_same_bits_again(self) -> None:
        """No result depends on the order in which a reduction happened to run."""
        _, override, _ = self.registered()
        for dtype in self.dtypes:
            for case, size in self.cases():
                first, again = (self.results(override, case, size, dtype, 0) for _ in range(2))
                for one, other in zip(first, again, strict=True):
                    torch.testing.assert_close(one, other, rtol=0.0, atol=0.0, equal_nan=True, msg=_explain(f"{self.op} run again"))


def _explain(where: str) -> Callable[[str], str]:
    return lambda text: f"{where}: {text}"


def _flat(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, dict):
        result = list(result.values())
    assert isinstance(result, list | tuple), f"a case returns tensors, or tuples, lists or dicts of them; got {type(result).__name__}"
    return [tensor for part in result for tensor in _flat(part)]

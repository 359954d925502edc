"""The conformance suite of a linear scheme: how it stores and applies the weights of `Linear` layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import ClassVar

import pytest
import torch

from modelrunner.assemble import resolve_ops, settle
from modelrunner.linear import Linear, LinearFactory, LinearScheme
from modelrunner.ops import Ops
from modelrunner.plugin_manager import PluginManager

SIZES = ((1, (1,)), (33, (7,)), (64, (96, 32, 32)), (130, (5, 64)))
ROWS = (1, 3, 17, 65)


class LinearSchemeConformance:
    """A layer of the scheme is near x @ weight.T + bias, however its parts are loaded. Subclass it in a test file:

        class TestInt4(LinearSchemeConformance):
            scheme = Int4Scheme
            error = 0.1

    scheme: the class. error: norm of the difference from the exact product, as a share of the product's norm, for random weights.
    dtypes: of activations. device_type: "cpu" or "cuda". plugins: more plugin objects or module names, e.g. with the operations it
    calls. in_multiple, out_multiple: sizes that the scheme needs; the tests' sizes are rounded up to them.
    """

    scheme: ClassVar[type[LinearScheme]]
    error: ClassVar[float] = 1e-2
    dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float32, torch.bfloat16)
    device_type: ClassVar[str] = "cpu"
    plugins: ClassVar[Sequence[object]] = ()
    in_multiple: ClassVar[int] = 1
    out_multiple: ClassVar[int] = 1

    # ---- layers ----------------------------------------------------------------------------------------------------

    @pytest.fixture(autouse=True)
    def _device_is_there(self) -> None:
        if self.device_type == "cuda" and not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")

    @property
    def device(self) -> torch.device:
        return torch.device(self.device_type)

    def ops(self) -> Ops:
        manager = PluginManager.load(self.plugins)
        settings = settle({"device.name": self.device_type}, manager)
        return resolve_ops(manager, manager.choose("device", pin=self.device_type, settings=settings).load()(settings))

    def sizes(self) -> list[tuple[int, tuple[int, ...]]]:
        """(in_features, output rows of each part)."""

        def up(n: int, multiple: int) -> int:
            return -(-n // multiple) * multiple

        return [(up(inner, self.in_multiple), tuple(up(rows, self.out_multiple) for rows in parts)) for inner, parts in SIZES]

    def make(self, ops: Ops, inner: int, parts: Sequence[int], dtype: torch.dtype, *, bias: bool = True) -> Linear:
        return LinearFactory(self.scheme(ops, dtype, self.device))(inner, parts, bias=bias)

    def weights(self, inner: int, parts: Sequence[int], seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """A weight and a bias for each part, float32 on the CPU, as a checkpoint gives them."""
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(rows, inner, generator=generator) / inner**0.5 for rows in parts]
        return weights, [torch.randn(rows, generator=generator) for rows in parts]

    def fill(self, layer: Linear, seed: int, *, backwards: bool = False) -> torch.Tensor:
        """Load every part; returns the whole weight [out, in]."""
        weights, biases = self.weights(layer.in_features, layer.out_parts, seed)
        order = range(len(weights))[::-1] if backwards else range(len(weights))
        for part in order:
            layer.load(part, weights[part])
            if layer.bias is not None:
                layer.load(part, biases[part], "bias")
        return torch.cat(weights).to(self.device)

    def rows(self, n: int, inner: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(n, inner, generator=torch.Generator().manual_seed(n)).to(self.device, dtype)

    def assert_near(self, got: torch.Tensor, want: torch.Tensor, where: str) -> None:
        difference = float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))
        assert difference <= self.error, f"{where}: {difference:.4f} of the product's norm away from it; at most {self.error} is allowed"

    # ---- tests -----------------------------------------------------------------------------------------------------

    def test_applies_its_weight(self) -> None:
        """Any number of rows, with and without a bias and leading dimensions; x is left alone; results have x's type."""
        ops = self.ops()
        for dtype, (inner, parts), bias in product(self.dtypes, self.sizes(), (True, False)):
            layer = self.make(ops, inner, parts, dtype, bias=bias)
            weight = self.fill(layer, 0)
            for n in ROWS:
                x = self.rows(n, inner, dtype)
                kept = x.clone()
                out = layer(x)
                where = f"{n} rows, [{sum(parts)}, {inner}], {dtype}{', a bias' if bias else ''}"
                assert (out.dtype, tuple(out.shape)) == (dtype, (n, sum(parts))), f"{where}: got {out.dtype}, {tuple(out.shape)}"
                assert torch.equal(x, kept), f"{where}: x was changed"
                want = x.double() @ weight.double().T
                self.assert_near(out, want if layer.bias is None else want + layer.bias.double(), where)
                assert tuple(layer(x.view(1, n, inner)).shape) == (1, n, sum(parts)), f"{where}: leading dimensions are lost"

    def test_rows_do_not_mix(self) -> None:
        """A row's result does not depend on the other rows, beyond the scheme's error."""
        ops = self.ops()
        inner, parts = self.sizes()[2]
        layer = self.make(ops, inner, parts, torch.float32, bias=False)
        self.fill(layer, 0)
        x = self.rows(max(ROWS), inner, torch.float32)
        x[1:] *= 1000.0
        self.assert_near(layer(x)[:1], layer(x[:1].clone()), "a row beside rows a thousand times as large")

    def test_parts_in_any_order(self) -> None:
        ops = self.ops()
        inner, parts = self.sizes()[2]
        one, other = (self.make(ops, inner, parts, torch.float32) for _ in range(2))
        self.fill(one, 0)
        self.fill(other, 0, backwards=True)
        x = self.rows(5, inner, torch.float32)
        assert torch.equal(one(x), other(x)), "the order in which parts are loaded changes the result"

    def test_reloads_in_place(self) -> None:
        """New weights go into the same memory, where captured graphs find them, and leave nothing of the old ones."""
        ops = self.ops()
        for inner, parts in self.sizes():
            layer, fresh = (self.make(ops, inner, parts, torch.float32) for _ in range(2))
            self.fill(layer, 0)
            x = self.rows(3, inner, torch.float32)
            old = layer(x)
            places = {name: tensor.data_ptr() for name, tensor in layer.state_dict(keep_vars=True).items()}
            self.fill(layer, 1)
            self.fill(fresh, 1)
            moved = [name for name, tensor in layer.state_dict(keep_vars=True).items() if tensor.data_ptr() != places.get(name)]
            assert not moved, f"tensors that are elsewhere after a reload: {moved}"
            assert not torch.equal(layer(x), old), "a reload changed nothing"
            assert torch.equal(layer(x), fresh(x)), "a reloaded layer differs from a fresh one with the same weights"

    def test_stores_other_float_types(self) -> None:
        """Checkpoints come in 16 bits too."""
        ops = self.ops()
        inner, parts = self.sizes()[1]
        for dtype in (torch.float16, torch.bfloat16):
            layer = self.make(ops, inner, parts, torch.float32, bias=False)
            weights, _ = self.weights(inner, parts, 0)
            for part, weight in enumerate(weights):
                layer.load(part, weight.to(dtype))
            x = self.rows(3, inner, torch.float32)
            self.assert_near(layer(x), x.double() @ torch.cat(weights).to(dtype).double().T.to(self.device), f"weights given in {dtype}")

    def test_zero_and_large_rows(self) -> None:
        """Output rows of zeros give zeros; rows of different size do not spoil each other."""
        ops = self.ops()
        inner, parts = self.sizes()[1]
        layer = self.make(ops, inner, parts, torch.float32, bias=False)
        weights, _ = self.weights(inner, parts, 0)
        weights[0][0] = 0.0
        weights[0][1] *= 1e4
        for part, weight in enumerate(weights):
            layer.load(part, weight)
        x = self.rows(3, inner, torch.float32)
        out, want = layer(x), x.double() @ torch.cat(weights).double().T.to(self.device)
        assert not out[:, 0].any(), "an output row of zeros gives something"
        self.assert_near(out[:, 2:], want[:, 2:], "beside an output row ten thousand times as large")

    def test_tied(self) -> None:
        """A layer tied to an embedding gives the embedding's product, and does not change it."""
        ops = self.ops()
        inner, parts = self.sizes()[2]
        (weight, *_), _ = self.weights(inner, (sum(parts),), 0)
        embedding = torch.nn.Parameter(weight.to(self.device).clone(), requires_grad=False)
        layer = LinearFactory(self.scheme(ops, torch.float32, self.device))(inner, sum(parts), tied=embedding)
        layer.load(0, weight)
        x = self.rows(3, inner, torch.float32)
        self.assert_near(layer(x), x.double() @ weight.double().T.to(self.device), "tied")
        assert torch.equal(embedding, weight.to(self.device)), "the embedding was changed"

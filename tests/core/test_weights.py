"""Loading weights: in place, once or again, and one message for everything that does not fit."""

from __future__ import annotations

import re
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from modelrunner.checkpoint import DummyReader
from modelrunner.errors import CheckpointError
from modelrunner.linear import LinearFactory, PlainScheme
from modelrunner.offers import Decline
from modelrunner.weights import Target, WeightMap, fill_dummy, load_tensors, load_weights, slots

OPS = SimpleNamespace(matmul=torch.nn.functional.linear, matmul_add=lambda x, weight, residual: residual + x @ weight.T)


class Small(nn.Module):
    """Five slots: an embedding, a fused linear of two parts with bias, and a tied head."""

    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        linear = LinearFactory(PlainScheme(OPS, torch.float32, torch.device("cpu")))
        self.embed = nn.Parameter(torch.full((5, 3), torch.nan))
        self.fused = linear(3, (2, 4), bias=True)
        self.head = linear(3, 5, tied=self.embed if tie else None)
        self.register_buffer("table", torch.zeros(3))


MAP = WeightMap(
    names={
        "embed": (Target("embed", kind="parameter"), Target("head")),
        "a": (Target("fused", 0),),
        "b": (Target("fused", 1, transform=lambda tensor: tensor.flip(0)),),
        "a.bias": (Target("fused", 0, "bias"),),
        "b.bias": (Target("fused", 1, "bias"),),
        "table": (Target("table", kind="parameter"),),
    },
    ignored=("rotary.*", "step"),
    optional=frozenset({"table"}),
)


def tensors(**changes):
    shapes = {"embed": (5, 3), "a": (2, 3), "b": (4, 3), "a.bias": (2,), "b.bias": (4,)}
    found = {name: torch.randn(shape) for name, shape in shapes.items()} | changes
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def test_fused_tied_transformed():
    module, given = Small(), tensors(**{"rotary.inv": torch.zeros(1), "step": torch.zeros(1)})
    load_tensors(module, MAP, given.items(), progress=False)
    x = torch.randn(2, 3)
    want = torch.cat((x @ given["a"].T + given["a.bias"], x @ given["b"].flip(0).T + given["b.bias"]), -1)
    torch.testing.assert_close(module.fused(x), want)
    torch.testing.assert_close(module.head(x), x @ given["embed"].T)
    assert module.head.weight is module.embed


def test_loading_again_keeps_the_memory():
    module = Small()
    load_tensors(module, MAP, tensors().items(), progress=False)
    before = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    newer = tensors(table=torch.ones(3))
    load_tensors(module, MAP, newer.items(), progress=False)
    assert {name: tensor.data_ptr() for name, tensor in module.state_dict().items()} == before
    assert torch.equal(module.embed, newer["embed"])
    assert torch.equal(module.table, torch.ones(3))


def test_tensors_are_taken_one_at_a_time():
    """A tensor is released before the next is asked for, so that a model larger than memory's rest can load."""
    given = []

    def fresh(tensor):
        assert all(earlier() is None for earlier in given)
        copy = tensor.clone()
        given.append(weakref.ref(copy))
        return copy

    load_tensors(Small(), MAP, ((name, fresh(tensor)) for name, tensor in tensors().items()), progress=False)
    assert len(given) == 5


def test_everything_wrong_is_in_one_message():
    wrong = tensors(a=None, b=torch.zeros(3, 3), **{f"extra{i:02}": torch.zeros(1) for i in range(12)})
    with pytest.raises(CheckpointError) as error:
        load_tensors(Small(), MAP, wrong.items(), progress=False, source="model.gguf")
    message = str(error.value)
    assert "model.gguf does not fit" in message
    assert "1 tensors missing: a." in message
    assert "12 tensors not expected: extra00" in message
    assert "extra09 and 2 more" in message
    assert "extra10" not in message
    assert "b -> fused: weight of part 1 has shape (3, 3); (4, 3) is needed" in message


def test_parameters_that_nobody_fills():
    module = Small()
    short = WeightMap({name: MAP.names[name] for name in ("embed", "a", "b", "a.bias")})
    with pytest.raises(CheckpointError, match=r"lacking, for these parameters: fused \(bias, part 1\)"):
        load_tensors(module, short, tensors(**{"b.bias": None}).items(), progress=False)


def test_two_tensors_for_one_part():
    mapping = WeightMap({**MAP.names, "c": (Target("fused", 1),)})
    with pytest.raises(CheckpointError, match=r"c -> fused: b fills the same weight \(part 1\)"):
        load_tensors(Small(), mapping, tensors(c=torch.zeros(4, 3)).items(), progress=False)


def test_names_that_are_one_text():
    with pytest.raises(TypeError, match=r"ignored is 'rotary\.\*'; a tuple of names is needed, e\.g\. \('rotary\.\*',\)"):
        WeightMap(MAP.names, ignored="rotary.*")
    with pytest.raises(TypeError, match=r"accepts is 'Acme'; a tuple of names is needed"):
        Decline("only this", accepts="Acme")


def test_a_kind_that_nothing_has():
    with pytest.raises(ValueError, match=r"weight map, 'a': the target fused is of kind 'wieght'; accepted: 'weight', 'bias', 'parameter'"):
        WeightMap({"a": (Target("fused", 0, "wieght"),)})
    with pytest.raises(ValueError, match=r"kind 'wieght'; a Linear takes 'weight' and 'bias'"):
        Small().fused.load(0, torch.zeros(2, 3), "wieght")


@pytest.mark.parametrize("part", [2, -1, "q"])
def test_a_part_that_the_layer_lacks(part):
    """Told before anything is read, and without weights too."""
    mapping = WeightMap({**MAP.names, "b": (Target("fused", part),)})
    told = re.escape(
        f"weight map, 'b': the target fused names part {part!r} of a Linear of 2 parts; accepted: 0, 1, or None for all of them"
    )
    with pytest.raises(ValueError, match=told):
        load_tensors(Small(), mapping, iter(()), progress=False)
    with pytest.raises(ValueError, match=told):
        load_weights(Small(), mapping, DummyReader(Path(), ""))
    with pytest.raises(ValueError, match=r"of a Linear of 2 parts; accepted: 0, 1$"):
        Small().fused.load(part, torch.zeros(4, 3))


@pytest.mark.parametrize("part", [1, None])
def test_a_part_of_a_plain_parameter(part):
    with pytest.raises(ValueError, match=rf"weight map, 'embed': the target embed names part {part} of a plain parameter; only a Linear"):
        WeightMap({"embed": (Target("embed", part, "parameter"),)})


def test_bias_that_the_layer_lacks():
    mapping = WeightMap({**MAP.names, "head.bias": (Target("head", 0, "bias"),)})
    with pytest.raises(CheckpointError, match=r"head\.bias -> head: part 0 has a bias in the checkpoint, but the layer has none"):
        load_tensors(Small(), mapping, tensors(**{"head.bias": torch.zeros(5)}).items(), progress=False)


@pytest.mark.parametrize("tie", [True, False])
def test_dummy_is_seeded_and_complete(tie):
    modules = [Small(tie) for _ in range(3)]
    for module, seed in zip(modules, (1, 1, 2), strict=True):
        fill_dummy(module, seed)
    first, same, other = (module.state_dict() for module in modules)
    filled = [name for name in first if name != "table"]
    assert len(slots(modules[0])) == 6
    for name in filled:
        assert torch.isfinite(first[name]).all()
        assert torch.equal(first[name], same[name])
        assert not torch.equal(first[name], other[name])
    assert torch.equal(first["head.weight"], first["embed"]) is tie


def test_progress_is_quiet_without_a_terminal(capfd):
    load_tensors(Small(), MAP, tensors().items())
    assert capfd.readouterr().err == ""
    load_tensors(Small(), MAP, tensors().items(), progress=True)
    assert "Loading weights" in capfd.readouterr().err


@pytest.mark.parametrize("part", [0, None])
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("embed", "embed is a plain parameter; weight targets need a Linear. Write Target('embed', kind='parameter')"),
        ("norm.weight", "norm.weight is a plain parameter; weight targets need a Linear. Write Target('norm.weight', kind='parameter')"),
        (
            "norm",
            "norm is a LayerNorm; weight targets need a Linear. For its plain parameter write Target('norm.weight', kind='parameter')",
        ),
    ],
)
def test_a_parameter_under_the_default_kind_is_told_its_own(path, message, part):
    module = Small()
    module.norm = nn.LayerNorm(3)
    with pytest.raises(CheckpointError) as error:
        load_tensors(module, WeightMap({"given": (Target(path, part),)}), [("given", torch.zeros(3))], progress=False)
    assert message in str(error.value)


def test_a_parameter_list_takes_several_tensors():
    """What several tensors of a checkpoint fill, as `Target` says."""
    module = nn.Module()
    module.experts = nn.ParameterList(torch.zeros(2) for _ in range(3))
    names = {f"expert{i}": (Target(f"experts.{i}", kind="parameter"),) for i in range(3)}
    load_tensors(module, WeightMap(names), [(f"expert{i}", torch.full((2,), float(i))) for i in range(3)], progress=False)
    assert [parameter[0].item() for parameter in module.experts] == [0, 1, 2]

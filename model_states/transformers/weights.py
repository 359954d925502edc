"""Where checkpoint tensors go in a model of transformers. Most have the parameter's name; some are parts of a larger parameter."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion

from modelrunner.weights import Target, WeightMap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PIECES = "checkpoint_pieces"


class KeepViews(TorchFunctionMode):
    """Within it, `contiguous` copies nothing."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if function is torch.Tensor.contiguous else function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class PatternWeightMap(WeightMap):
    """A weight map whose model also names what it ignores, by regular expressions."""

    patterns: tuple[str, ...] = ()

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or any(re.search(pattern, name) for pattern in self.patterns)


def map_weights(model: PreTrainedModel) -> PatternWeightMap:
    """The weight map of `model`. Where the checkpoint holds parts of a parameter (experts one by one), each part becomes a parameter.

    transformers knows how to write a model as a checkpoint; applied to the parameters themselves that gives views of them, so that
    loading through the views fills the parameters in place. Raises ValueError where it would give a copy.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    owned = {name: tensors[name] for name in model.state_dict() if name in tensors}
    tied = set(model.state_dict()) - set(owned)
    with torch.inference_mode(False), torch.no_grad(), KeepViews():
        written = revert_weight_conversion(model, dict(owned))
    names: dict[str, tuple[Target, ...]] = {}
    pieces: dict[str, torch.Tensor] = {}
    by_identity = {id(tensor): name for name, tensor in owned.items()}
    for name, tensor in written.items():
        whole = by_identity.get(id(tensor))
        if whole is None:
            pieces[name] = tensor
        names[name] = (Target(f"{PIECES}.part_{len(pieces) - 1}" if whole is None else whole, kind="parameter"),)
    kept = {target.path for targets in names.values() for target in targets}
    divide(model, pieces, [name for name in owned if name not in kept])
    optional = {name for name, (target,) in names.items() if target.path in dict(model.named_buffers())}
    optional |= add_aliases(model, names, tied)
    patterns = tuple(model._keys_to_ignore_on_load_unexpected or ())
    return PatternWeightMap(names, ("rotary_emb.inv_freq",), frozenset(optional), (*patterns, r"rotary_emb\.inv_freq$"))


def divide(model: PreTrainedModel, pieces: dict[str, torch.Tensor], divided: list[str]) -> None:
    """Make `pieces`, views of the parameters `divided`, the parameters to be filled; those themselves become buffers."""
    storages = {model.get_parameter(name).untyped_storage().data_ptr() for name in divided}
    copies = [name for name, piece in pieces.items() if piece.untyped_storage().data_ptr() not in storages]
    if copies:
        raise ValueError(f"{type(model).__name__}: checkpoint tensors that are no part of a parameter, e.g. {copies[0]}, cannot be loaded")
    for name in divided:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        whole = module._parameters.pop(leaf)
        module.register_buffer(leaf, None if whole is None else whole.data, persistent=False)
    if pieces:
        holder = nn.Module()
        for place, piece in enumerate(pieces.values()):
            holder.register_parameter(f"part_{place}", nn.Parameter(piece, requires_grad=False))
        model.add_module(PIECES, holder)


def add_aliases(model: PreTrainedModel, names: dict[str, tuple[Target, ...]], tied: set[str]) -> set[str]:
    """Add the other names under which checkpoints carry a tensor; returns the names of which not all must be there.

    tied: state-dict names of parameters that exist under another name. Checkpoints of the decoder alone leave its prefix out.
    """
    optional: set[str] = set()
    state = model.state_dict(keep_vars=True)
    owners = {id(tensor): name for name, tensor in state.items() if name not in tied}
    for name in tied:
        first = owners.get(id(state[name]))
        if first in names:
            names[name] = names[first]
            optional |= {name, first}
    prefix = f"{model.base_model_prefix}."
    for name, (target,) in list(names.items()):
        if name.startswith(prefix) and name == target.path and name.removeprefix(prefix) not in names:
            names[name.removeprefix(prefix)] = (target,)
            optional |= {name, name.removeprefix(prefix)}
    return optional

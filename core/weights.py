"""Weight maps: which checkpoint tensor goes where, told once by a ModelState and used for every (re)load.

    load_weights(module, state.weight_map(card), reader)             # at start-up
    load_tensors(module, state.weight_map(card), new_tensors)        # later: a new version of the weights

Loading is incremental (one tensor in memory at a time) and in place, so that a new weight version reaches captured graphs too.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

from modelrunner.checkpoint import CheckpointReader, DummyReader
from modelrunner.errors import CheckpointError
from modelrunner.linear import Linear, check_part, check_slot

LISTED = 10  # names of one kind that an error message lists
KINDS = ("weight", "bias", "parameter")  # of a target


@dataclass(frozen=True)
class Target:
    """Where one checkpoint tensor goes.

    path: dotted path of a `Linear` or a parameter in the module, e.g. `layers.3.qkv`. part: which part of a fused Linear; None for a
    tensor that holds all of them, in order. kind: `weight` or `bias` of a Linear; `parameter` for a plain parameter or buffer.
    transform: applied first, e.g. a row permutation. shard_dim: dimension that is split over devices, None for a replicated tensor.

    Only a Linear has parts: several checkpoint tensors cannot be parts of one plain parameter. Keep them in an `nn.ParameterList`, with a
    target `experts.0`, `experts.1`, ... each; a `transform` sees one tensor, so it stacks or cuts only what that one tensor holds.
    """

    path: str
    part: int | None = 0
    kind: str = "weight"
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None
    shard_dim: int | None = None


@dataclass(frozen=True)
class WeightMap:
    """names: checkpoint name -> targets, a tuple (several for tied weights). optional: names that may be absent.

    ignored: names that may be present and are not used, e.g. buffers that the module computes itself. An entry that ends in `*` stands
    for all names that begin so, e.g. `vision_tower.*`; a `*` elsewhere has no meaning. Any other name that `names` lacks is an error.
    """

    names: Mapping[str, tuple[Target, ...]]
    ignored: tuple[str, ...] = ()
    optional: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        if isinstance(self.ignored, str):
            raise TypeError(f"weight map: ignored is {self.ignored!r}; a tuple of names is needed, e.g. ({self.ignored!r},)")
        for name, targets in self.names.items():
            if not isinstance(targets, (tuple, list)) or not all(isinstance(target, Target) for target in targets):
                raise TypeError(f"weight map, {name!r}: got {targets!r}; a tuple of Targets is needed, e.g. (Target('path.in.module'),)")
            for target in targets:
                if target.kind not in KINDS:
                    accepted = ", ".join(map(repr, KINDS))
                    raise ValueError(f"weight map, {name!r}: the target {target.path} is of kind {target.kind!r}; accepted: {accepted}")
                if target.kind == "parameter" and target.part != 0:
                    raise ValueError(
                        f"weight map, {name!r}: the target {target.path} names part {target.part!r} of a plain parameter; only a Linear "
                        "has parts, so leave `part` out"
                    )

    def ignores(self, name: str) -> bool:
        return any(name.startswith(entry[:-1]) if entry.endswith("*") else name == entry for entry in self.ignored)


Slot = tuple[str, int, str]  # path, part, kind: one thing that must be filled


def slots(module: nn.Module) -> set[Slot]:
    """Everything in `module` that a full checkpoint must fill: each part of each Linear, each parameter outside Linears.

    A parameter that several owners share is one slot, under the name that torch lists first.
    """
    found: set[Slot] = set()
    owned: set[int] = set()
    for path, child in module.named_modules():
        if isinstance(child, Linear):
            owned.update(id(parameter) for parameter in child.parameters() if parameter is not child.tied)
            for part in range(len(child.out_parts)):
                found.add((path, part, "weight"))
                if child.bias is not None:
                    found.add((path, part, "bias"))
    for path, parameter in module.named_parameters():
        if id(parameter) not in owned:
            found.add((path, 0, "parameter"))
    return found


def check_parts(module: nn.Module, weight_map: WeightMap) -> None:
    """Raise ValueError, with the checkpoint's name, for a target that names a part which its Linear lacks."""
    layers = {path: child for path, child in module.named_modules() if isinstance(child, Linear)}
    for name, targets in weight_map.names.items():
        for target in targets:
            if target.kind == "parameter" or target.part is None or target.path not in layers:
                continue
            try:
                check_slot(layers[target.path], target.part, target.kind)
            except ValueError as error:
                raise ValueError(f"weight map, {name!r}: the target {target.path} names {error}, or None for all of them") from None


def filled_by(module: nn.Module, target: Target) -> set[Slot]:
    """The slots that `target` fills."""
    if target.part is not None:
        return {(target.path, target.part, target.kind)}
    layer = module.get_submodule(target.path)
    return {(target.path, part, target.kind) for part in range(len(layer.out_parts))} if isinstance(layer, Linear) else set()


def nothing() -> None:
    """Listens to no write."""


def store(module: nn.Module, target: Target, tensor: torch.Tensor, writing: Callable[[], None] = nothing) -> None:
    """Write one checkpoint tensor to its target, in place. Raises ValueError for a wrong shape and for a target that is not there.

    writing: called when the tensor fits, before the first value is written.
    """
    if target.transform is not None:
        tensor = target.transform(tensor)
    if target.kind != "parameter":
        layer = linear_at(module, target)
        parts = parts_of(layer, target.part, tensor)
        for part, rows in parts:
            check_part(layer, part, rows, target.kind)
        writing()
        for part, rows in parts:
            layer.load(part, rows, target.kind)
        return
    owner, _, leaf = target.path.rpartition(".")
    parameter = getattr(module.get_submodule(owner), leaf)  # a parameter or a buffer
    if parameter.shape != tensor.shape:
        raise ValueError(f"shape {tuple(tensor.shape)}; {tuple(parameter.shape)} is needed")
    writing()
    parameter.data.copy_(tensor)


def linear_at(module: nn.Module, target: Target) -> Linear:
    """The Linear at the target's path. Raises ValueError, with the target that would do if a plain parameter is meant."""
    owner, _, leaf = target.path.rpartition(".")
    holder = module.get_submodule(owner)
    if isinstance(getattr(holder, leaf, None), torch.Tensor):
        raise ValueError(
            f"{target.path} is a plain parameter; {target.kind} targets need a Linear. Write Target({target.path!r}, kind='parameter')"
        )
    layer = module.get_submodule(target.path)
    if isinstance(layer, Linear):
        return layer
    own = [name for name, _ in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))]
    hint = f". For its plain parameter write Target({f'{target.path}.{own[0]}'!r}, kind='parameter')" if own else ""
    raise ValueError(f"{target.path} is a {type(layer).__name__}; {target.kind} targets need a Linear{hint}")


def parts_of(layer: Linear, part: int | None, tensor: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """`tensor` cut into the parts of `layer` that it holds: [(part, its rows)]. Raises ValueError when it has other rows than they need."""
    if part is not None:
        return [(part, tensor)]
    if tuple(tensor.shape[:1]) != (layer.out_features,):
        parts = " + ".join(map(str, layer.out_parts))
        raise ValueError(f"shape {tuple(tensor.shape)} for all parts; {parts} = {layer.out_features} rows are needed")
    return list(enumerate(tensor.split(layer.out_parts)))


def load_weights(
    module: nn.Module,
    weight_map: WeightMap,
    reader: CheckpointReader,
    *,
    seed: int = 0,
    progress: bool | None = None,
    through: Callable[[Iterable[tuple[str, torch.Tensor]]], Iterable[tuple[str, torch.Tensor]]] = iter,
) -> None:
    """Fill `module` from `reader`, or with seeded noise for a `dummy` checkpoint. through: what the reader's tensors go through, which may
    take out some that are not for the module. Raises CheckpointError, see `load_tensors`."""
    if isinstance(reader, DummyReader):
        check_parts(module, weight_map)
        fill_dummy(module, seed)
    else:
        load_tensors(module, weight_map, through(reader.tensors()), progress=progress, source=str(reader.path))


def load_tensors(
    module: nn.Module,
    weight_map: WeightMap,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    progress: bool | None = None,
    source: str = "the checkpoint",
    writing: Callable[[], None] = nothing,
) -> None:
    """Fill `module` from `tensors`, in place. Safe to call again later with a new version of the weights.

    progress: a bar on standard error; None shows it only on a terminal. source: file or folder, for messages. writing: called before
    each write into the module.
    Raises CheckpointError that lists, up to ten each, tensors that are missing, that nobody expects, and that do not fit; or else
    parameters that no tensor fills. Raises ValueError for a map that names parts which its Linear lacks, before anything is read.
    """
    check_parts(module, weight_map)
    unfilled = slots(module)
    missing = set(weight_map.names) - weight_map.optional
    unexpected: list[str] = []
    misfits: list[str] = []
    filled: dict[Slot, str] = {}  # by which tensor
    hidden = None if progress is None else not progress  # None: tqdm asks whether it writes to a terminal
    with tqdm(total=len(weight_map.names), desc="Loading weights", unit="tensor", disable=hidden) as bar:
        for name, tensor in tensors:
            missing.discard(name)
            if name not in weight_map.names and not weight_map.ignores(name):
                unexpected.append(name)
            for target in weight_map.names.get(name, ()):
                try:
                    store(module, target, tensor, writing)
                    for slot in filled_by(module, target):
                        unfilled.discard(slot)
                        if (other := filled.setdefault(slot, name)) != name:
                            misfits.append(f"{name} -> {target.path}: {other} fills the same {slot[2]} (part {slot[1]})")
                except (ValueError, RuntimeError, AttributeError) as error:
                    misfits.append(f"{name} -> {target.path}: {error}")
            del tensor  # before the next one is read
            bar.update(name in weight_map.names)
    problems = [("missing", sorted(missing)), ("not expected", unexpected), ("that do not fit", misfits)]
    if not any(found for _, found in problems):  # a missing tensor leaves its parameters unfilled too: say it once
        problems = [("lacking, for these parameters", sorted(f"{path} ({kind}, part {part})" for path, part, kind in unfilled))]
    hint = stranger(unexpected[0], min(missing)) if unexpected and len(missing) == len(weight_map.names) else ""
    report(source, problems, hint)


def stranger(found: str, wanted: str) -> str:
    """What is wrong with a checkpoint of which the weight map knows no name at all. found, wanted: one name of each."""
    gguf = found.startswith(("blk.", "token_embd.", "output"))
    told = ": GGUF files have names of their own, into which model states translate theirs (docs/layers.md, `GGUF files`)" if gguf else ""
    return f". None of its names is in the model's weight map, which has e.g. {wanted!r}, and the checkpoint {found!r}{told}"


def report(source: str, problems: Sequence[tuple[str, Sequence[str]]], hint: str = "") -> None:
    """Raise one CheckpointError for all problems found, which ends with `hint`; return when there is none."""
    lines = []
    for what, found in problems:
        if found:
            more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
            lines.append(f"{len(found)} tensors {what}: {'; '.join(found[:LISTED])}{more}")
    if lines:
        raise CheckpointError(f"{source} does not fit the model. " + ". ".join(lines) + hint)


def fill_dummy(module: nn.Module, seed: int) -> None:
    """Fill `module` with noise, in place: the same for equal seeds and devices, whatever the order of layers.

    Matrices get a standard deviation of 1/sqrt(last dimension), so that activations keep their size; vectors are near 1, biases near 0.
    """
    for path, part, kind in sorted(slots(module)):
        layer = module.get_submodule(path) if kind != "parameter" else None
        if isinstance(layer, Linear):
            rows = layer.out_parts[part]
            shape: tuple[int, ...] = (rows, layer.in_features) if kind == "weight" else (rows,)
            device, tied = layer.scheme.device, layer.tied
            if kind == "weight" and tied is not None:
                # A tied layer follows the parameter it is tied to, which may itself be read later: take that parameter's noise.
                layer.load(part, tied_noise(module, tied, seed), kind)
                continue
            layer.load(part, noise(shape, device, seed, path, part, kind), kind)
        else:
            parameter = module.get_parameter(path)
            parameter.data.copy_(noise(tuple(parameter.shape), parameter.device, seed, path, part, kind))


def tied_noise(module: nn.Module, tied: torch.Tensor, seed: int) -> torch.Tensor:
    """The noise of the parameter `tied`."""
    path = next(path for path, parameter in module.named_parameters() if parameter is tied)
    return noise(tuple(tied.shape), tied.device, seed, path, 0, "parameter")


def noise(shape: tuple[int, ...], device: torch.device, seed: int, path: str, part: int, kind: str) -> torch.Tensor:
    """Seeded float32 noise of one slot."""
    generator = torch.Generator(device=device).manual_seed(zlib.crc32(f"{seed}:{path}:{part}:{kind}".encode()))  # the CPU's takes 32 bits
    values = torch.randn(shape, generator=generator, device=device)
    if len(shape) > 1:
        return values.mul_(shape[-1] ** -0.5)
    return values.mul_(0.02) if kind == "bias" else values.mul_(0.02).add_(1.0)

"""Scales of keys and values that the cache keeps in 8 bits: the memory that attention reads them from, and where they come from.

A key or value head is kept divided by its scale. A floating-point type of 8 bits is as exact at one scale as at another, but it only has
numbers from 2 ** -9 to 448; scales move that range to where a head's are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from modelrunner.caches import stored_type
from modelrunner.errors import CheckpointError
from modelrunner.model_state import CacheGroup, FullAttention
from modelrunner.weights import WeightMap

E4M3 = torch.float8_e4m3fn
LISTED = 5  # missing names that an error lists
_LAYER = r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(?P<layer>\d+)\.(?:self_attn|attn|attention)\."
_NAME = re.compile(_LAYER + r"(?:(?:attn\.|[kv]_proj\.|qkv_proj\.)?(?P<part>k|v|kv)_scale|(?P<output>[kv])_proj\.output_scale)")
PARTS = {"k": (0,), "v": (1,), "kv": (0, 1)}

Place = tuple[int, tuple[int, ...]]  # layer of the model, and whether for keys (0), values (1), or both


def place_of(name: str) -> Place | None:
    """What a tensor of a checkpoint scales, by its name; None for one that is no such scale.

    `model.layers.3.self_attn.k_scale` (or `.attn.k_scale`, `.k_proj.k_scale`, `.k_proj.output_scale`), and the same for v; `kv_scale` is
    for both.
    """
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found["layer"]), PARTS[found["part"] or found["output"]])


class CacheScales:
    """The scales of each group that is kept in 8 bits. Their memory stays where it is, so captured steps read what is stored here later.

    by_group: [num_layers, 2, num_kv_heads] float32 on the device, of keys and of values; empty for a cache of a larger type.
    """

    def __init__(self, groups: Sequence[CacheGroup], cache_dtype: torch.dtype, device: torch.device) -> None:
        self.by_group: dict[str, torch.Tensor] = {}
        self._layers: dict[int, list[torch.Tensor]] = {}  # views [2, num_kv_heads], by layer of the model
        self._found: dict[tuple[int, int], torch.Tensor] = {}  # by layer and part
        for group in groups:
            if isinstance(group, FullAttention) and stored_type(group, cache_dtype) == E4M3:
                scales = torch.ones(len(group.layers), 2, group.num_kv_heads, device=device)
                self.by_group[group.name] = scales
                for layer, view in zip(group.layers, scales, strict=True):
                    self._layers.setdefault(layer, []).append(view)

    def passing(self, tensors: Iterable[tuple[str, torch.Tensor]], weight_map: WeightMap) -> Iterator[tuple[str, torch.Tensor]]:
        """`tensors` without the cache's scales, which `store` then stores. What the weight map names itself is the model's own.

        Raises CheckpointError for a scale that cannot be one.
        """
        self._found.clear()
        for name, tensor in tensors:
            place = None if name in weight_map.names else place_of(name)
            if place is None:
                yield name, tensor
            elif self.by_group:
                self._find(name, place, tensor)

    def store(self) -> None:
        """Replace the scales that were found, in place. Nothing may run on the device; what the cache holds is void."""
        for (layer, part), scale in self._found.items():
            for view in self._layers[layer]:
                view[part].copy_(scale)
        self._found.clear()

    def read(self, path: str) -> None:
        """Replace all scales by those of a safetensors file. Raises CheckpointError for one that is not there or does not fit the model."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = load_file(Path(path).expanduser())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cache.scales: {path} cannot be read as a safetensors file ({error})") from error
        strange = [name for name, _ in self.passing(tensors.items(), WeightMap({}))]
        if strange:
            raise CheckpointError(f"cache.scales: {path} has {strange[0]!r}; accepted: names like 'model.layers.0.self_attn.k_scale'")
        missing = [name for name in self.named() if (place := place_of(name)) and (place[0], *place[1]) not in self._found]
        if missing:
            more = "" if len(missing) <= LISTED else f" and {len(missing) - LISTED} more"
            raise CheckpointError(f"cache.scales: {path} lacks {', '.join(missing[:LISTED])}{more}; it must have all of the model's")
        self.store()

    def named(self) -> Mapping[str, torch.Tensor]:
        """The scales by the names of a checkpoint, `model.layers.0.self_attn.k_scale` and so on: [num_kv_heads] float32, on the host."""
        names = {}
        for layer, (view, *_) in sorted(self._layers.items()):
            for part, letter in enumerate("kv"):
                names[f"model.layers.{layer}.self_attn.{letter}_scale"] = view[part].cpu().clone()
        return names

    def _find(self, name: str, place: Place, tensor: torch.Tensor) -> None:
        layer, parts = place
        if layer not in self._layers:
            raise CheckpointError(f"{name}: the model caches keys and values of the layers {sorted(self._layers)}, not of layer {layer}")
        scale, heads = tensor.detach().float().flatten(), self._layers[layer][0].shape[1]
        if scale.numel() not in (1, heads):
            raise CheckpointError(f"{name}: shape {tuple(tensor.shape)}; accepted: one number, or one for each of {heads} key-value heads")
        if not bool(((scale > 0) & scale.isfinite()).all()):
            raise CheckpointError(f"{name}: {scale.tolist()}; accepted: finite numbers above 0")
        for part in parts:
            self._found[layer, part] = scale.clone()

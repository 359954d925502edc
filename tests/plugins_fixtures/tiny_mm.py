"""The tiny multimodal model of tests: a Llama with three-row rotary positions (M-RoPE), an image encoder, and one vector of features
beside each embedding, which the first layer's output takes up.

An image of h x w patches (4 pixels a side) becomes h * w placeholder tokens, or more with separators behind its rows (option `separated`).
An embedding depends on its own patch and on the mean of all. `logits_of` computes the same in plain torch from the checkpoint alone.

Importable by name from an engine process, as plugin objects must be.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from modelrunner import Offer, hookimpl
from modelrunner.media import IMAGE, VIDEO, EncoderInput, Expanded, MediaBatch, MediaItem, MediaNeeds, MediaProcessor, Video
from modelrunner.model_states.dense.layers import DenseModel
from modelrunner.model_states.dense.state import DenseState
from modelrunner.testing import ByteTokenizerPlugin, Subject
from modelrunner.testing.tiny import DENSE, dense_weights
from modelrunner.weights import Target, WeightMap

ARCHITECTURE = "TinyMultimodalForTests"
PLACEHOLDER, SEPARATOR = 330, 329
SIDE, CHANNELS, HIDDEN = 4, 48, 64
SECTIONS = (2, 3, 3)  # pairs of components that turn by time, height and width
MAX_SIDE = 40  # patches


class TinyProcessor(MediaProcessor):
    kinds = (IMAGE, VIDEO)

    def __init__(self) -> None:
        super().__init__()
        self.settings_key = b"side 4"

    def process(self, kind: str, value: Any, options: Mapping[str, Any]) -> MediaItem:
        if unknown := sorted(set(options) - {"separated"}):
            raise ValueError(f"mm_processor_kwargs: unknown option {unknown[0]!r}; accepted: 'separated'")
        frames = value.frames if isinstance(value, Video) else np.asarray(value)[None]
        t, h, w = frames.shape[0], frames.shape[1] // SIDE, frames.shape[2] // SIDE
        if max(h, w) > MAX_SIDE:
            raise ValueError(f"the image has {h} x {w} patches; accepted: at most {MAX_SIDE} a side")
        cut = frames[:, : h * SIDE, : w * SIDE].reshape(t, h, SIDE, w, SIDE, 3).transpose(0, 1, 3, 2, 4, 5).reshape(t * h * w, CHANNELS)
        return item_of(kind, torch.from_numpy(cut.astype(np.float32) / 255 - 0.5), (t, h, w), bool(options.get("separated")))

    def placeholder(self, kind: str) -> tuple[int, ...]:
        return (PLACEHOLDER,) if kind == IMAGE else (PLACEHOLDER - 2,)

    def placeholder_text(self, kind: str) -> str:
        return f"<{kind}>"

    def dummy(self, max_embeddings: int) -> MediaItem:
        return item_of(IMAGE, torch.zeros(max_embeddings, CHANNELS), (1, 1, max_embeddings))

    def positions(self, prompt: Expanded, items: Sequence[MediaItem]) -> Any:
        return three_rows(len(prompt.token_ids), [(run.start, run.offset, items[run.item].info["grid"], run.length) for run in prompt.runs])


def item_of(kind: str, patches: torch.Tensor, grid: tuple[int, int, int], separated: bool = False) -> MediaItem:
    t, h, w = grid
    mark = PLACEHOLDER if kind == IMAGE else PLACEHOLDER - 2
    row = [mark] * w + [SEPARATOR] * separated
    tokens = row * (t * h)
    return MediaItem(kind, tuple(tokens), np.array([token == mark for token in tokens]), {"patches": patches}, {"grid": list(grid)})


def three_rows(length: int, runs: Sequence[tuple[int, int, Sequence[int], int]]) -> np.ndarray[Any, Any]:
    """Text goes on at the largest position so far + 1; embedding i of an image stands at (t, row, column) from where its run begins.

    runs: (first token, first embedding, grid, length). A run is a whole image, or one row of it (then its rows begin anew).
    """
    out = np.zeros((3, length), np.int32)
    at = following = 0
    for start, offset, (_, h, w), count in runs:
        out[:, at:start] = following + np.arange(start - at)
        following += start - at
        first = offset if offset and count == w else 0  # of a separated image each row is by itself
        places = np.arange(offset, offset + count) - first
        out[:, start : start + count] = following + np.stack([places // (h * w), places // w % h, places % w])
        at = start + count
        following = int(out[:, start:at].max()) + 1
    out[:, at:] = following + np.arange(length - at)
    return out


class TinyModel(DenseModel):
    def __init__(self, ctx: Any, config: Any, length: int) -> None:
        super().__init__(ctx, config, length)
        self.give_way = ctx.give_way
        made = {"dtype": ctx.dtype, "device": ctx.device}
        self.patch = nn.Parameter(torch.empty(2 * HIDDEN, CHANNELS, **made), requires_grad=False)
        self.mean = nn.Parameter(torch.empty(2 * HIDDEN, CHANNELS, **made), requires_grad=False)
        pairs = torch.repeat_interleave(torch.arange(3), torch.tensor(SECTIONS))
        self.register_buffer("row_of", torch.cat((pairs, pairs)).to(ctx.device))

    def table(self, positions: torch.Tensor) -> torch.Tensor:
        """Cosines and sines of the step: [T, D]. positions: [T], or [3, T]."""
        if positions.dim() == 1:
            return self.cos_sin.index_select(0, positions)
        return self.cos_sin[positions.index_select(0, self.row_of), torch.arange(self.cos_sin.shape[1], device=positions.device)[:, None]].T

    def encode(self, patches: torch.Tensor) -> torch.Tensor:
        return torch.tanh(2 * (patches @ self.patch.T) + patches.mean(0) @ self.mean.T)


class TinyState(DenseState):
    module: TinyModel

    def declare(self, card: Any, settings: Any) -> Any:
        from dataclasses import replace

        return replace(
            super().declare(card, settings), media=MediaNeeds(features=1, position_rows=3, max_embeddings=MAX_SIDE**2, capture=True)
        )

    def supports(self, feature: str) -> Any:
        from modelrunner.model_state import Yes

        return Yes() if feature == "multimodal" else super().supports(feature)

    def weight_map(self, card: Any) -> WeightMap:
        own = super().weight_map(card)
        more = {f"vision.{name}": (Target(name, kind="parameter"),) for name in ("patch", "mean")}
        return WeightMap({**own.names, **more}, own.ignored)

    def build(self, ctx: Any) -> TinyModel:
        return TinyModel(ctx, self.config, self.table_length)

    def media_processor(self, tokenizer: Any) -> TinyProcessor:
        return TinyProcessor()

    def encode(self, items: Sequence[EncoderInput], out: torch.Tensor) -> None:
        at = 0
        for item in items:
            self.module.give_way()
            out[at : at + item.num_embeddings] = self.module.encode(item.tensors["patches"].to(out.dtype))
            at += item.num_embeddings

    def forward(  # type: ignore[override]
        self, hidden: torch.Tensor, positions: torch.Tensor, attention: Any, caches: Any, tap: Any, media: MediaBatch | None = None
    ) -> torch.Tensor:
        model, cos_sin = self.module, self.module.table(positions).contiguous()
        total = tap("layer.0", hidden)
        for index, layer in enumerate(model.stack):
            total = layer.attention.residual(total, layer.attention_norm, cos_sin, attention)
            total = layer.mlp.residual(total, layer.mlp_norm)
            if media is not None and index == 0:
                model.embed.ops.add_media(total, media.arena, media.slots, HIDDEN)
            total = tap(f"layer.{index + 1}", total)
        return model.norm(total)


class TinyMultimodalPlugin:
    """Offers the state for its checkpoints."""

    MODELRUNNER_API = ">=1,<2"

    @hookimpl
    def model_state(self, card: Any) -> Offer[Any] | None:
        return Offer("tiny_mm", lambda: TinyState, "exact") if ARCHITECTURE in card.architectures else None


@lru_cache(maxsize=1)
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="modelrunner-mm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@lru_cache(maxsize=4)
def weights(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    vision = {f"vision.{name}": torch.randn(2 * HIDDEN, CHANNELS, generator=generator) for name in ("patch", "mean")}
    return dense_weights(DENSE, seed) | vision


@lru_cache(maxsize=4)
def mm(seed: int = 1) -> Subject:
    """The model with a byte tokenizer, in a folder of its own."""
    from safetensors.torch import save_file

    folder = _folder() / f"seed-{seed}"
    folder.mkdir()
    save_file(weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(DENSE | {"architectures": [ARCHITECTURE]}))
    return Subject(str(folder), f"mm-{seed}", (ByteTokenizerPlugin(), TinyMultimodalPlugin()))


class Picture:
    """What the processor reads of an image, where there is no Pillow."""

    def __init__(self, frame: np.ndarray[Any, Any]) -> None:
        self.frame = frame
        self.height, self.width = frame.shape[:2]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return self.frame


def image(h: int, w: int, seed: int = 0) -> Any:
    """An image of h x w patches of noise."""
    frame = np.random.default_rng(seed).integers(0, 256, (h * SIDE, w * SIDE, 3), dtype=np.uint8)
    try:
        from PIL import Image
    except ImportError:
        return Picture(frame)
    return Image.fromarray(frame)


# ---- the same in plain torch ------------------------------------------------------------------------------------------


def embeddings_of(picture: Any, seed: int = 1) -> torch.Tensor:
    """[h * w, 2 * HIDDEN]"""
    patches = TinyProcessor().process(IMAGE, picture, {}).tensors["patches"]
    made = weights(seed)
    return torch.tanh(2 * (patches @ made["vision.patch"].T) + patches.mean(0) @ made["vision.mean"].T)


def logits_of(ids: Sequence[int], pictures: Sequence[Any] = (), seed: int = 1) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    """Logits [length, vocabulary] of a sequence that is expanded already, and its positions [3, length]: one causal pass, no cache."""
    made, config = weights(seed), DENSE
    x = made["model.embed_tokens.weight"][list(ids)].clone()
    features = torch.zeros_like(x)
    runs, at = [], 0
    for picture in pictures:
        vectors = embeddings_of(picture, seed)
        start = next(i for i in range(at, len(ids)) if ids[i] == PLACEHOLDER)
        at = start + len(vectors)
        x[start:at], features[start:at] = vectors[:, :HIDDEN], vectors[:, HIDDEN:]
        runs.append((start, 0, (1, picture.height // SIDE, picture.width // SIDE), len(vectors)))
    places = three_rows(len(ids), runs)
    frequencies = 1.0 / 10000.0 ** (torch.arange(8).float() / 8)
    row = torch.repeat_interleave(torch.arange(3), torch.tensor(SECTIONS))
    angle = torch.from_numpy(places).float()[row].T * frequencies
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    def rotate(heads: torch.Tensor) -> torch.Tensor:
        a, b = heads.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def norm(value: torch.Tensor, name: str) -> torch.Tensor:
        return value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + 1e-5) * made[name]

    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        y = norm(x, name + "input_layernorm.weight")
        q, k, v = ((y @ made[f"{name}self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, 16)) for part in "qkv")
        q, k = rotate(q), rotate(k).repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / 4
        scores = scores.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), -torch.inf).softmax(-1)
        y = torch.einsum("hqk,khd->qhd", scores, v.repeat_interleave(2, 1)).flatten(1)
        x = x + y @ made[name + "self_attn.o_proj.weight"].T
        y = norm(x, name + "post_attention_layernorm.weight")
        gate, up = (y @ made[f"{name}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (nn.functional.silu(gate) * up) @ made[name + "mlp.down_proj.weight"].T
        x = x + features if layer == 0 else x
    return norm(x, "model.norm.weight") @ made["lm_head.weight"].T, places


def greedy(ids: Sequence[int], pictures: Sequence[Any] = (), count: int = 12, seed: int = 1) -> tuple[list[int], list[float]]:
    """The likeliest tokens that follow, and by how much they are."""
    known, gaps = list(ids), []
    for _ in range(count):
        best = logits_of(known, pictures, seed)[0][-1].topk(2)
        gaps.append(float(best.values[0] - best.values[1]))
        known.append(int(best.indices[0]))
    return known[len(ids) :], gaps


__all__ = ["PLACEHOLDER", "embeddings_of", "greedy", "image", "logits_of", "mm"]

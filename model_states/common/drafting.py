"""How heads that read the target's hidden states propose tokens: what EAGLE, EAGLE-3 and multi-token prediction share.

Such a head pairs the hidden state of position i with the token at i + 1, and keeps what it made of both at position i of its own cache.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Protocol, cast

import torch

from modelrunner.attention import BoundAttention
from modelrunner.batch import Batch
from modelrunner.checkpoint import CheckpointReader, GGUFReader, ModelCard, SafetensorsReader
from modelrunner.model_state import ModelState
from modelrunner.model_states.common.card import called
from modelrunner.model_states.common.layers import Embedding
from modelrunner.ops import Ops
from modelrunner.speculation import DraftBuild, Drafter, DraftStep
from modelrunner.torch_file import TorchReader


class FeatureModel(Protocol):
    """The module of such a head. T tokens, H its hidden size."""

    def __call__(
        self, embeddings: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, attention: Mapping[str, BoundAttention]
    ) -> torch.Tensor:
        """[T, H] embeddings of the next tokens, [T, H] features, [T] positions -> [T, H] next features."""


def tensor_names(card: ModelCard) -> frozenset[str]:
    """Names of the checkpoint's tensors, where reading them is cheap; none for one without weights.

    Published heads differ in what they bring along, and only the names tell. Raises CheckpointError for a file that is missing or damaged.
    """
    readers: dict[str, type[CheckpointReader]] = {"safetensors": SafetensorsReader, "torch": TorchReader, "gguf": GGUFReader}
    reader = readers.get(card.format)
    return frozenset() if reader is None else frozenset(reader(card.path, card.name).names())


class FeatureDrafter(Drafter):
    """Drafts greedily with a module that turns features and embeddings into the next features.

    The first pass runs over the target's step, with the target's hidden states; each further one feeds the last draft and the features that
    the head itself gave.
    """

    target_state: ModelState
    embedding: Embedding | None = None  # of the head's own; the target's otherwise
    embedding_size: int
    dtype: torch.dtype  # of activations
    ops: Ops

    @property
    def source(self) -> ModelCard:
        """The card of the checkpoint with the weights. Raises ValueError when there is none."""
        if self.card is None:
            raise ValueError(f"{type(self).__name__} needs weights: name their folder or hub id in speculation.model")
        return self.card

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the checkpoint's tensors."""
        return tensor_names(self.source)

    def same_hidden_size(self, own: int) -> None:
        """Raise ValueError unless the head's hidden size is the target's."""
        if own != self.target.hidden_size:
            raise ValueError(
                f"drafter {self.source.name} has hidden_size {own}, target {called(self.target.card)} has {self.target.hidden_size}; the "
                "head was made for another model"
            )

    def same_vocabulary(self, own: int) -> None:
        """Raise ValueError unless the head's vocabulary is as large as the target's."""
        if own != self.target.vocab_size:
            raise ValueError(
                f"drafter {self.source.name} has a vocabulary of {own} ids, target {called(self.target.card)} one of "
                f"{self.target.vocab_size}; they must share one"
            )

    def share(self, build: DraftBuild, embedding: Embedding | None) -> None:
        """Remember whose embedding to use."""
        self.target_state, self.embedding, self.dtype = build.target, embedding, build.context.dtype
        self.ops = build.context.ops
        self.embedding_size = self.target.hidden_size if embedding is None else embedding.weight.shape[1]

    # ---- the step ------------------------------------------------------------------------------------------------

    @abstractmethod
    def first_features(self, step: DraftStep) -> torch.Tensor:
        """D. What the head reads of the target, for each token of the step: [T, H]."""

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """D. [N, H] -> [N, ids that the head predicts]; by default those of the target's head."""
        return self.target_state.logits(features)

    def target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """D. The target's ids of those that the head predicts, [N] int64."""
        return ids

    def propose(self, step: DraftStep, out: torch.Tensor, probabilities: torch.Tensor | None) -> None:
        model = cast(FeatureModel, self.module)
        features = model(self._embed(step.batch, step.next_ids), self.first_features(step), step.positions, step.attention)
        if not step.num_draft:
            return
        features = features.index_select(0, step.last_place)
        ids = self._best(features)
        out[:, 0].copy_(ids)
        for number in range(1, step.num_draft):
            one = step.next_pass(number - 1)  # the last draft belongs to the features of the position before it
            features = model(self._embed(one.batch, ids), features, one.batch.positions, one.attention)
            ids = self._best(features)
            out[:, number].copy_(ids)

    def _best(self, features: torch.Tensor) -> torch.Tensor:
        return self.target_ids(self.logits(features).argmax(-1))

    def _embed(self, batch: Batch, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of ids [T] int64, one for each token of `batch`, the one that follows it: [T, H]. Those of media are the target's."""
        out = torch.empty(ids.shape[0], self.embedding_size, dtype=self.dtype, device=ids.device)
        if self.embedding is not None:
            self.embedding(ids, out)
        else:
            self.target_state.embed(replace(batch, input_ids=ids), out)
        media = batch.media
        if media is not None and media.following is not None and self.embedding_size == self.target.hidden_size:
            self.ops.place_media(out, media.arena, media.following)
        return out

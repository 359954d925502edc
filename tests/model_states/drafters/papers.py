"""The tiny target of `heads`, and what each drafter must propose for it by the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tests.model_states.drafters import heads, oracle

NEAR_TIE = 1e-4


class Papers:
    """The target in transformers, and every drafter's proposals after some known tokens."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.drafts_of: dict[tuple[str, bool, tuple[int, ...], int], list[tuple[int, float]]] = {}

    @cached_property
    def model(self) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.target, dtype=torch.float32).eval()

    @cached_property
    def small(self) -> Any:
        """The draft model."""
        from transformers import LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in heads.TARGET.items() if k != "architectures"}))
        model.load_state_dict(heads.draft_model_tensors())
        return model.float().eval()

    def hidden(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """Of the target, for each token: `layer.i` what enters layer i, `last` the normed one that the head reads."""
        with torch.no_grad():
            found = self.model(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
        return {**{f"layer.{layer}": found[layer][0] for layer in range(heads.LAYERS)}, "last": found[-1][0]}

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """`ids` and the target's `count` best tokens after them."""
        return [*ids, *(token for token, _ in continued(self.model, ids, count))]

    def propose(self, kind: str, known: Sequence[int], count: int, **changes: Any) -> list[tuple[int, float]]:
        """Drafts after `known`, each with its lead. changes: to the head's tensors, see `heads`; `config`: to its configuration."""
        with torch.no_grad():
            return self._propose(kind, list(known), count, changes)

    def _propose(self, kind: str, known: list[int], count: int, changes: dict[str, Any]) -> list[tuple[int, float]]:
        if kind == "draft_model":
            return continued(self.small, known, count)
        states, weights = self.hidden(known[:-1]), self.model.state_dict()
        embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
        if kind == "medusa":
            return medusa(states["last"][-1], count)
        if kind == "mtp":
            made = oracle.mtp_head(heads.mtp_tensors(**changes), heads.TARGET)
            return oracle.propose(made, lambda x: head @ x, embedding, known, states["last"], count)
        own = {name: value for name, value in changes.items() if name != "config"}
        if kind == "eagle":
            tensors = heads.eagle_tensors(**own)
            made = oracle.eagle_head(tensors, heads.eagle_config())
            return oracle.propose(made, lambda x: head @ x, tensors.get("embed_tokens.weight", embedding), known, states["last"], count)
        tensors, config = heads.eagle3_tensors(**own), heads.EAGLE3 | changes.get("config", {})
        fused = torch.cat([states[f"layer.{i}"] for i in config["eagle_aux_hidden_state_layer_ids"]], -1) @ tensors["fc.weight"].T
        ids = torch.arange(heads.VOCAB) if own.get("full") else heads.draft_ids()

        def logits(x: torch.Tensor) -> torch.Tensor:
            scores = tensors["lm_head.weight"] @ oracle.rms_norm(x, tensors["norm.weight"], config["rms_norm_eps"])
            return torch.full((heads.VOCAB,), -torch.inf).index_copy(0, ids, scores)

        return oracle.propose(oracle.eagle3_head(tensors, config, own.get("layer", "midlayer")), logits, embedding, known, fused, count)

    def check(self, kind: str, known: Sequence[int], drafts: Sequence[int], loud: bool = False) -> int:
        """Compare proposals with the oracle's, up to the first near-tie; returns how many were compared."""
        key = (kind, loud, tuple(known), len(drafts))
        if key not in self.drafts_of:
            self.drafts_of[key] = self.propose(kind, known, len(drafts), **({"loud": True} if loud else {}))
        for place, (got, (want, lead)) in enumerate(zip(drafts, self.drafts_of[key], strict=True)):
            if got != want:
                assert lead < NEAR_TIE, f"{kind} proposes {list(drafts)} after {list(known)}; by the paper it is {self.drafts_of[key]}"
                return place
        return len(drafts)


def continued(model: Any, ids: Sequence[int], count: int) -> list[tuple[int, float]]:
    """The model's `count` best tokens after `ids`, each with its lead."""
    known, found = list(ids), list[tuple[int, float]]()
    with torch.no_grad():
        for _ in range(count):
            best = model(torch.tensor([known])).logits[0, -1].topk(2)
            found.append((int(best.indices[0]), float(best.values[0] - best.values[1])))
            known.append(found[-1][0])
    return found


def medusa(hidden: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """Cai et al. 2024, equation 1: W2 (SiLU(W1 h) + h), here with a bias."""
    tensors, found = heads.medusa_tensors(), []
    for head in range(count):
        block = tensors[f"{head}.0.linear.weight"] @ hidden + tensors[f"{head}.0.linear.bias"]
        best = (tensors[f"{head}.1.weight"] @ (hidden + block * block.sigmoid())).topk(2)
        found.append((int(best.indices[0]), float(best.values[0] - best.values[1])))
    return found

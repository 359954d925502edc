"""Distil a one-layer EAGLE-3 head for a dense model from what the model itself writes (Li et al. 2025, arXiv:2503.01840).

    python distil_eagle3.py smollm2-eagle3            # for the small model of `make demo`; --model NAME for another
    modelrunner generate --chat --prompt "Tell me of the sea." --speculation.drafter eagle3 --speculation.model smollm2-eagle3

Three parts: the model continues prompts; transformers runs over the texts once and keeps what the head reads and what it should say; the
head learns to say it, also from features that are its own, as it must when it drafts.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import log_softmax, silu

SUBJECTS = (
    *("the sea", "a small town", "how bread is made", "the moon", "a lost key", "rivers", "winter", "an old clock", "bees", "music"),
    *("electricity", "a long journey", "the heart", "learning to read", "trade between nations", "volcanoes", "a garden", "computers"),
    *("friendship", "ancient Rome", "the weather", "football", "a good breakfast", "prime numbers", "bridges", "saving money"),
)
FORMS = (
    "Write a short story about {}.",
    "Explain {} to a child.",
    "List five facts about {}.",
    "Write a poem about {}.",
    "What should everybody know about {}?",
    "Write a letter to a friend about {}.",
    "What are the advantages and disadvantages of {}?",
    "Describe {} in one paragraph.",
    "Give me step-by-step advice on {}.",
    "Why does {} matter?",
)
ANSWER = 256  # tokens that the model writes after a prompt, at most
LONGEST = ANSWER + 64  # tokens of most texts, at most: the prompts are short
DECAY = 0.8  # weight of each further draft in the loss, as in EAGLE-3


@dataclass
class Sample:
    """One text. ids: [n]. fused: [n, 3 H], hidden states of three layers side by side. last: [n, H], what the model's head reads."""

    ids: torch.Tensor
    fused: torch.Tensor
    last: torch.Tensor


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Attention of a draft step: over the keys of the first step up to the own place, and over those of later steps at the own place."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size, self.dim = config["hidden_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.groups, self.theta = heads // kv_heads, config["rope_theta"]
        self.q_proj = nn.Linear(2 * size, heads * self.dim, bias=False)
        self.k_proj = nn.Linear(2 * size, kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(2 * size, kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(heads * self.dim, size, bias=False)

    def rotated(self, x: torch.Tensor, first: int) -> torch.Tensor:
        half = self.dim // 2
        places = first + torch.arange(x.shape[0], device=x.device)
        angles = places[:, None] * self.theta ** (-torch.arange(half, device=x.device) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        left, right = x[..., :half], x[..., half:]
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

    def forward(self, x: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
        """x: [n, 2 H] of draft step len(keys), whose keys and values are added to the lists."""
        n, step = x.shape[0], len(keys)
        q = self.rotated(self.q_proj(x).view(n, -1, self.dim), step)
        keys.append(self.rotated(self.k_proj(x).view(n, -1, self.dim), step).repeat_interleave(self.groups, 1))
        values.append(self.v_proj(x).view(n, -1, self.dim).repeat_interleave(self.groups, 1))
        scores = torch.einsum("qhd,khd->hqk", q, keys[0]) / self.dim**0.5
        later = torch.triu(torch.ones(n, n, dtype=torch.bool, device=x.device), 1)
        own = [(q * keys[s]).sum(-1).T[..., None] / self.dim**0.5 for s in range(1, step + 1)]
        weights = torch.cat([scores.masked_fill(later, -torch.inf), *own], -1).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights[..., :n], values[0])
        for s in range(1, step + 1):
            out = out + weights[..., n + s - 1].T[..., None] * values[s]
        projected: torch.Tensor = self.o_proj(out.flatten(1))
        return projected


class MLP(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj, self.up_proj = nn.Linear(size, inner, bias=False), nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm, self.hidden_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.self_attn, self.post_attention_layernorm, self.mlp = Attention(config), RMSNorm(size, eps), MLP(config)

    def forward(
        self, embeddings: torch.Tensor, features: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> torch.Tensor:
        both = torch.cat((self.input_layernorm(embeddings), self.hidden_norm(features)), -1)
        x = features + self.self_attn(both, keys, values)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Head(nn.Module):
    """The published layout: `fc`, `midlayer`, `norm`, `lm_head`."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size = config["hidden_size"]
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.midlayer, self.norm = Layer(config), RMSNorm(size, config["rms_norm_eps"])
        self.lm_head = nn.Linear(size, config["draft_vocab_size"], bias=False)


def texts(model: str, num_tokens: int, rows: int) -> Iterator[list[int]]:
    """Token ids of prompts with the model's continuations, at most `rows` at a time: `num_tokens` in all, since the last text is cut."""
    from modelrunner import LLM, SamplingParams

    llm, left, number = LLM(model, max_num_seqs=rows, max_model_len=1024), num_tokens, 0
    prompts = [form.format(subject) for form in FORMS for subject in SUBJECTS]
    random.Random(0).shuffle(prompts)  # however few are asked, they are of all kinds
    while left > 0:
        batch = range(number, number + min(rows, -(-left // LONGEST)))  # towards the end, no more than may be needed
        params = [SamplingParams(temperature=0.0 if i < len(prompts) else 0.8, seed=i, max_tokens=min(ANSWER, left)) for i in batch]
        conversations = [[{"role": "user", "content": prompts[i % len(prompts)]}] for i in batch]
        for output in llm.chat(conversations, params):
            ids = [*output.prompt_token_ids, *output.outputs[0].token_ids][:left]
            left -= len(ids)
            if ids:
                yield ids
        number = batch.stop


def load_target(model: str) -> Any:
    """The model in transformers: a hub id, a folder or a .gguf file; the small one of `make demo` for an empty name."""
    from transformers import AutoModelForCausalLM

    from modelrunner.plugins.demo_model import demo_file

    file = Path(model) if model else demo_file()
    if file is not None and file.suffix == ".gguf":
        return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def read(target: Any, ids: Sequence[int], layers: Sequence[int]) -> Sample:
    """Run the transformers model `target` over one text. layers: i is what enters layer i."""
    with torch.no_grad():
        hidden = target.model(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
    return Sample(torch.tensor(list(ids)), torch.cat([hidden[layer][0] for layer in layers], -1).half(), hidden[-1][0].half())


def frequent(sequences: Sequence[Sequence[int]], vocab_size: int, count: int) -> torch.Tensor:
    """The `count` ids that occur most often, ascending; the smallest ids fill up."""
    occurrences = torch.bincount(torch.tensor([token for ids in sequences for token in ids]), minlength=vocab_size)
    return occurrences.sort(descending=True, stable=True).indices[:count].sort().values


def loss_of(head: Head, sample: Sample, embedding: torch.Tensor, steps: int) -> torch.Tensor:
    """Cross-entropy with what the model says, over `steps` drafts at each place of the text. The head's `lm_head` is the model's own."""
    features, keys, values = head.fc(sample.fused.float()[:-1]), list[torch.Tensor](), list[torch.Tensor]()
    following, total = sample.ids[1:], torch.zeros(())
    wanted = head.lm_head(sample.last.float()[1:]).softmax(-1)
    for step in range(steps):
        count = len(following) - step  # places whose draft has a known answer
        pad = torch.zeros(step, dtype=torch.int64)
        features = head.midlayer(embedding[torch.cat((following[step:], pad))], features, keys, values)
        said = log_softmax(head.lm_head(head.norm(features[:count])), -1)
        total = total - DECAY**step * (wanted[step:] * said).sum(-1).mean()
    return total


def distil(
    target: Any, sequences: Sequence[Sequence[int]], *, draft_vocab: int, epochs: int, steps: int = 3, rate: float = 1e-3, seed: int = 0
) -> tuple[dict[str, Any], dict[str, torch.Tensor], list[float]]:
    """Train a head for the transformers model `target` on `sequences` of ids: (config.json, tensors, mean loss of each epoch)."""
    torch.manual_seed(seed)
    own = target.config
    layers = [min(2, own.num_hidden_layers - 1), own.num_hidden_layers // 2, max(own.num_hidden_layers - 3, 0)]
    config = head_config(own, min(draft_vocab, own.vocab_size), layers)
    ids = frequent(sequences, own.vocab_size, config["draft_vocab_size"])
    samples = [read(target, sequence, layers) for sequence in sequences if len(sequence) > steps + 1]
    if not samples:
        raise ValueError(f"none of {len(sequences)} texts has more than {steps + 1} tokens, as it takes to learn {steps} drafts; make more")
    embedding = target.get_input_embeddings().weight.detach().float()
    head = Head(config)
    head.lm_head.weight.data.copy_(target.get_output_embeddings().weight.detach()[ids])
    head.lm_head.requires_grad_(False)  # it is the model's own, and few texts would only spoil it
    learning = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(samples))
    losses = []
    for epoch in range(epochs):
        total = 0.0
        for index in torch.randperm(len(samples)).tolist():
            loss = loss_of(head, samples[index], embedding, steps)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(learning, 0.5)
            optimizer.step()
            schedule.step()
            total += float(loss.detach())
        losses.append(total / len(samples))
        print(f"epoch {epoch + 1} of {epochs}: loss {losses[-1]:.3f}", flush=True)
    tensors = {name: tensor.detach().contiguous() for name, tensor in head.state_dict().items()}
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(own.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return config, tensors, losses


def head_config(own: Any, draft_vocab: int, layers: Sequence[int]) -> dict[str, Any]:
    """config.json of a head for a model of configuration `own`."""
    heads = own.num_attention_heads
    theta = getattr(own, "rope_theta", None) or own.rope_parameters["rope_theta"]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": own.hidden_size,
        "intermediate_size": own.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": own.num_key_value_heads,
        "head_dim": getattr(own, "head_dim", None) or own.hidden_size // heads,
        "max_position_embeddings": own.max_position_embeddings,
        "rms_norm_eps": own.rms_norm_eps,
        "rope_theta": float(theta),
        "vocab_size": own.vocab_size,
        "draft_vocab_size": draft_vocab,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(layers),
    }


def save(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write the head to")
    parser.add_argument("--model", default="", help="hub id, folder or .gguf file of a chat model; the small one of `make demo` by default")
    parser.add_argument(
        "--tokens", type=int, default=40_000, help="tokens of text to learn from, prompts included; the last text is cut there"
    )
    parser.add_argument(
        "--vocab", type=int, default=8192, help="ids that the head can draft, at most: those that the texts have most often"
    )
    parser.add_argument("--epochs", type=int, default=8, help="passes over the texts")
    parser.add_argument("--rows", type=int, default=32, help="texts that the model writes at once, at most")
    chosen = parser.parse_args()
    if least := [name for name in ("tokens", "vocab", "epochs", "rows") if getattr(chosen, name) < 1]:
        parser.error(f"--{least[0]} is {getattr(chosen, least[0])}; a whole number above 0 is needed")
    begun = time.monotonic()
    sequences = list(texts(chosen.model, chosen.tokens, chosen.rows))
    print(f"{len(sequences)} texts of {sum(map(len, sequences))} tokens after {time.monotonic() - begun:.0f} s")
    config, tensors, _ = distil(load_target(chosen.model), sequences, draft_vocab=chosen.vocab, epochs=chosen.epochs)
    save(chosen.out, config, tensors)
    print(f"{chosen.out} written after {time.monotonic() - begun:.0f} s, {time.process_time():.0f} s of CPU time")


if __name__ == "__main__":
    main()

"""What the suite does not ask: checkpoints in their several spellings, a process shared with transformers, and models that mix tokens."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.olmo2.modeling_olmo2 import Olmo2MLP, Olmo2Model

from modelrunner import LLM, SamplingParams
from modelrunner.errors import CheckpointError, PluginError
from modelrunner.model_state import FullAttention, SlidingWindow
from modelrunner.model_states.transformers import experts, state
from modelrunner.testing.conformance.lab import transformers_checkpoint
from tests.model_states.transformers.configs import config

PROMPTS = [{"prompt_token_ids": [(7 * i * i + 3 * i + k) % 97 for i in range(n)]} for k, n in enumerate((3, 17))]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

Rewrite = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def same(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Write the tiny checkpoint of `model_type`, its tensors rewritten and its configuration changed; returns the folder."""

    def write(model_type: str, rewrite: Rewrite = same, **fields: Any) -> Path:
        transformers_checkpoint({**config(model_type), **fields}, tmp_path, 0)
        file = tmp_path / "model.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in rewrite(load_file(file)).items()}, file, metadata={"format": "pt"})
        return tmp_path

    return write


def engine(folder: Path, **more: Any) -> LLM:
    settings = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 64, "scheduler": {"max_rows": 4}, **more}
    return LLM(str(folder), pin={"model_state": "transformers"}, **settings)


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def groups(llm: LLM) -> dict[str, FullAttention]:
    return {group.name: group for group in llm.engine.assembly.needs.cache_groups if isinstance(group, FullAttention)}


# ---- cache groups ------------------------------------------------------------------------------------------------


def test_layers_that_ask_the_same_share_a_group(save: Callable[..., Path]) -> None:
    found = groups(engine(save("gpt2")))
    assert {name: group.layers for name, group in found.items()} == {"full": (0,), "full.1": (1,), "full.2": (2,)}
    scales = [group.scale for group in found.values()]
    assert scales == pytest.approx([8**-0.5, 8**-0.5 / 2, 8**-0.5 / 3])


def test_heads_of_two_sizes_are_cached_in_the_larger(save: Callable[..., Path]) -> None:
    (group,) = groups(engine(save("deepseek_v3"))).values()
    assert (group.head_dim, group.num_kv_heads, type(group)) == (20, 4, FullAttention)
    assert group.scale == pytest.approx(20**-0.5)


def test_a_window_as_long_as_the_context_is_none(save: Callable[..., Path]) -> None:
    folder = save("mixtral", sliding_window=256)
    assert {name: type(group) for name, group in groups(engine(folder)).items()} == {"full": FullAttention}
    folder = save("mixtral", sliding_window=255)
    assert {name: type(group) for name, group in groups(engine(folder)).items()} == {"sliding": SlidingWindow}


# ---- checkpoints -------------------------------------------------------------------------------------------------


def test_names_without_the_decoders_prefix(save: Callable[..., Path]) -> None:
    """As the first GPT-2 checkpoints have them, with the mask that they carry."""
    want = tokens(engine(save("gpt2")))

    def strip(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()} | {"h.0.attn.bias": torch.ones(1, 1, 8, 8)}

    assert tokens(engine(save("gpt2", strip))) == want


def test_a_tied_head_may_come_under_its_own_name(save: Callable[..., Path]) -> None:
    want = tokens(engine(save("gpt2")))

    def rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"lm_head.weight" if name.endswith("wte.weight") else name: tensor for name, tensor in tensors.items()}

    assert tokens(engine(save("gpt2", rename))) == want


def test_a_missing_expert_is_named(save: Callable[..., Path]) -> None:
    lost = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    folder = save("mixtral", lambda tensors: {name: tensor for name, tensor in tensors.items() if name != lost})
    with pytest.raises(CheckpointError, match=f"1 tensors missing: {lost}"):
        engine(folder)


def test_a_missing_tensor_with_two_names_is_missed(save: Callable[..., Path]) -> None:
    lost = "transformer.h.1.mlp.c_fc.weight"
    folder = save("gpt2", lambda tensors: {name: tensor for name, tensor in tensors.items() if name != lost})
    with pytest.raises(CheckpointError, match=r"h\.1\.mlp\.c_fc\.weight"):
        engine(folder)


def test_strangers_and_misfits_are_named(save: Callable[..., Path]) -> None:
    folder = save("olmo2", lambda tensors: {**tensors, "model.norm.weight": torch.ones(3), "model.extra": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"not expected: model\.extra.*do not fit: model\.norm\.weight"):
        engine(folder)


def test_dummy_weights(save: Callable[..., Path]) -> None:
    folder = save("mixtral")
    (folder / "model.safetensors").unlink()
    assert tokens(engine(folder, load_format="dummy", seed=1)) == tokens(engine(folder, load_format="dummy", seed=1))
    assert tokens(engine(folder, load_format="dummy", seed=1)) != tokens(engine(folder, load_format="dummy", seed=2))


def test_outputs_that_nobody_reads_are_not_asked_for(save: Callable[..., Path]) -> None:
    want = tokens(engine(save("mixtral")))
    assert tokens(engine(save("mixtral", output_router_logits=True, output_hidden_states=True))) == want


# ---- a process shared with transformers ----------------------------------------------------------------------------


@pytest.fixture
def unchanged() -> Iterator[None]:
    """transformers' and torch's own tables and defaults are afterwards what they were before."""

    def state() -> list[Any]:
        tables = [dict(table) for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS, ALL_EXPERTS_FUNCTIONS)]
        return [*tables, torch.get_default_dtype(), torch.get_default_device(), PreTrainedModel.init_weights, torch.nn.init.normal_]

    before = state()
    yield
    assert state() == before


def test_nothing_of_transformers_is_left_changed(save: Callable[..., Path], unchanged: None) -> None:
    assert len(tokens(engine(save("olmo2")))) == 2


def test_nothing_is_left_changed_after_a_failure(save: Callable[..., Path], unchanged: None) -> None:
    folder = save("olmo2")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}})
    )
    with pytest.raises(PluginError, match="stretches rotary positions"):
        engine(folder)


def test_engines_in_two_threads_do_not_meet(save: Callable[..., Path]) -> None:
    folder = save("olmo2")
    llms = [engine(folder) for _ in range(2)]
    want, found = tokens(engine(folder)), [[], []]  # type: ignore[var-annotated]

    def work(place: int) -> None:
        found[place] = [tokens(llms[place]) for _ in range(4)]

    threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[want] * 4] * 2


# ---- experts on a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gathered_bytes", [1, 1 << 28])
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_experts_gathered_in_parts_give_the_same(
    save: Callable[..., Path], unchanged: None, monkeypatch: pytest.MonkeyPatch, model_type: str, gathered_bytes: int
) -> None:
    """What runs on a GPU in float32, here on the CPU: gpt-oss has biases, and its weights lie the other way round."""
    folder = save(model_type)
    want = tokens(engine(folder))
    calls: list[int] = []

    def counted(module: torch.nn.Module, hidden: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        calls.append(len(hidden))
        return plain(module, hidden, *rest)

    plain = experts.batched_mm_experts_forward
    monkeypatch.setattr(experts, "batched_mm_experts_forward", counted)
    monkeypatch.setattr(experts, "GATHERED_BYTES", gathered_bytes)
    monkeypatch.setattr(state, "grouped_product_waits", lambda device, dtype: True)
    llm = engine(folder)
    calls.clear()
    assert tokens(llm) == want
    assert max(calls) == (1 if gathered_bytes == 1 else 20)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_experts_do_not_wait_for_a_gpu(save: Callable[..., Path], model_type: str, dtype: str) -> None:
    llm = engine(save(model_type), dtype=dtype, device="cuda")
    want = tokens(llm)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert tokens(llm) == want
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- models that mix tokens ----------------------------------------------------------------------------------------


def test_a_layer_that_looks_at_its_neighbour_is_found(save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Olmo2MLP.forward
    monkeypatch.setattr(Olmo2MLP, "forward", lambda self, x: plain(self, x + x.roll(1, dims=1)))
    with pytest.raises(PluginError, match="depends on its neighbours"):
        engine(save("olmo2"))


def test_an_input_besides_embeddings_is_found(save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Olmo2Model.forward

    def forward(self: Any, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None, **rest: Any) -> Any:
        if input_ids is not None:
            inputs_embeds = self.embed_tokens(input_ids) + input_ids.unsqueeze(-1)
        return plain(self, inputs_embeds=inputs_embeds, **rest)

    forward.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
    monkeypatch.setattr(Olmo2Model, "forward", forward)
    with pytest.raises(PluginError, match="more of its input than the embeddings"):
        engine(save("olmo2"))

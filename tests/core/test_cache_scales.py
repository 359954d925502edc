"""A cache in 8 bits: where its scales come from, that they reach attention, and what is said when that cannot be."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelrunner import LLM, Decline, Offer, SamplingParams, hookimpl
from modelrunner.attention import AttentionBackend
from modelrunner.backends.paged import PagedAttention
from modelrunner.cache_scales import CacheScales, place_of
from modelrunner.caches import allocate_caches, stored_type
from modelrunner.errors import CheckpointError, PluginError, RequestError, SettingsError
from modelrunner.model_state import CacheGroup, FullAttention, RecurrentState
from modelrunner.page_pool import page_layout
from modelrunner.plugins import attention, cpu_kernels
from modelrunner.settings import load_settings
from modelrunner.testing import ByteTokenizerPlugin, P, tiny_dense
from modelrunner.weights import WeightMap

E4M3 = torch.float8_e4m3fn
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": P(30, 1)}, {"prompt_token_ids": P(9, 2)}]
GROUP = FullAttention("full", (0, 1), 4, 2, 16, 0.25)


def start(model: Path | None = None, *plugins: object, dtype: str = "fp8", **settings: Any) -> LLM:
    settings |= {"cache.dtype": dtype, "cache.num_pages": 32}
    return LLM(str(model or tiny_dense()), plugins=[ByteTokenizerPlugin(), *plugins], **settings)


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def scaled(folder: Path, scales: Mapping[str, torch.Tensor]) -> Path:
    """The tiny checkpoint with scales in it."""
    shutil.copytree(tiny_dense(), folder)
    save_file(load_file(folder / "model.safetensors") | dict(scales), folder / "model.safetensors")
    return folder


def test_names_of_the_type() -> None:
    for name in ("fp8", "fp8_e4m3", "float8_e4m3fn", E4M3):
        assert load_settings({"kv_cache_dtype": name}).cache.dtype == "float8_e4m3fn"
    for setting, value in (("kv_cache_dtype", "fp8_e5m2"), ("dtype", "fp8")):
        with pytest.raises(SettingsError, match=f"{value}.*'float16'"):
            load_settings({setting: value})


def test_pages_have_a_quarter_of_the_bytes_and_the_type_is_told() -> None:
    llm, plain = start(), start(dtype="auto")
    resolved = llm.engine.assembly.resolved
    assert resolved.cache_dtype == "float8_e4m3fn"
    assert "MiB of float8_e4m3fn" in str(resolved)
    assert resolved.page_bytes * 4 == plain.engine.assembly.resolved.page_bytes
    assert resolved.tokens_per_page == plain.engine.assembly.resolved.tokens_per_page
    assert {cache.dtype for cache in llm.engine.runner.parts.caches.values()} == {E4M3}
    assert not plain.engine.assembly.scales.by_group


def test_only_attention_is_kept_in_8_bits() -> None:
    """States that nobody scales keep the model's type; pages are shared by bytes."""
    state, own = RecurrentState("state", (2,), (5, 8), interval=16), RecurrentState("own", (3,), (8,), interval=16, dtype=torch.float32)
    groups: list[CacheGroup] = [GROUP, state, own]
    types = {group.name: stored_type(group, E4M3, torch.bfloat16) for group in groups}
    assert types == {"full": E4M3, "state": torch.bfloat16, "own": torch.float32}
    assert stored_type(state, torch.float16, torch.bfloat16) == torch.float16
    page_bytes, layouts = page_layout(groups, 16, {name: dtype.itemsize for name, dtype in types.items()})
    assert page_bytes == 2 * 16 * 2 * 2 * 16
    _, views = allocate_caches(layouts, 3, page_bytes, E4M3, torch.device("cpu"), torch.bfloat16)
    assert {name: view.dtype for name, view in views.items()} == types
    assert set(CacheScales(groups, E4M3, torch.device("cpu")).by_group) == {"full"}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.3.self_attn.k_scale", (3, (0,))),
        ("model.layers.3.self_attn.attn.v_scale", (3, (1,))),
        ("layers.12.attn.k_proj.k_scale", (12, (0,))),
        ("model.language_model.layers.0.self_attn.v_proj.v_scale", (0, (1,))),
        ("language_model.model.layers.0.self_attn.v_proj.output_scale", (0, (1,))),
        ("model.layers.1.self_attn.kv_scale", (1, (0, 1))),
        ("model.layers.1.self_attn.k_proj.weight_scale", None),
        ("model.layers.1.self_attn.q_scale", None),
        ("vision.layers.1.self_attn.k_scale", None),
        ("model.layers.1.mlp.k_scale", None),
    ],
)
def test_names_in_checkpoints(name: str, place: tuple[int, tuple[int, ...]] | None) -> None:
    assert place_of(name) == place


def test_a_checkpoint_s_scales_are_loaded(tmp_path: Path) -> None:
    given = {
        "model.layers.0.self_attn.k_scale": torch.tensor(0.25),
        "model.layers.0.self_attn.attn.v_scale": torch.tensor([0.5], dtype=torch.bfloat16),
        "model.layers.1.self_attn.k_proj.k_scale": torch.tensor([[3.0], [0.7]]),
    }
    model = scaled(tmp_path / "model", given)
    scales = start(model).engine.assembly.scales.by_group["full"]
    torch.testing.assert_close(scales, torch.tensor([[[0.25, 0.25], [0.5, 0.5]], [[3.0, 0.7], [1.0, 1.0]]]))
    assert tokens(start(model, dtype="auto")) == tokens(start(dtype="auto")), "no other cache takes them"


def test_scales_move_the_range_and_nothing_else(tmp_path: Path) -> None:
    """Powers of 2 are exact while the range serves; keys far outside of it are cut short."""
    llm = start()
    plain = tokens(llm)
    for factor, same in ((0.125, True), (2.0**-20, False), (2.0**20, False)):
        names = llm.engine.assembly.scales.named()
        model = scaled(tmp_path / str(factor), {name: torch.full_like(scale, factor) for name, scale in names.items()})
        assert (tokens(start(model)) == plain) is same, factor


@pytest.mark.parametrize(
    ("name", "scale", "problem"),
    [
        ("model.layers.0.self_attn.k_scale", [0.0], r"\[0\.0\]; accepted: finite numbers above 0"),
        ("model.layers.0.self_attn.v_scale", [1.0, math.inf], "finite numbers above 0"),
        ("model.layers.0.self_attn.v_scale", [math.nan], "finite numbers above 0"),
        ("model.layers.1.self_attn.k_scale", [1.0] * 3, r"shape \(3,\); accepted: one number, or one for each of 2 key-value heads"),
        ("model.layers.7.self_attn.k_scale", [1.0], r"the layers \[0, 1\], not of layer 7"),
    ],
)
def test_scales_that_cannot_be(tmp_path: Path, name: str, scale: list[float], problem: str) -> None:
    model = scaled(tmp_path / "model", {name: torch.tensor(scale)})
    with pytest.raises(CheckpointError, match=rf"{name}: .*{problem}"):
        start(model)
    start(model, dtype="auto")


def test_what_the_weight_map_names_is_the_model_s_own() -> None:
    scales, name = CacheScales([GROUP], E4M3, torch.device("cpu")), "model.layers.0.self_attn.k_scale"
    pair = (name, torch.tensor(0.0))
    assert list(scales.passing([pair], WeightMap({name: ()}))) == [pair]


def weights() -> list[tuple[str, torch.Tensor]]:
    return list(load_file(tiny_dense() / "model.safetensors").items())


def test_an_update_replaces_scales_in_place_and_all_or_none() -> None:
    llm = start()
    scales = llm.engine.assembly.scales.by_group["full"]
    address, plain = scales.data_ptr(), tokens(llm)
    broken = ("model.layers.1.self_attn.k_scale", torch.tensor(2.0**20))
    with pytest.raises(CheckpointError):
        llm.update_weights([broken])
    assert (scales == 1).all(), "an update that fails replaces none"
    llm.update_weights([*weights(), broken])
    assert scales[1, 0].tolist() == [2.0**20] * 2
    assert tokens(llm) != plain, "cached prefixes are forgotten, too"
    llm.update_weights(weights())
    assert scales[1, 0].tolist() == [2.0**20] * 2, "an update without scales keeps them"
    llm.sleep()
    llm.wake_up()
    assert scales[1, 0].tolist() == [2.0**20] * 2
    assert scales.data_ptr() == address == llm.engine.runner.parts.backends["full"].scales.data_ptr()  # type: ignore[union-attr]


def largest(llm: LLM, prompts: Sequence[Mapping[str, list[int]]]) -> torch.Tensor:
    """The largest absolute key and value of each layer and head that the prompts leave in a cache of the model's type."""
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    cache = llm.engine.runner.parts.caches["full"]  # [pages, layers, tokens, 2, heads, size]
    return cache.abs().amax((0, 2, 5))


@pytest.mark.parametrize("device", ["cpu", "deferred_cpu"])
def test_calibration(tmp_path: Path, device: str) -> None:
    """The scales are those of the keys and values as they are, and a file of them gives the same tokens."""
    llm = start(device=device, enable_prefix_caching=True)
    tokens(llm)
    named = llm.calibrate_cache(PROMPTS)
    assert list(named) == [f"model.layers.{i}.self_attn.{x}_scale" for i in (0, 1) for x in "kv"]
    scales = llm.engine.assembly.scales.by_group["full"]
    seen = largest(start(dtype="auto"), PROMPTS)
    want = torch.exp2(torch.log2(seen * 2 / 448).ceil())
    assert torch.equal(scales, want)
    assert (seen / scales <= 224).all()
    got = tokens(llm)
    assert got[0][:3] == tokens(start(dtype="auto"))[0][:3]
    save_file(dict(named), tmp_path / "scales.safetensors")
    again = start(**{"cache.scales": str(tmp_path / "scales.safetensors")})
    assert torch.equal(again.engine.assembly.scales.by_group["full"], scales)
    assert tokens(again) == got
    assert not llm.engine.runner.work.warming_up
    assert type(llm.engine.runner.parts.backends["full"]) is PagedAttention


def test_calibration_starts_again_where_keys_did_not_fit(tmp_path: Path) -> None:
    """With scales far too small the first pass sees later layers' keys wrong."""
    names = start().engine.assembly.scales.named()
    model = scaled(tmp_path / "model", {name: torch.full_like(scale, 2.0**-20) for name, scale in names.items()})
    wrong, right = start(model), start()
    for name, scale in right.calibrate_cache(PROMPTS).items():
        assert torch.equal(wrong.calibrate_cache(PROMPTS)[name], scale), name


def test_when_calibration_cannot_be() -> None:
    with pytest.raises(RequestError, match=r"the cache is of float32, which takes no scales; accepted: .*cache\.dtype=float8_e4m3fn"):
        start(dtype="auto").calibrate_cache(PROMPTS)
    llm = start()
    llm.engine.add_request("a", "hello", GREEDY)
    with pytest.raises(RequestError, match="requests are open"):
        llm.calibrate_cache(PROMPTS)


def test_files_of_scales_that_do_not_fit(tmp_path: Path) -> None:
    file = tmp_path / "scales.safetensors"
    setting = {"cache.scales": str(file)}
    with pytest.raises(CheckpointError, match=r"cache\.scales: .*scales\.safetensors cannot be read"):
        start(**setting)
    named = start().engine.assembly.scales.named()
    save_file({"x": torch.ones(1)} | dict(named), file)
    with pytest.raises(CheckpointError, match=r"has 'x'; accepted: names like 'model\.layers\.0"):
        start(**setting)
    save_file(dict(list(named.items())[:2]), file)
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.self_attn\.k_scale, model\.layers\.1\.self_attn\.v_scale; it must"):
        start(**setting)
    with pytest.raises(SettingsError, match=r"cache\.scales is .*, but cache\.dtype is 'auto'; scales are for float8_e4m3fn"):
        start(dtype="auto", **setting)


class Unscaled(PagedAttention):
    takes_scales = False


class UnscaledPlugin:
    MODELRUNNER_API = ">=1,<2"

    @hookimpl
    def attention_backend(self, group: CacheGroup) -> Offer[type[AttentionBackend]]:
        return Offer("unscaled", lambda: Unscaled, "exact", "for a test")


def test_a_backend_that_knows_of_no_scales_is_refused() -> None:
    with pytest.raises(
        PluginError, match=r"cache\.dtype is 'float8_e4m3fn', but attention_backend unscaled .* takes_scales = False.*paged"
    ):
        start(None, UnscaledPlugin())
    start(None, UnscaledPlugin(), dtype="auto")


class FakeDevice:
    type, name, torch_device = "cuda", "old", torch.device("cpu")


def test_gpus_without_the_type_decline(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = FakeDevice()
    for capability, fits in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        answer = attention.attention_backend(GROUP, device, load_settings({"kv_cache_dtype": "fp8"}))
        assert isinstance(answer, Offer) is fits
        assert isinstance(attention.attention_backend(GROUP, device, load_settings({})), Offer)
        if isinstance(answer, Decline):
            assert answer.reason == "paged: cache.dtype float8_e4m3fn needs compute capability 8.9; device 'old' has 8.0"


def test_rows_leave_8_bits_to_paged() -> None:
    with pytest.raises(PluginError, match=r"rows: cache\.dtype is float8_e4m3fn, and it applies no scales"):
        start(**{"pin.attention_backend": "rows"})
    assert start().engine.assembly.resolved.components["attention_backend"].startswith("paged ")
    assert cpu_kernels.attention_backend.__name__ == "attention_backend"

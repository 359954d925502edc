"""Tokenizers of Hugging Face folders and of GGUF files, by transformers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelrunner.errors import CheckpointError, RequestError
from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Fit, Offer
from modelrunner.plugins import token_bytes

if TYPE_CHECKING:
    from modelrunner.checkpoint import ModelCard
    from modelrunner.settings import RunnerSettings
    from modelrunner.text import Tokenizer

MODELRUNNER_API = ">=1,<2"

# Any of these in a folder means that it holds a tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)


@hookimpl
def tokenizer(card: ModelCard, settings: RunnerSettings) -> Offer[Tokenizer] | Decline:
    named = settings.model.tokenizer
    path = Path(named).expanduser() if named else card.path
    fit: Fit = "exact" if named else "family"
    if path.is_dir():
        if not any((path / name).is_file() for name in TOKENIZER_FILES):
            return Decline(f"{path} holds no tokenizer ({', '.join(TOKENIZER_FILES)}); set model.tokenizer, or skip_tokenizer_init")
        return Offer("huggingface", lambda: load_folder(path), fit, f"tokenizer files in {path}")
    if path.is_file():
        return _gguf_offer(path, card, named is not None, fit)
    if named:
        return Offer("huggingface", lambda: load_hub(named, settings.model.revision), fit, f"hub repository {named}")
    return Decline(f"{path} is neither a folder nor a file; set model.tokenizer, or skip_tokenizer_init")


def _gguf_offer(path: Path, card: ModelCard, named: bool, fit: Fit) -> Offer[Tokenizer] | Decline:
    if path.suffix != ".gguf":
        return Decline(f"{path} is not a folder and not a .gguf file")
    if not named and card.metadata and "tokenizer.ggml.model" not in card.metadata:
        return Decline(f"{path} holds no tokenizer (no metadata tokenizer.ggml.model); set model.tokenizer, or skip_tokenizer_init")
    if find_spec("gguf") is None:
        return Decline("the tokenizer of a GGUF file needs the package gguf: pip install 'modelrunner[gguf]'")
    return Offer("gguf", lambda: load_gguf(path), fit, f"tokenizer inside {path.name}")


def load_folder(path: Path) -> Tokenizer:
    """The tokenizer of a local folder. Raises CheckpointError with the folder and the cause."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    def load() -> Any:
        try:
            return AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception:
            # transformers refuses the folder of an architecture that it does not know, though tokenizer.json says all that is needed.
            if not (path / "tokenizer.json").is_file():
                raise
            return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)

    return wrap(load, f"folder {path}")


def load_gguf(path: Path) -> Tokenizer:
    """The tokenizer inside a GGUF file. Raises CheckpointError with the file and the cause."""
    from transformers import AutoTokenizer

    return wrap(lambda: AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True), f"file {path}")


def load_hub(name: str, revision: str | None) -> Tokenizer:
    """The tokenizer of a hub repository, from the cache when offline. Raises CheckpointError with the name and the cause."""
    from transformers import AutoTokenizer

    return wrap(lambda: AutoTokenizer.from_pretrained(name, revision=revision or "main"), f"hub repository {name}")


def wrap(load: Callable[[], Any], where: str) -> Tokenizer:
    """Load a transformers tokenizer and put it behind our protocol."""
    try:
        loaded = load()
    except Exception as error:
        raise CheckpointError(f"the tokenizer in {where} cannot be loaded: {type(error).__name__}: {error}") from error
    return FastTokenizer(loaded) if getattr(loaded, "is_fast", False) else SlowTokenizer(loaded)


class _Wrapped:
    """What both kinds share. `hf`: the transformers tokenizer; using it directly from several threads is not safe."""

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        eos = hf.eos_token_id
        self._eos = tuple(int(item) for item in (eos if isinstance(eos, (list, tuple)) else (eos,)) if item is not None)
        self._vocab_size: int = 1 + max(hf.get_vocab().values())

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos

    @property
    def _added(self) -> dict[int, bool]:
        """Of each added id, whether it is a special token."""
        return {item: bool(token.special) for item, token in self.hf.added_tokens_decoder.items()}

    def _template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        """Apply the chat template; everything that it or the messages do wrong is a RequestError."""
        check_messages(messages)
        if getattr(self.hf, "chat_template", "") is None:
            raise RequestError("messages: the tokenizer has no chat template; give the prompt as text or token ids")
        try:
            return self.hf.apply_chat_template(list(messages), **options)
        except Exception as error:
            raise RequestError(f"messages: the chat template refused them: {error}") from error


class FastTokenizer(_Wrapped):
    """A tokenizer in Rust. Only its `encode` and `decode` are called, never what changes its truncation or padding, so any number of
    threads may use it at once (changing them while another thread encodes raises "Already borrowed")."""

    def __init__(self, hf: Any) -> None:
        super().__init__(hf)
        self._rust = hf.backend_tokenizer
        self._rust.no_truncation()  # a tokenizer.json may ask for it, and a prompt must never be cut in silence
        self._rust.no_padding()

    def token_bytes(self) -> list[bytes]:
        """Bytes of each id, none for special tokens. Raises RequestError when the vocabulary does not say."""
        return token_bytes.of_fast(self._rust, self._added, self.vocab_size)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._rust.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._rust.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        text: str = self._template(messages, add_generation_prompt=add_generation_prompt, tokenize=False)
        return self.encode(text, add_special_tokens=False)  # the template writes them itself


class SlowTokenizer(_Wrapped):
    """A tokenizer that says nothing about threads: one call at a time."""

    def __init__(self, hf: Any) -> None:
        super().__init__(hf)
        self._lock = threading.Lock()

    def token_bytes(self) -> list[bytes]:
        """Bytes of each id, none for special tokens. Raises RequestError when the vocabulary does not say."""
        with self._lock:
            return token_bytes.of_slow(self.hf.get_vocab(), self._added, self.vocab_size)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        with self._lock:
            return list(self.hf.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        with self._lock:
            return str(self.hf.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        with self._lock:
            return list(self._template(messages, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False))


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise RequestError unless `messages` is a conversation: mappings with a textual role, at least one."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            f"messages: got a {type(messages).__name__}; accepted: a list of mappings with 'role' and 'content', at least one"
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{i}]: it is not a mapping with a textual 'role'; accepted: {{'role': 'user', 'content': TEXT}}")
        content = message.get("content")
        if isinstance(content, str) and any("\ud800" <= letter <= "\udfff" for letter in content):
            raise RequestError(f"messages[{i}]: the content holds a lone surrogate; accepted: Unicode text")

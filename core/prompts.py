"""Prompts: from every form that a caller may give to token ids, and what comes beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelrunner.errors import RequestError
from modelrunner.media_front import EMBEDS_KEY, MEDIA_KEYS, MediaFront, Prepared
from modelrunner.sampling_params import as_int, shown

if TYPE_CHECKING:
    from modelrunner.text import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any] | Prepared
TEXT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
PROMPT_KEYS = (*TEXT_KEYS, EMBEDS_KEY, *MEDIA_KEYS)


def prepare_prompt(prompt: object, tokenizer: Tokenizer | None, media: MediaFront | None) -> Prepared:
    """A prompt in any accepted form, ready; its ids are not checked against a vocabulary yet. Takes as long as its media take.

    prompt: text, token ids, or a mapping with one of `prompt` (text), `prompt_token_ids` and `prompt_embeds` ([tokens, hidden size]), and
    optionally `cache_salt`; with `multi_modal_data` (`{"image": [...], "video": [...]}`, see `media_load`) also `mm_processor_kwargs`, for
    the model's processor, and `multi_modal_uuids`, labels for the items.
    """
    if not isinstance(prompt, Mapping):
        return Prepared(*read_prompt(prompt, tokenizer))
    if EMBEDS_KEY in prompt:
        if strange := [key for key in prompt if key not in (EMBEDS_KEY, "cache_salt")]:
            raise RequestError(f"prompt: {shown(strange[0])} beside 'prompt_embeds'; accepted beside it: 'cache_salt'")
        if media is None:
            raise RequestError("prompt_embeds: embeddings are not taken here; accepted: text or token ids")
        ids, embeds = media.embeds(prompt[EMBEDS_KEY])
        return Prepared(None, ids, checked_salt(prompt.get("cache_salt")), embeds)
    brought = [key for key in MEDIA_KEYS if prompt.get(key) is not None]
    prepared = Prepared(*read_prompt({key: value for key, value in prompt.items() if key not in MEDIA_KEYS}, tokenizer))
    if not brought:
        return prepared
    if media is None or brought[0] != MEDIA_KEYS[0]:
        raise RequestError(
            f"{brought[0]}: {'media are not taken here' if media is None else 'it goes with multi_modal_data, which is not there'}"
        )
    ids, found = media.prepare(prompt, prepared.token_ids)
    return replace(prepared, token_ids=ids, media=found)


def read_prompt(prompt: object, tokenizer: Tokenizer | None) -> tuple[str | None, list[int], Any]:
    """(text, token ids, cache salt as given) of a prompt of text or ids; the ids are not checked against a vocabulary yet."""
    salt = None
    if isinstance(prompt, Mapping):
        unknown = [key for key in prompt if key not in TEXT_KEYS]
        if unknown:
            text_alone = f"{', '.join(TEXT_KEYS)}" if unknown[0] in PROMPT_KEYS else ", ".join(PROMPT_KEYS)
            raise RequestError(f"prompt: unknown key {shown(unknown[0])}; accepted: {text_alone}")
        if ("prompt" in prompt) == ("prompt_token_ids" in prompt):
            raise RequestError("prompt: a mapping needs exactly one of the keys 'prompt' (text) and 'prompt_token_ids' (a list of ids)")
        if "cache_salt" in prompt:
            salt = checked_salt(prompt["cache_salt"])
        if "prompt_token_ids" in prompt:
            return None, list_of_ids(prompt["prompt_token_ids"]), salt
        prompt = prompt["prompt"]
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError(
                "prompt: got text, and there is no tokenizer (skip_tokenizer_init=True); accepted: {'prompt_token_ids': [...]}"
            )
        return prompt, encode_text(prompt, tokenizer), salt
    return None, list_of_ids(prompt), salt


def encode_text(text: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a prompt. Raises RequestError for text with lone surrogates, which no encoding has."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"prompt: character {error.start} is a lone surrogate ({shown(text[error.start])}); accepted: Unicode text"
        ) from None
    return list(tokenizer.encode(text))


def list_of_ids(value: object) -> list[int]:
    """`value` as a list of ints (numpy arrays too). Raises RequestError that names the first item that is not one."""
    items = value.tolist() if hasattr(value, "tolist") and hasattr(value, "__len__") else value  # one number, for an array of no dimension
    if isinstance(items, (str, bytes, Mapping)) or not isinstance(items, Iterable):
        raise RequestError(f"prompt: got {shown(value)}; accepted: text, a list of token ids, or a mapping with one of them")
    ids = list(items)
    if set(map(type, ids)) <= {int}:
        return ids
    checked = []
    for place, item in enumerate(ids):
        try:
            checked.append(as_int(item))
        except ValueError:
            raise RequestError(f"prompt token ids: got {shown(item)} at position {place}; accepted: integers") from None
    return checked


def check_ids(ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """Raise RequestError for a prompt that is empty, leaves no room for output, or has an id that the model lacks."""
    if not ids:
        raise RequestError("prompt: it is empty (0 tokens); accepted: at least 1 token")
    if len(ids) >= max_model_len:
        raise RequestError(
            f"prompt: {len(ids)} tokens; accepted: at most {max_model_len - 1}, since max_model_len is {max_model_len} "
            "tokens and at least one of them is output"
        )
    if min(ids) < 0 or max(ids) >= vocab_size:
        place = next(i for i, item in enumerate(ids) if not 0 <= item < vocab_size)
        raise RequestError(f"prompt token ids: got {shown(ids[place])} at position {place}; accepted: 0 to {vocab_size - 1}")


def checked_salt(salt: object) -> str | None:
    """`salt`, if requests can be parted by it. Raises RequestError."""
    if salt is None or (isinstance(salt, str) and salt):
        return salt
    raise RequestError(f"cache_salt: got {shown(salt)}; accepted: a string that is not empty, or None")

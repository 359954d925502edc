"""Conversations: from messages to token ids, by the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from modelrunner.chat_media import has_media, with_placeholders
from modelrunner.errors import RequestError, kind_of
from modelrunner.text import Tokenizer

if TYPE_CHECKING:
    from modelrunner.media_front import MediaFront

Message = Mapping[str, Any]


def chat_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """`tokenizer`. Raises RequestError when there is none."""
    if tokenizer is None:
        raise RequestError("messages: a chat needs a tokenizer, and skip_tokenizer_init is set; accepted: generate with token ids")
    return tokenizer


def conversations(messages: object) -> list[Any]:
    """The conversations of a call: a list of mappings is one, a list of anything else is several. Raises RequestError for no list."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        got = "an empty list" if messages == [] else kind_of(messages)
        raise RequestError(f"messages: got {got}; accepted: a list of mappings with 'role' and 'content'")
    return [messages] if isinstance(messages[0], Mapping) else list(messages)


def one_conversation(messages: object) -> Any:
    """`messages`, if they are one conversation; else RequestError."""
    found = conversations(messages)
    if len(found) != 1 or found[0] is not messages:
        raise RequestError(f"messages: got {len(found)} conversations; accepted: one, a list of mappings with 'role' and 'content'")
    return messages


def with_text(conversation: Any) -> Any:
    """The conversation with contents that are lists of text parts, `[{"type": "text", "text": ...}, ...]`, joined to one text each.

    Anything else is left to the template. Raises RequestError for a part of another type.
    """
    if not isinstance(conversation, Sequence) or isinstance(conversation, (str, bytes)):
        return conversation
    return [
        {**message, "content": joined(message["content"], i)}
        if isinstance(message, Mapping) and isinstance(message.get("content"), (list, tuple))
        else message
        for i, message in enumerate(conversation)
    ]


def opened(conversation: Any, front: MediaFront) -> tuple[Any, dict[str, Any]]:
    """The conversation as the template takes it, and what its prompt has beside its ids: images and videos of its messages."""
    if not has_media(conversation):
        return with_text(conversation), {}
    made, media = with_placeholders(conversation, front)
    return made, {"multi_modal_data": media}


def joined(parts: Sequence[object], message: int) -> str:
    """The text of a message's content parts. Raises RequestError, naming the message's number, for a part that is not text."""
    texts: list[str] = []
    for i, part in enumerate(parts):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            got = f"a part of type {part.get('type')!r}" if isinstance(part, Mapping) else f"a part {part!r}"
            raise RequestError(
                f"messages[{message}].content[{i}]: got {got}; accepted: a text, or a list of parts {{'type': 'text', 'text': ...}}, "
                "and of images and videos where the model takes them"
            )
        texts.append(text)
    return "".join(texts)


def num_characters(conversation: Sequence[Any]) -> int:
    """Characters of the textual contents, whatever else there is."""
    contents = (message.get("content") for message in conversation if isinstance(message, Mapping))
    return sum(len(content) for content in contents if isinstance(content, str))

"""Conversations with images and videos: the parts of their messages become placeholders, and the media go beside the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from modelrunner.errors import RequestError
from modelrunner.media import IMAGE, VIDEO

if TYPE_CHECKING:
    from modelrunner.media import MediaProcessor
    from modelrunner.media_front import MediaFront

# Type of a part -> (kind, key of the value).
PARTS = {
    "image_url": (IMAGE, "image_url"),
    "image": (IMAGE, "image"),
    "image_pil": (IMAGE, "image_pil"),
    "video_url": (VIDEO, "video_url"),
    "video": (VIDEO, "video"),
}


def has_media(conversation: Any) -> bool:
    """Whether some message has a part of an image or a video."""
    return any(isinstance(part, Mapping) and part.get("type") in PARTS for message in _messages(conversation) for part in _parts(message))


def with_placeholders(conversation: Any, front: MediaFront) -> tuple[Any, dict[str, list[Any]]]:
    """The conversation with a placeholder for each image and video, and these by kind, in order.

    Where the model's processor has a text for a placeholder, contents become texts; else they stay lists, of parts `{"type": "text", ...}`
    and `{"type": "image"}`, for templates that take such. Raises RequestError for a part of another type, or without its value.
    """
    media: dict[str, list[Any]] = {}
    if front.facts.problem:
        raise RequestError(f"{_first_place(conversation)}; {front.facts.problem}")
    processor = front.processor
    made = [
        {**message, "content": _content(_parts(message), place, media, processor)} if _parts(message) else message
        for place, message in enumerate(_messages(conversation))
    ]
    return made, media


def _first_place(conversation: Any) -> str:
    """The first part that is no text, for messages."""
    for message, each in enumerate(_messages(conversation)):
        for number, part in enumerate(_parts(each)):
            if isinstance(part, Mapping) and part.get("type") in PARTS:
                return f"messages[{message}].content[{number}]: got a part of type {part['type']!r}"
    raise AssertionError("only of a conversation that has media")


def _messages(conversation: Any) -> Sequence[Any]:
    return conversation if isinstance(conversation, Sequence) and not isinstance(conversation, str | bytes) else ()


def _parts(message: Any) -> Sequence[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list | tuple) else ()


def _content(parts: Sequence[Any], message: int, media: dict[str, list[Any]], processor: MediaProcessor) -> str | list[dict[str, str]]:
    listed: list[dict[str, str]] = []
    texts: list[str] | None = []
    for number, part in enumerate(parts):
        where = f"messages[{message}].content[{number}]"
        kind, value = _opened(part, where)
        if kind is None:
            text = value
            listed.append({"type": "text", "text": value})
        else:
            media.setdefault(kind, []).append(value)
            listed.append({"type": kind})
            try:
                text = processor.placeholder_text(kind)
            except ValueError:
                texts = None
        if texts is not None:
            texts.append(text)
    return listed if texts is None else "".join(texts)


def _opened(part: Any, where: str) -> tuple[str | None, Any]:
    """(None, text), or (kind, what was given of it)."""
    named = part.get("type") if isinstance(part, Mapping) else None
    if named == "text" and isinstance(part.get("text"), str):
        return None, part["text"]
    if named not in PARTS:
        got = f"a part of type {named!r}" if isinstance(part, Mapping) else f"a part {part!r}"
        raise RequestError(f"{where}: got {got}; accepted: parts of type text, {', '.join(PARTS)}")
    kind, key = PARTS[named]
    value = part.get(key)
    if isinstance(value, Mapping) and "url" in value:
        value = value["url"]
    if value is None or (key.endswith("_url") and not isinstance(value, str)):
        raise RequestError(
            f"{where}: a part of type {named!r} needs {key!r}"
            + (f": a URL, or {{'url': ...}}; of type {kind!r} it may be a path, bytes or frames" if key.endswith("_url") else "")
        )
    return kind, value

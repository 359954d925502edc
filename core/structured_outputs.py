"""StructuredOutputsParams: what the text of an output must look like. Nothing here imports torch or a grammar library."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from modelrunner.errors import RequestError

ACCEPTED = {
    "json": "a JSON schema, as a mapping or as its text",
    "regex": "a regular expression, text that is not empty, which the whole output matches",
    "grammar": "a grammar in EBNF, text that is not empty",
    "choice": "a list of texts, none of them empty",
    "json_object": "True or False",
}


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What an output must look like: exactly one of the fields. Immutable.

    json: a JSON schema, a mapping or its text (kept as text); the output is a JSON document that satisfies it. regex: the whole output
    matches it. grammar: EBNF whose start symbol is `root`. choice: the output is one of these texts. json_object: True for any JSON object.

    Raises RequestError naming the field, what was given and what is accepted. Whether a schema or a grammar makes sense is for the
    grammar backend to say, when it compiles it.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise RequestError(_refusal("json_object", self.json_object))
        given = [name for name in ACCEPTED if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            got = f"{' and '.join(given)} together" if given else "none of them"
            raise RequestError(f"structured_outputs: got {got}; accepted: exactly one of {', '.join(ACCEPTED)}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _texts(self.choice))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value and _is_unicode(value)):
                raise RequestError(_refusal(name, value))

    @property
    def kind(self) -> str:
        """Which field is given."""
        return next(name for name in ACCEPTED if getattr(self, name) not in (None, False))

    @property
    def size(self) -> int:
        """Bytes of what is given."""
        value = getattr(self, self.kind)
        return sum(len(text.encode()) for text in ((value,) if isinstance(value, str) else value or ())) if value is not True else 0


def read_structured_outputs(value: object) -> StructuredOutputsParams | None:
    """`value` as the sampling parameter `structured_outputs`: one, a mapping of its fields, or None. Raises RequestError."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    names = [field.name for field in fields(StructuredOutputsParams)]
    if not isinstance(value, Mapping):
        raise RequestError(
            f"structured_outputs: got {_shown(value)}; accepted: StructuredOutputsParams, or a mapping with one of {', '.join(names)}"
        )
    if unknown := [name for name in value if name not in names]:
        raise RequestError(f"structured_outputs: {unknown[0]!r} is not one of its fields (accepted: {', '.join(names)})")
    return StructuredOutputsParams(**value)


def _schema_text(value: object) -> str:
    if isinstance(value, Mapping):
        try:
            text = jsonlib.dumps(value, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"{_refusal('json', value)} ({error})") from None
    elif isinstance(value, str):
        text = value
        try:
            parsed = jsonlib.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{_refusal('json', value)} (it is no JSON: {error})") from None
        if not isinstance(parsed, dict):
            raise RequestError(_refusal("json", value))
    else:
        raise RequestError(_refusal("json", value))
    if not _is_unicode(text):
        raise RequestError(f"{_refusal('json', value)} (it holds a lone surrogate)")
    return text


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence) or not value:
        raise RequestError(_refusal("choice", value))
    for item in value:
        if not (isinstance(item, str) and item and _is_unicode(item)):
            raise RequestError(f"structured_outputs.choice: it contains {_shown(item)}; accepted: {ACCEPTED['choice']}")
    return tuple(dict.fromkeys(value))


def _is_unicode(text: str) -> bool:
    """Whether it holds no lone surrogate, which no encoding has."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _refusal(name: str, value: object) -> str:
    return f"structured_outputs.{name}: got {_shown(value)}; accepted: {ACCEPTED[name]}"


def _shown(value: object) -> str:
    from modelrunner.sampling_params import shown

    return shown(value)

"""What the engine worked out from the settings: a record apart from them, made to be printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Resolved:
    """What the engine worked out from the settings; `print` it.

    components: hook -> what was chosen, e.g. "dense (modelrunner:dense)". num_pages: usable pages. page_bytes: bytes of a page.
    tokens_per_page: by cache group. max_model_len: tokens. graphs: what was captured, or why nothing was. memory: what takes how much of
    the device's, where the cache's size was measured. automata: room for structured output on the device; empty for none. encoder: how
    encoding spares those who decode, where it does.
    """

    model: str
    dtype: str
    cache_dtype: str
    max_model_len: int
    num_pages: int
    page_bytes: int
    tokens_per_page: Mapping[str, int] = field(default_factory=dict)
    components: Mapping[str, str] = field(default_factory=dict)
    graphs: str = ""
    memory: str = ""
    automata: str = ""
    encoder: str = ""

    def __str__(self) -> str:
        groups = ", ".join(f"{name}: {tokens} tokens" for name, tokens in self.tokens_per_page.items())
        mebibytes = self.num_pages * self.page_bytes / 2**20
        lines = [
            f"model            {self.model} ({self.dtype}, up to {self.max_model_len} tokens a request)",
            f"cache            {self.num_pages} pages of {self.page_bytes} bytes, {mebibytes:.1f} MiB of {self.cache_dtype}",
            f"a page holds     {groups or 'nothing'}",
            f"graphs           {self.graphs}",
            *([f"memory           {self.memory}"] if self.memory else []),
            *([f"automata         {self.automata}"] if self.automata else []),
            *([f"encoder          {self.encoder}"] if self.encoder else []),
            *(f"{hook:<16} {chosen}" for hook, chosen in self.components.items()),
        ]
        return "\n".join(lines)

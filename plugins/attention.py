"""The built-in attention backend: paged attention through the named operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Offer

if TYPE_CHECKING:
    from modelrunner.attention import AttentionBackend
    from modelrunner.model_state import CacheGroup

MODELRUNNER_API = ">=1,<2"


def _paged() -> type[AttentionBackend]:
    from modelrunner.backends.paged import PagedAttention

    return PagedAttention


@hookimpl
def attention_backend(group: CacheGroup) -> Offer[type[AttentionBackend]] | Decline:
    from modelrunner.model_state import FullAttention

    if not isinstance(group, FullAttention):
        return Decline(f"paged: runs FullAttention and SlidingWindow groups, not {type(group).__name__}")
    return Offer("paged", _paged, fit="family", reason="named operations over pages; any device")

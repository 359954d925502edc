"""Sections of the settings about what requests can ask for: sampling, structured output, media, speculative decoding.

`modelrunner.settings` puts them into one tree, and is where to import them from.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from modelrunner.settings_engine import Section


class SamplerSettings(Section):
    """Capacities of the sampler's columns."""

    max_stop_token_ids: int = Field(default=64, ge=1, le=4096)
    """Most stop token ids of one request, the model's own end-of-sequence ids included."""

    stop_seats: int | None = Field(default=None, ge=1, le=65536)
    """Active requests that can have stop token ids at the same time; none is scheduler.max_rows."""

    max_logit_bias: int = Field(default=512, ge=1, le=65536)
    """Most ids in the logit_bias of one request."""

    logit_bias_seats: int | None = Field(default=None, ge=0, le=65536)
    """Active requests that can have a logit_bias at the same time; none is scheduler.max_rows. A seat costs 8 bytes an id."""

    allow_list_seats: int | None = Field(default=None, ge=0, le=65536)
    """Active requests that can have allowed_token_ids at the same time; none is scheduler.max_rows. A seat costs a bit for each id of
    the vocabulary."""

    max_bad_words: int = Field(default=128, ge=1, le=65536)
    """Most sequences of tokens in the bad_words of one request; a word is two where a leading space changes its tokens."""

    max_bad_word_tokens: int = Field(default=8, ge=1, le=256)
    """Most tokens of a bad word."""

    bad_word_seats: int | None = Field(default=None, ge=0, le=65536)
    """Active requests that can have bad_words at the same time; none is scheduler.max_rows. A seat costs 4 bytes a token."""

    penalty_seats: int | None = Field(default=None, ge=0, le=65536)
    """Active requests that can have penalties at the same time; none is scheduler.max_rows, but no more than fit into 128 MiB. A seat
    costs 4 bytes for each id of the vocabulary, on the device."""

    max_logprobs: int = Field(default=20, ge=-1, le=256)
    """Most log-probs that a request may ask for beside that of its own token, at each position; -1 sets no limit, and lets a request ask
    for -1, the whole vocabulary. Steps with a request for more than 20 run without a graph then, and copy 4 bytes to the host for each
    id of the vocabulary, for each of its tokens."""

    logprobs_mode: Literal["raw", "processed"] = "raw"
    """What log-probs tell: raw is what the model gave, processed what the token was drawn from, after penalties, bans, temperature and
    filters. Those of prompts are always raw."""

    @field_validator("logprobs_mode", mode="before")
    @classmethod
    def _short_mode(cls, mode: Any) -> Any:
        """Accept vLLM's names too."""
        return mode.removesuffix("_logprobs") if isinstance(mode, str) else mode


class GrammarSettings(Section):
    """Structured output."""

    compile_limit: float = Field(default=10.0, gt=0)
    """Seconds that a request waits for its grammar to be compiled; then it ends with an error. Loading the backend is not counted."""

    compile_threads: int = Field(default=2, ge=1, le=64)
    """Grammars that are compiled at the same time, beside the engine's loop."""

    kept_grammars: int = Field(default=64, ge=1, le=65536)
    """Compiled grammars that are remembered for later requests, the newest ones."""

    max_bytes: int = Field(default=262144, ge=1, le=2**24)
    """Most bytes of one request's schema, expression, grammar or list of choices."""

    max_whitespace: int = Field(default=16, ge=0, le=4096)
    """Most white space in a row between the parts of a JSON document; 0 allows none but a space after a comma or a colon."""

    fill_seconds: float = Field(default=0.005, gt=0)
    """Seconds for which a turn of the loop makes masks while a step runs; requests whose masks are not made then wait for a later step. It
    is looked at between two masks: one that takes longer is made all the same."""

    token_seconds: float = Field(default=0.5, gt=0)
    """Most seconds that a matcher may compute for one token (take it in, and make the next mask) when the host follows a grammar; other
    requests wait meanwhile. A request whose matcher took longer ends with an error. Also the time for which a turn of the loop makes masks
    while no step runs."""

    automaton_memory: int = Field(default=128, ge=0, le=65536)
    """MiB of device memory for grammars that are small automata, whose rows the host need not follow; 0 follows all rows on the host. A
    state takes a bit for each id of the vocabulary and 514 bytes."""

    automaton_states: int = Field(default=2048, ge=1, le=32767)
    """Most states of one such automaton; a grammar that takes more is followed on the host."""


class MediaSettings(Section):
    """Images, videos and embeddings in prompts."""

    arena_tokens: int | None = Field(default=None, ge=1, le=2**24)
    """Embeddings that the encoder's arena holds; none is the most that one image or video of the model can have, or a step's tokens for
    prompt embeddings of a model of text. Each takes the bytes of a hidden state, or several of them."""

    encoder_tokens: int = Field(default=4096, ge=1, le=2**24)
    """Most embeddings that are encoded together; an image that has more is encoded by itself."""

    encoder_share: float = Field(default=0.35, gt=0, le=1)
    """Share of the device that encoding takes while other requests decode: of its multiprocessors where the driver can part them (CUDA 12.4
    and later), else of the time, with pauses. Less makes tokens come faster, and images later. Below 1, memory is kept for another encoding
    of encoder_tokens."""

    graph_tokens: int = Field(default=512, ge=0, le=2**16)
    """Most embeddings of an image whose encoding is captured as a graph, when one of its size comes the second time, where the model allows
    it and graphs are captured; 0 captures none. Larger ones keep the device busier than the host."""

    prompt_embeds: bool = False
    """Accept embeddings as prompts (`prompt_embeds`)."""

    max_images: int = Field(default=16, ge=0, le=4096)
    """Most images of one request."""

    max_videos: int = Field(default=2, ge=0, le=4096)
    """Most videos of one request."""

    max_pixels: int = Field(default=2**25, ge=1, le=2**31)
    """Most pixels of an image as it is given; those of a video's frames together, the chosen ones, may be 16 times as many. Larger ones
    are refused before they are decoded."""

    max_bytes: int = Field(default=2**26, ge=1, le=2**32)
    """Most bytes of an image or a video file, encoded."""

    max_frames: int = Field(default=256, ge=1, le=65536)
    """Most frames that are taken out of a video file, spread evenly."""

    video_fps: float = Field(default=2.0, gt=0, le=240)
    """Frames a second that are taken out of a video file."""

    folder: str | None = None
    """Folder whose files prompts may name (file:// URLs and paths); none refuses all files."""

    remote: bool = False
    """Fetch http and https URLs that prompts name."""

    fetch_timeout: float = Field(default=10.0, gt=0)
    """Seconds that fetching a URL may take."""

    threads: int = Field(default=4, ge=1, le=256)
    """Images and videos of one call that are processed at the same time, beside the engine's loop."""


class SpeculationSettings(Section):
    """Speculative decoding: a drafter proposes tokens, the model checks several at once."""

    drafter: str | None = None
    """Name of the drafter offer (ngram, or a plugin's); none decodes a token at a time."""

    num_tokens: int = Field(default=3, ge=1, le=16)
    """Most tokens that are proposed for a request in a step; a request may ask for fewer (num_draft_tokens)."""

    model: str = ""
    """Hub id or folder of the drafter's weights; empty for a drafter without, or one whose weights lie with the model's."""

    off_above_rows: int | None = Field(default=None, ge=0, le=65536)
    """Decoding requests above which nothing is proposed, because the device is busy enough; none always proposes."""

    adaptive: bool = False
    """Choose step by step how many tokens are proposed, up to num_tokens, by how many were accepted lately and how many requests decode."""

    spare_tokens: int = Field(default=256, ge=1, le=65536)
    """With adaptive, tokens up to which a step is taken to last as long as one of few."""

    acceptance: Literal["exact", "typical"] = "exact"
    """`exact` changes no token's distribution. `typical` also keeps drafts that are likely enough where a request draws (temperature above
    0): faster, and lossy (see typical_threshold)."""

    typical_threshold: float = Field(default=0.3, gt=0, le=1)
    """Of acceptance `typical`: a draft of probability p is kept if p > min(typical_threshold, typical_factor * exp(-entropy)), in nats, of
    the distribution after temperature and filters (Cai et al. 2024, arXiv:2401.10774, section 3.3.1)."""

    typical_factor: float = Field(default=0.09, gt=0, le=1)
    """See typical_threshold."""

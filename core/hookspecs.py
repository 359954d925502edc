"""Every hook of modelrunner, in one place.

Hooks collect and the core chooses: a hook that supplies a component answers with an `Offer` (a bid), a `Decline` (a reason) or None
(not my business); a plugin that supplies several answers with a list of the first two. All of them are called at start-up or from
the command line; none is called while a step runs. An implementation may take fewer arguments than its specification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from modelrunner.attention import AttentionBackend
    from modelrunner.checkpoint import CheckpointReader, ModelCard
    from modelrunner.cli import Command
    from modelrunner.device import Device
    from modelrunner.grammar import GrammarBackend
    from modelrunner.linear import LinearScheme
    from modelrunner.logits_processors import RegisterProcessor
    from modelrunner.model_state import CacheGroup, ModelState
    from modelrunner.observers import Observer
    from modelrunner.offers import Decline, Offer
    from modelrunner.ops import Register
    from modelrunner.settings import RunnerSettings, Section
    from modelrunner.speculation import Drafter, TargetModel
    from modelrunner.taps import ModelInfo, Tap
    from modelrunner.text import Tokenizer

PROJECT = "modelrunner"
API_VERSION = "1.9"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class HookSpecs:
    """The hooks, in the order in which a start-up fires them."""

    @hookspec
    def settings_sections(self) -> Mapping[str, type[Section]] | None:
        """Settings of the plugin: section name -> frozen pydantic model; users write `plugin.<name>.<field>`.

        Read back as `settings.section(Model)`."""

    @hookspec
    def cli_commands(self) -> list[Command] | None:
        """Subcommands of `modelrunner`. Fires when the command line starts; must not import torch."""

    @hookspec
    def model_source(self, name: str, settings: RunnerSettings) -> Offer[Path] | Decline | None:
        """Turn what the user called the model (a hub id, a path, "" for no name) into a local folder or file.

        `load()` may download the revision that `settings.model.revision` names."""

    @hookspec
    def checkpoint_readers(self, path: Path) -> Offer[type[CheckpointReader]] | Decline | None:
        """Bid to read the checkpoint at `path` (a folder or a file): its card, and later its tensors, one after the other."""

    @hookspec
    def model_config(self, card: ModelCard) -> Offer[Mapping[str, Any]] | Decline | None:
        """Bid to state the configuration of `card` in the Hugging Face config's names (translated metadata, filled-in defaults)."""

    @hookspec
    def tokenizer(self, card: ModelCard, settings: RunnerSettings) -> Offer[Tokenizer] | Decline | None:
        """Bid to supply the tokenizer of `card`."""

    @hookspec
    def device(self, settings: RunnerSettings) -> Offer[type[Device]] | Decline | None:
        """Bid to be the device that steps run on. An absent accelerator is a `Decline` with the reason."""

    @hookspec
    def kernels(self, register: Register, device: Device) -> None:
        """Register operations, overrides for `device.type`, and fusions: `register.op`, `register.override`, `register.fusion`."""

    @hookspec
    def model_state(self, card: ModelCard, settings: RunnerSettings) -> Offer[type[ModelState]] | Decline | None:
        """Bid to run the model that `card` describes."""

    @hookspec
    def drafter(self, card: ModelCard | None, target: TargetModel, settings: RunnerSettings) -> Offer[type[Drafter]] | Decline | None:
        """Bid to propose tokens for speculative decoding. Asked only if `speculation.drafter` is set; card: of `speculation.model`, or
        None.

        New in 1.6."""

    @hookspec
    def linear_scheme(self, card: ModelCard, device: Device, settings: RunnerSettings) -> Offer[type[LinearScheme]] | Decline | None:
        """Bid to store and apply the weights of linear layers."""

    @hookspec
    def taps(self, model_info: ModelInfo) -> Tap | Sequence[Tap] | None:
        """Taps that read or change hidden states for the requests that ask. `model_info.tap_points` says where this model has some."""

    @hookspec
    def logits_processors(self, register: RegisterProcessor, model_info: ModelInfo) -> None:
        """Register processors that change the logits of the requests that ask: `register(processor)`."""

    @hookspec
    def attention_backend(
        self, group: CacheGroup, device: Device, settings: RunnerSettings
    ) -> Offer[type[AttentionBackend]] | Decline | None:
        """Bid to run attention over the cache group `group`."""

    @hookspec
    def grammar_backend(self, settings: RunnerSettings) -> Offer[type[GrammarBackend]] | Decline | None:
        """Bid to compile the grammars of structured output. Loaded when the first request asks for it; none at all is no error before."""

    @hookspec
    def observer(self, settings: RunnerSettings) -> Observer | Sequence[Observer] | None:
        """Observers of the engine's steps and requests. Fires last, once everything else is ready."""

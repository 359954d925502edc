"""Hugging Face: local folders and files, models of the hub, and configurations in the Hugging Face config's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelrunner.errors import CheckpointError
from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Offer

if TYPE_CHECKING:
    from modelrunner.checkpoint import ModelCard
    from modelrunner.settings import RunnerSettings

MODELRUNNER_API = ">=1,<2"

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
PATH_STARTS = ("./", "../", "/", "~")  # these never mean the hub
WANTED_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
OLDER_FILES = ["pytorch_model*.bin", "*.pt"]  # weights of models without safetensors
UNWANTED_FILES = ["consolidated*", "original/*"]  # the same weights in other layouts

# By model type, what a file must say so that nobody asks transformers for defaults.
COMMON_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_act"),
    *("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "bos_token_id", "eos_token_id"),
)
ROPE_FIELDS = frozenset({"rope_theta", "rope_parameters"})
FIELDS = {
    "llama": ("attention_bias", "mlp_bias"),
    "mistral": ("head_dim", "sliding_window"),
    "qwen2": ("use_sliding_window", "sliding_window", "max_window_layers"),
    "qwen3": ("head_dim", "attention_bias", "use_sliding_window", "sliding_window", "max_window_layers"),
}


@hookimpl
def model_source(name: str, settings: RunnerSettings) -> list[Offer[Path] | Decline]:
    if not name:
        return []
    path = Path(name).expanduser()
    if path.exists():
        return [Offer("local", lambda: path, "exact", f"{path} is here")]
    if name.startswith(PATH_STARTS):

        def missing() -> Path:
            raise CheckpointError(f"model {name!r}: no such file or folder ({path.absolute()})")

        return [Offer("local", missing, "family", "formed like a path, but nothing is there")]
    if not HUB_ID.fullmatch(name):
        return [Decline(f"{name!r} is neither a file or folder here nor formed like a hub id (`organisation/model`)")]
    return [
        Offer("hub", lambda: download(name, settings.model.revision), "family", "looks like a hub id: downloaded once, then from the cache")
    ]


def download(name: str, revision: str | None) -> Path:
    """The local folder of a model of the hub, downloaded unless cached. Raises CheckpointError with the cause."""
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=WANTED_FILES, ignore_patterns=UNWANTED_FILES)
        if not any(Path(folder).glob("*.safetensors")):
            huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=OLDER_FILES, ignore_patterns=UNWANTED_FILES)
    except Exception as error:  # the client's errors differ between its versions, and all mean: no model
        at = f" at revision {revision}" if revision else ""
        cause = (str(error).strip() or "no message").splitlines()[0].rstrip(".")
        raise CheckpointError(
            f"model {name!r}{at}: no such file or folder here ({Path(name).absolute()}), and the hub gave none: "
            f"{type(error).__name__}: {cause}. "
            "Check the name (and HF_TOKEN for a gated model), or download it elsewhere and pass its folder"
        ) from error
    return Path(folder)


@hookimpl
def model_config(card: ModelCard) -> Offer[Mapping[str, Any]] | Decline:
    if card.format == "gguf":
        from modelrunner.plugins.gguf_config import ARCHITECTURES, gguf_config

        known = card.metadata.get("general.architecture") in ARCHITECTURES
        about = "GGUF metadata under the Hugging Face names"
        return Offer("gguf", lambda: gguf_config(card), "exact" if known else "family", about)
    if not card.config:
        return Decline(f"the {card.format} card holds no configuration")
    return Offer(
        "transformers", lambda: with_defaults(card), "family", "the configuration file, with transformers' defaults when it knows the type"
    )


def with_defaults(card: ModelCard) -> dict[str, Any]:
    """The card's configuration, with defaults for absent fields where transformers knows the model type.

    Fields of the file always win, under their own names; the older spellings of rope and dtype come out in the newer one too. The same
    within its parts, such as `text_config`. A file that says all that matters is taken as it is: importing transformers takes seconds.
    """
    return dict(card.config) if says_all(card.config) else completed(card.config, transformers_defaults(card.config))


def completed(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with what it lacks from `defaults`, also within the configurations of a model's parts."""
    parts = {name for name, value in given.items() if name.endswith("_config") and isinstance(value, Mapping)}
    inner = {name: completed(given[name], defaults[name]) for name in parts if isinstance(defaults.get(name), Mapping)}
    return {**defaults, **given, **inner}


def says_all(config: Mapping[str, Any]) -> bool:
    """Whether `config` has every field that a run of its model type depends on and that transformers would fill in."""
    needed = FIELDS.get(str(config.get("model_type")))
    return needed is not None and {*COMMON_FIELDS, *needed} <= set(config) and not ROPE_FIELDS.isdisjoint(config)


def transformers_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers makes of `config`; empty when it does not know the type or refuses it (an unknown model is no error here)."""
    from transformers import CONFIG_MAPPING

    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return {}
    known = {name: value for name, value in config.items() if name != "model_type"}
    try:
        return dict(CONFIG_MAPPING[model_type].from_dict(known).to_dict())
    except Exception:  # transformers checks more than the model state needs; the state says what it lacks
        return {}

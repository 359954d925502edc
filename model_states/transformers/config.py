"""What a card says about a model of transformers: whether it can be run at all, and its configuration object. No torch is needed here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from modelrunner.checkpoint import ModelCard

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from modelrunner.settings import RunnerSettings

INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # what a modeling file looks its attention function up in
STATEFUL = ("_is_stateful = True", "create_recurrent_attention_mask")  # what it says, or calls, when it has recurrent state
ATTENTION_LAYERS = ("full_attention", "sliding_attention")


def reason_against(card: ModelCard, settings: RunnerSettings) -> str:
    """Why this family cannot run `card`, or an empty string. Quick: it builds nothing, so `declare` may still find an obstacle."""
    if card.format == "gguf":
        return "transformers' modules are filled by their own tensor names, and a GGUF file has others"
    if card.quantization is not None:
        return f"the checkpoint is quantised ({card.quantization.get('quant_method', 'an unnamed method')}); only float weights are loaded"
    scheme = settings.pin.linear_scheme or settings.linear.scheme
    if scheme not in ("auto", "plain"):
        return f"linear.scheme is {scheme!r}, but the linear layers are torch's own; only plain (or auto) fits"
    return reason_against_architecture(card)


def reason_against_architecture(card: ModelCard) -> str:
    """Why transformers' class cannot be used, judged by its lists and the text of its source file."""
    if (source := source_without_import(card)) is not None:
        return reason_against_source(card, source)
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architecture = next(iter(card.architectures), "")
    if not architecture:
        return "the configuration names no architecture"
    if card.model_type not in CONFIG_MAPPING:
        return f"the installed transformers does not know model_type {card.model_type!r}"
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(card.model_type, ())
    if card.config.get("is_encoder_decoder"):
        return f"{architecture} is an encoder-decoder; only decoders are run"
    if architecture not in ((known,) if isinstance(known, str) else tuple(known)):
        return f"{architecture} is not transformers' causal decoder of model_type {card.model_type!r} ({known or 'it has none'})"
    file = modeling_file(card.model_type)
    return reason_against_source(card, "" if file is None else file.read_text(encoding="utf-8"))


def source_without_import(card: ModelCard) -> str | None:
    """The text of the class's file, if it is plain that transformers has the architecture as a causal decoder of the card's type.

    Read off transformers' files, since importing it takes seconds. None: not plain, or transformers has been imported already.
    """
    architecture = next(iter(card.architectures), "")
    spec = None if "transformers" in sys.modules or card.config.get("is_encoder_decoder") else importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None or not (architecture and card.model_type):
        return None
    models, folder = Path(spec.origin).parent / "models", card.model_type.replace("-", "_")
    listing, file = models / "auto" / "modeling_auto.py", models / folder / f"modeling_{folder}.py"
    if not (listing.is_file() and file.is_file()):
        return None
    _, _, causal = listing.read_text(encoding="utf-8").partition("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict(")
    causal = causal.partition("\n)\n")[0]
    return file.read_text(encoding="utf-8") if f'("{card.model_type}", "{architecture}")' in causal else None


def reason_against_source(card: ModelCard, source: str) -> str:
    """Why the class cannot be used, judged by the card's layers and the text of its source file."""
    architecture = next(iter(card.architectures), "")
    others = sorted(set(card.config.get("layer_types") or ()).difference(ATTENTION_LAYERS))
    if others:
        return f"{architecture} has layers of type {', '.join(others)}; only those of type {' and '.join(ATTENTION_LAYERS)} run"
    if any(mark in source for mark in STATEFUL):
        return f"{architecture} keeps a recurrent state besides attention's keys and values"
    if INTERFACE not in source:
        return f"{architecture} computes attention, or what it has in its place, itself and takes no function from outside"
    return ""


def modeling_file(model_type: str) -> Path | None:
    """The source file of `model_type`'s classes in the installed transformers; found without importing it."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    folder = model_type_to_module_name(model_type)
    spec = importlib.util.find_spec(f"transformers.models.{folder}")
    path = Path(spec.origin).parent / f"modeling_{folder}.py" if spec is not None and spec.origin else None
    return path if path is not None and path.exists() else None


def hf_config(card: ModelCard) -> PreTrainedConfig:
    """transformers' configuration object of `card`. Raises ValueError with the cause when transformers refuses it."""
    from transformers import CONFIG_MAPPING

    fields = {name: value for name, value in card.config.items() if name != "model_type"}
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[card.model_type].from_dict(fields)
    except Exception as error:
        raise ValueError(f"{card.name}: transformers refuses the configuration: {type(error).__name__}: {error}") from error
    config.return_dict = True  # forwards give named outputs, and of them only what is used
    for extra in ("output_attentions", "output_hidden_states", "output_router_logits"):
        if getattr(config, extra, False):
            setattr(config, extra, False)
    return config


def longest(card: ModelCard, config: PreTrainedConfig, wanted: int | None) -> int:
    """Tokens that a request may have. wanted: the setting model.max_model_len. Raises ValueError when neither side names a number."""
    length = getattr(config.get_text_config(), "max_position_embeddings", None) or wanted
    if not length:
        raise ValueError(f"{card.name}: the configuration names no max_position_embeddings; set model.max_model_len (tokens)")
    return int(length)

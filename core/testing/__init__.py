"""Test helpers for modelrunner and its plugins: tiny and scripted models, reference results, and hooks into a running engine.

from modelrunner.testing import Driver, P, assert_same, dense
"""

from modelrunner.testing.byte_tokenizer import BOS, EOS, PAD, ByteTokenizer
from modelrunner.testing.drive import Driver
from modelrunner.testing.probe import Counters, EngineProbe
from modelrunner.testing.prompts import P, R
from modelrunner.testing.reference import assert_same, assert_tokens, margins, ref
from modelrunner.testing.script_drafter import ScriptDrafterPlugin
from modelrunner.testing.scripted import ScriptedPlugin, by_last, by_position, constant, mixed, say
from modelrunner.testing.subjects import Subject, dense, options, scripted
from modelrunner.testing.tiny import ByteTokenizerPlugin, tiny_dense

__all__ = [
    "BOS",
    "EOS",
    "PAD",
    "ByteTokenizer",
    "ByteTokenizerPlugin",
    "Counters",
    "Driver",
    "EngineProbe",
    "P",
    "R",
    "ScriptDrafterPlugin",
    "ScriptedPlugin",
    "Subject",
    "assert_same",
    "assert_tokens",
    "by_last",
    "by_position",
    "constant",
    "dense",
    "margins",
    "mixed",
    "options",
    "ref",
    "say",
    "scripted",
    "tiny_dense",
]

"""The processor against transformers' own, and through modelrunner's conformance suite; run it with the package installed."""

import torch
from transformers import NoRepeatNGramLogitsProcessor

from modelrunner.testing.conformance import LogitsProcessorConformance


class TestNoRepeat(LogitsProcessorConformance):
    processor = "no_repeat"
    arguments = ({"size": 1}, {"size": 2}, {"size": 3})
    wrong_arguments = ({}, {"size": 0}, {"size": 9}, {"size": True}, {"size": "3"}, {"size": 2, "more": 1})

    def expected(self, prompt, output, logits, arguments):
        return NoRepeatNGramLogitsProcessor(arguments["size"])(torch.tensor([prompt + output]), logits[None])[0]

"""modelrunner's conformance suite on the example; run it with the package installed."""

from tiny_recurrent import Recurrence, write_checkpoint

from modelrunner.testing.conformance import ModelStateConformance


class TestRecurrentExample(ModelStateConformance):
    model_state = "recurrent_example"

    def checkpoint(self, folder, seed):
        write_checkpoint(folder, seed, vocab_size=97, max_position_embeddings=128)

    def reference(self, folder):
        return Recurrence(folder)

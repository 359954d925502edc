"""A plugin that answers with the wrong type, and an entry point that is none."""

from modelrunner.hookspecs import hookimpl

MODELRUNNER_API = ">=1,<2"
NUMBER = 42


@hookimpl
def model_state(card, settings):
    return "AcmeState"

"""Changes of an engine between two steps, on command of another process: new weights, sleep, waking up."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from modelrunner import errors
from modelrunner.messages import Change, Done, Sleep, UpdateWeights

if TYPE_CHECKING:
    import torch

    from modelrunner.engine import Engine


class Stopped(Exception):
    """`Stop` came in the middle of a change."""


class Changes:
    """Carries them out, and counts the tensors of new weights (`loaded`).

    listen: called before each of these tensors; may raise Stopped.
    """

    def __init__(self, engine: Engine, listen: Callable[[], None]) -> None:
        self.loaded = 0
        self._engine = engine
        self._listen = listen
        self._loading = False

    @property
    def weights_problem(self) -> str:
        """As of the engine, but empty while weights are loaded: that they are a mixture then is no problem."""
        return "" if self._loading else self._engine.weights_problem

    def run(self, command: Change) -> Done:
        """The answer. What goes wrong is for whoever asked, and stands in it; only what the engine cannot go on after is raised."""
        try:
            if isinstance(command, UpdateWeights):
                self._loading = True
                self._engine.update_weights(self._noting(self._tensors(command)), command.version)
            elif isinstance(command, Sleep):
                self._engine.sleep()
            else:
                self._engine.wake_up()
        except Stopped:
            raise
        except Exception as error:
            if self._engine.failure is not None:
                raise
            if not hasattr(errors, type(error).__name__):  # ours say all that there is to say
                traceback.print_exception(error)
            return Done(command.number, type(error).__name__, str(error) or type(error).__name__)
        finally:
            self._loading = False
        return Done(command.number)

    def _tensors(self, command: UpdateWeights) -> Iterator[tuple[str, torch.Tensor]]:
        from modelrunner.new_weights import checkpoint_tensors
        from modelrunner.tensor_file import read_tensors

        if command.entries is not None:
            return read_tensors(command.source, command.entries)
        return checkpoint_tensors(command.source, self._engine.assembly.manager, self._engine.settings)

    def _noting(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in tensors:
            self._listen()
            yield pair
            self.loaded += 1

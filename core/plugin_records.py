"""What is known about plugins: candidates found on the path, failures, and the lines of `modelrunner plugins`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from packaging.utils import canonicalize_name

GROUP = "modelrunner"
BUILT_IN = "modelrunner"

State = Literal["loaded", "disabled", "failed", "shadowed"]


@dataclass(frozen=True)
class Candidate:
    """An entry point of group `modelrunner`, found and not yet imported.

    distribution, version: of the installed package. entry_point: its name. target: what it points at, `package.module[:attribute]`.
    location: the folder that holds the metadata. shadowed_by: set when other metadata of the same distribution is used instead.
    """

    distribution: str
    version: str
    entry_point: str
    target: str
    location: str
    shadowed_by: str = ""

    @property
    def name(self) -> str:
        """`distribution:entry_point`, the distribution in normalised spelling."""
        return f"{canonicalize_name(self.distribution)}:{self.entry_point}"

    @property
    def module(self) -> str:
        return self.target.partition(":")[0].strip()

    @property
    def built_in(self) -> bool:
        return canonicalize_name(self.distribution) == BUILT_IN


@dataclass(frozen=True)
class PluginFailure:
    """A plugin that could not be loaded, was refused, or raised when a hook asked it.

    stage: `discovery`, `import`, `version`, `registration`, or the hook's name. reason: one or more lines. error: the original exception.
    """

    candidate: Candidate
    stage: str
    reason: str
    error: BaseException | None = None

    @property
    def plugin(self) -> str:
        return self.candidate.name

    def matches(self, name: str) -> bool:
        """Whether `name`, as written in `pin.<hook>`, means this plugin."""
        return name in (self.plugin, self.candidate.entry_point) or canonicalize_name(name) == canonicalize_name(
            self.candidate.distribution
        )

    def __str__(self) -> str:
        found = self.candidate
        at = {"import": "could not be imported", "version": "was refused", "registration": "was refused", "discovery": "could not be read"}
        return (
            f"plugin {found.name!r} (entry point {found.entry_point!r} = {found.target!r}, group {GROUP!r}, "
            f"distribution {found.distribution} {found.version}) {at.get(self.stage, f'failed in hook {self.stage!r}')}: {self.reason}"
        )


def describe_error(error: BaseException) -> str:
    """`TypeName: message`, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


@dataclass(frozen=True)
class PluginInfo:
    """One line of `modelrunner plugins`.

    hooks: names of the hooks it implements. api: its declared interface versions. error: why it is not used.
    """

    name: str
    distribution: str
    version: str
    entry_point: str
    module: str
    hooks: tuple[str, ...]
    api: str
    state: State
    error: str = ""
    location: str = ""

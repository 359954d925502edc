"""What is known about plugins: candidates found on the path, failures, and the lines of `modelrunner plugins`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from packaging.utils import canonicalize_name

GROUP = "modelrunner"
BUILT_IN = "modelrunner"
ARGUMENT = "argument"  # stands for the distribution of a plugin that was passed, and is not installed

State = Literal["loaded", "disabled", "failed", "shadowed"]


@dataclass(frozen=True)
class Candidate:
    """An entry point of group `modelrunner`, found and not yet imported; or a plugin that was passed as an argument.

    distribution, version: of the installed package. entry_point: its name. target: what it points at, `package.module[:attribute]`.
    location: the folder that holds the metadata. shadowed_by: set when other metadata of the same distribution is used instead.
    by_name: passed as the name of a module, in `-p` or `plugins`.
    """

    distribution: str
    version: str
    entry_point: str
    target: str
    location: str
    shadowed_by: str = ""
    by_name: bool = False

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

    @property
    def passed(self) -> bool:
        """Whether it was passed as an argument, so that no list of the environment can leave it out."""
        return self.distribution == ARGUMENT and not self.location

    @property
    def origin(self) -> str:
        """Where it comes from, in words."""
        if self.by_name:
            return f"module {self.target!r}, given by -p or plugins=[...]"
        if self.passed:
            return f"an object of module {self.target!r}, given by plugins=[...]"
        return f"entry point {self.entry_point!r} = {self.target!r}, group {GROUP!r}, distribution {self.distribution} {self.version}"


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

    @property
    def remedy(self) -> str:
        """How to go on without it."""
        if self.candidate.by_name:
            return f"drop `-p {self.candidate.target}`, or its name from plugins=[...]"
        if self.candidate.passed:
            return "leave it out of plugins=[...]"
        return f"uninstall it, or leave it out with MODELRUNNER_DISABLE_PLUGINS={self.plugin}"

    def matches(self, name: str) -> bool:
        """Whether `name`, as written in `pin.<hook>`, means this plugin."""
        return name in (self.plugin, self.candidate.entry_point) or canonicalize_name(name) == canonicalize_name(
            self.candidate.distribution
        )

    def __str__(self) -> str:
        found = self.candidate
        at = {"import": "could not be imported", "version": "was refused", "registration": "was refused", "discovery": "could not be read"}
        return f"plugin {found.name!r} ({found.origin}) {at.get(self.stage, f'failed in hook {self.stage!r}')}: {self.reason}"


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

"""Finding and importing plugins: one try per entry point, each module imported once per process.

pluggy's own loader stops at the first import error and skips entry points that share a name, so modelrunner reads the metadata itself.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import invalidate_caches
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from modelrunner import hookspecs
from modelrunner.errors import SettingsError
from modelrunner.plugin_records import GROUP, Candidate, PluginFailure, describe_error

DISABLE = "MODELRUNNER_DISABLE_PLUGINS"
ONLY = "MODELRUNNER_ONLY_PLUGINS"
STRICT = "MODELRUNNER_STRICT_PLUGINS"
TRACE = "MODELRUNNER_TRACE_PLUGINS"
API_ATTRIBUTE = "MODELRUNNER_API"


@dataclass(frozen=True)
class Discovery:
    """Everything found on `sys.path`: candidates in loading order, and metadata that could not be read."""

    candidates: tuple[Candidate, ...]
    problems: tuple[PluginFailure, ...]


@dataclass(frozen=True)
class Filters:
    """What the environment leaves out. `only` is empty when every plugin may load; it never hides the built-in ones."""

    disable: tuple[str, ...]
    only: tuple[str, ...]

    def reason(self, candidate: Candidate) -> str:
        """Why `candidate` must not load; empty when it may."""
        if any(means(name, candidate) for name in self.disable):
            return f"named by {DISABLE}"
        if self.only and not candidate.built_in and not any(means(name, candidate) for name in self.only):
            return f"not named by {ONLY}"
        return ""


_lock = threading.RLock()
_discovered: dict[tuple[str, ...], Discovery] = {}
_imported: dict[Candidate, object | PluginFailure] = {}


def forget() -> None:
    """Empty the caches of this process, so that the next engine looks again."""
    invalidate_caches()
    with _lock:
        _discovered.clear()
        _imported.clear()


def discover() -> Discovery:
    """Entry points of group `modelrunner` on `sys.path`, built-in ones first, then by name. Imports nothing; cached per process."""
    with _lock:
        path = tuple(sys.path)
        if path not in _discovered:
            _discovered[path] = _scan()
        return _discovered[path]


def _scan() -> Discovery:
    found: dict[str, list[tuple[Version, list[Candidate]]]] = {}
    problems: list[PluginFailure] = []
    for distribution in distributions():
        candidates = _read(distribution, problems)
        if candidates:
            found.setdefault(canonicalize_name(candidates[0].distribution), []).append((_version(candidates[0].version), candidates))
    kept: list[Candidate] = []
    for versions in found.values():
        kept += _without_stale(versions)
    order = sorted(kept, key=lambda c: (not c.built_in, c.name, bool(c.shadowed_by), c.location))
    return Discovery(tuple(order), tuple(sorted(problems, key=lambda p: p.plugin)))


def _read(distribution: Distribution, problems: list[PluginFailure]) -> list[Candidate]:
    """The candidates of one distribution. Unreadable metadata is a problem of that distribution alone."""
    location = "?"
    try:
        location = str(distribution.locate_file(""))
        text = distribution.read_text("entry_points.txt")
        if not text or f"[{GROUP}]" not in text:
            return []
        points = [p for p in distribution.entry_points if p.group == GROUP]
        name, version = distribution.metadata["Name"], distribution.metadata["Version"]
        if not name:
            raise ValueError("METADATA is missing or has no Name")
        return [Candidate(name, version or "0", p.name, p.value, location) for p in points]
    except Exception as error:
        folder = str(getattr(distribution, "_path", location))
        problems.append(PluginFailure(Candidate("unknown", "?", folder, folder, location), "discovery", describe_error(error), error))
        return []


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")


def _without_stale(versions: list[tuple[Version, list[Candidate]]]) -> list[Candidate]:
    """Metadata of one distribution seen more than once: the first folder on the path wins, and within a folder the newest version.

    The others are kept as `shadowed`, unless they say exactly the same (an editable install's folder seen beside its installed metadata).
    """
    folder = versions[0][1][0].location
    _, used = max((entry for entry in versions if entry[1][0].location == folder), key=lambda entry: entry[0])
    same = {(c.version, c.entry_point, c.target) for c in used}
    winner = f"{used[0].distribution} {used[0].version} in {folder}"
    others = [c for _, candidates in versions if candidates is not used for c in candidates]
    return used + [replace(c, shadowed_by=winner) for c in others if (c.version, c.entry_point, c.target) not in same]


def import_candidate(candidate: Candidate) -> object | PluginFailure:
    """Import the plugin and compare interface versions; a second call in the same process gives the same answer without importing again."""
    with _lock:
        if candidate not in _imported:
            _imported[candidate] = _import(candidate)
        return _imported[candidate]


def _import(candidate: Candidate) -> object | PluginFailure:
    try:
        plugin: object = EntryPoint(candidate.entry_point, candidate.target, GROUP).load()
    except (Exception, SystemExit) as error:
        return PluginFailure(candidate, "import", describe_error(error), error)
    return plugin


def check_api(plugin: Any, module: str, *, required: bool = True) -> tuple[str, str]:
    """The interface versions that `plugin` (or its module) declares, and why it must be refused (empty when it may be used)."""
    declared = getattr(plugin, API_ATTRIBUTE, None)
    if declared is None:
        declared = getattr(sys.modules.get(module), API_ATTRIBUTE, None)
    offered = hookspecs.API_VERSION
    example = f'{API_ATTRIBUTE} = ">={offered.partition(".")[0]},<{int(offered.partition(".")[0]) + 1}"'
    if declared is None:
        why = (
            f"it declares no {API_ATTRIBUTE}; modelrunner offers interface {offered}. If it was written for that, add {example} to {module}"
        )
        return "", why if required else ""
    if not isinstance(declared, str):
        return repr(declared), f"{API_ATTRIBUTE} is {declared!r} ({type(declared).__name__}); a version specifier is needed, e.g. {example}"
    try:
        fits = SpecifierSet(declared).contains(offered, prereleases=True)
    except InvalidSpecifier:
        return declared, f"{API_ATTRIBUTE} is {declared!r}, which is no version specifier; write e.g. {example}"
    if fits:
        return declared, ""
    return declared, f"it needs interface {declared!r}, modelrunner offers {offered}; install a version of the plugin made for {offered}"


def means(name: str, candidate: Candidate) -> bool:
    """Whether `name`, an entry point or `distribution:entry point`, means `candidate`."""
    distribution, colon, entry_point = name.rpartition(":")
    if not colon:
        return name == candidate.entry_point
    return f"{canonicalize_name(distribution)}:{entry_point}" == candidate.name


def read_filters(environ: Mapping[str, str]) -> Filters:
    """Read the two comma-separated lists; an empty value counts as unset."""
    disable, only = (tuple(n.strip() for n in environ.get(variable, "").split(",") if n.strip()) for variable in (DISABLE, ONLY))
    return Filters(disable, only)


def read_flag(environ: Mapping[str, str], variable: str) -> bool:
    """An on/off environment variable. Raises SettingsError for anything else."""
    value = environ.get(variable, "").strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("", "0", "false", "no", "off"):
        return False
    raise SettingsError(f"{variable}={environ[variable]!r}: accepted are 1 and 0")


def unknown_names(filters: Filters, candidates: Iterable[Candidate]) -> list[str]:
    """One sentence for every name in the lists that no installed plugin answers to."""
    known = [c for c in candidates if not c.shadowed_by]
    names = sorted({c.name for c in known})
    complaints = []
    for variable, wanted in ((DISABLE, filters.disable), (ONLY, filters.only)):
        for name in wanted:
            if not any(means(name, c) for c in known):
                near = get_close_matches(name, [*names, *{c.entry_point for c in known}], n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                complaints.append(f"{variable} names {name!r}, which is not installed.{hint} Found are {', '.join(names) or 'none'}")
    return complaints

"""What a plugin must look like: its hook implementations at registration, its answers, and the components its offers load.

Everything is checked before the first step, so that a plugin written for another interface is refused by name and does not fail in use.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import pluggy

from modelrunner.hookspecs import PROJECT, HookSpecs
from modelrunner.offers import Decline, Offer

HOOKS: dict[str, inspect.Signature] = {
    name: inspect.signature(function).replace(return_annotation=inspect.Signature.empty)
    for name, function in vars(HookSpecs).items()
    if hasattr(function, PROJECT + "_spec")
}

# The class that an offer of the hook must load a subclass of.
COMPONENTS: dict[str, tuple[str, str]] = {
    "checkpoint_readers": ("modelrunner.checkpoint", "CheckpointReader"),
    "model_state": ("modelrunner.model_state", "ModelState"),
    "device": ("modelrunner.device", "Device"),
    "attention_backend": ("modelrunner.attention", "AttentionBackend"),
    "linear_scheme": ("modelrunner.linear", "LinearScheme"),
    "grammar_backend": ("modelrunner.grammar", "GrammarBackend"),
    "drafter": ("modelrunner.speculation", "Drafter"),
}
# The type that an offer of the hook must load an instance of.
VALUES: dict[str, type] = {"model_source": Path, "model_config": Mapping}
# The class that every answer of the hook must be an instance of: these hooks supply objects, not offers.
INSTANCES: dict[str, tuple[str, str]] = {
    "taps": ("modelrunner.taps", "Tap"),
    "observer": ("modelrunner.observers", "Observer"),
}


def hook_arguments(hook: str) -> list[str]:
    """The argument names of `hook`."""
    return [name for name in HOOKS[hook].parameters if name != "self"]


def implemented(manager: pluggy.PluginManager, plugin: object) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Hook name -> (attribute name, marker options) of everything in `plugin` that carries `@hookimpl`."""
    found: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)  # type: ignore[arg-type,unused-ignore]
        if options is not None:
            found[options.get("specname") or attribute] = (attribute, options)
    return found


def hook_problems(manager: pluggy.PluginManager, plugin: object) -> list[str]:
    """Everything wrong with the hook implementations of `plugin`, each with the hook's name and the signature found."""
    found = implemented(manager, plugin)
    if not found:
        shape = "a module" if inspect.ismodule(plugin) else f"{plugin!r} ({type(plugin).__name__})"
        return [f"{shape} with no function marked @modelrunner.hookimpl; the hooks are {', '.join(HOOKS)}"]
    problems = []
    for hook, (attribute, options) in found.items():
        signature = f"{attribute}{inspect.signature(getattr(plugin, attribute))}"
        if hook not in HOOKS:
            if not options.get("optionalhook"):
                near = get_close_matches(hook, HOOKS, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"the hooks are {', '.join(HOOKS)}"
                problems.append(f"unknown hook {hook!r}, defined as {signature}; {hint}")
        elif options.get("wrapper") or options.get("hookwrapper"):
            problems.append(f"hook {hook!r}, defined as {signature}: wrappers are not supported, each plugin is asked on its own")
        else:
            problems += _argument_problems(hook, signature, getattr(plugin, attribute))
    return problems


def _argument_problems(hook: str, signature: str, function: Any) -> list[str]:
    accepted = hook_arguments(hook)
    unknown = [
        str(parameter)
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in accepted or parameter.kind is inspect.Parameter.POSITIONAL_ONLY
    ]
    if not unknown:
        return []
    return [f"hook {hook!r}, defined as {signature}: it is not given {', '.join(unknown)}; its arguments are ({', '.join(accepted)})"]


def answer_problem(hook: str, answer: Any) -> str:
    """Why `answer` is not what `hook` may return; empty when it is."""
    if hook == "settings_sections":
        good = answer is None or (
            isinstance(answer, Mapping) and all(isinstance(k, str) and isinstance(v, type) for k, v in answer.items())
        )
        wanted = "a mapping of section names to pydantic model classes, or None"
    elif hook == "cli_commands":
        wanted = "a list of modelrunner.cli.Command, or None"
        good = answer is None or (isinstance(answer, (list, tuple)) and all(hasattr(c, "name") and hasattr(c, "run") for c in answer))
    elif hook == "kernels":
        good, wanted = answer is None, "None (operations are handed to `register`)"
    elif hook == "logits_processors":
        good, wanted = answer is None, "None (processors are handed to `register`)"
    elif hook in INSTANCES:
        module, name = INSTANCES[hook]
        good = all(isinstance(a, getattr(import_module(module), name)) for a in flatten(answer))
        wanted = f"an instance of {module}.{name}, a list of these, or None"
    else:
        good, wanted = all(isinstance(a, (Offer, Decline)) for a in flatten(answer)), "Offer, Decline, a list of these, or None"
    return "" if good else f"answered {answer!r} ({type(answer).__name__}); {wanted} is needed"


def flatten(answer: Any) -> tuple[Any, ...]:
    """The answers in an answer: none, one or several."""
    if answer is None:
        return ()
    return tuple(answer) if isinstance(answer, Sequence) and not isinstance(answer, (str, bytes)) else (answer,)


def component_problem(hook: str, value: Any) -> str:
    """Why `value`, loaded from an offer, cannot serve `hook`; empty when it can. Imports the module that defines the contract."""
    if hook in VALUES:
        return "" if isinstance(value, VALUES[hook]) else f"it loaded {value!r} ({type(value).__name__}); {VALUES[hook].__name__} is needed"
    if hook == "tokenizer":
        from modelrunner.text import Tokenizer

        missing = [name for name in vars(Tokenizer) if not name.startswith("_") and not hasattr(value, name)]
        return f"{type(value).__name__} lacks {', '.join(missing)}" if missing else ""
    if hook not in COMPONENTS:
        return ""
    module, name = COMPONENTS[hook]
    base = getattr(import_module(module), name)
    if not (isinstance(value, type) and issubclass(value, base)):
        return f"it loaded {value!r} ({type(value).__name__}); a subclass of {module}.{name} is needed"
    return "; ".join(_class_problems(value, base))


def _class_problems(component: type, base: type) -> list[str]:
    """Required methods that are missing, and overridden ones that cannot be called as the core calls them."""
    problems = [
        f"{component.__name__} lacks the required method {name}{inspect.signature(getattr(base, name))}"
        for name in sorted(getattr(component, "__abstractmethods__", ()))
        if callable(getattr(base, name, None))
    ]
    for name, theirs in inspect.getmembers(component, callable):
        ours = getattr(base, name, None)
        if inspect.isfunction(ours) and inspect.isfunction(theirs) and theirs is not ours and not name.startswith("__"):
            complaint = _call_problem(inspect.signature(ours), inspect.signature(theirs))
            if complaint:
                problems.append(
                    f"{component.__name__}.{name}{inspect.signature(theirs)} {complaint}; it is {name}{inspect.signature(ours)}"
                )
    return problems


def _call_problem(ours: inspect.Signature, theirs: inspect.Signature) -> str:
    """Try a call with every argument of our signature by position (keyword-only ones by name), and one with the required ones only."""
    empty, keyword_only = inspect.Parameter.empty, inspect.Parameter.KEYWORD_ONLY
    plain = [p for p in ours.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = {p.name: None for p in ours.parameters.values() if p.kind is keyword_only}
    needed = {p.name: None for p in ours.parameters.values() if p.kind is keyword_only and p.default is empty}
    try:
        theirs.bind(*[None] * len(plain), **named)
        theirs.bind(*[None for p in plain if p.default is empty], **needed)
    except TypeError as error:
        return f"cannot be called as the interface says ({error})"
    return ""

"""A Python file in the place of a config: what it defines becomes the targets, by the names it gives them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from torch import nn

from ampdbg.config.file import config_of
from ampdbg.config.schema import Config
from ampdbg.config.targets import did_you_mean, why_no_file
from ampdbg.errors import ConfigError, WorkloadError
from ampdbg.quantities import listed
from ampdbg.workload.targets import import_ahead

OPTIONAL: Mapping[str, str] = {"loss": "loss", "step": "training_step"}
"""Keys of the config, and the names in the file that they are taken from where it defines them."""

CONVENTIONS = ("build_model", "build_data", *OPTIONAL.values())


def config_of_module_file(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The config that a module file stands for; the next build takes the imported file over.

    The file defines ``build_model()``, or exactly one class derived from ``nn.Module`` that takes no arguments,
    and ``build_data()``; ``loss`` and ``training_step`` are used when it defines them. What ``overrides``
    (``"dotted.key=value"``) give need not be there. Targets and the checkpoint are relative to the current folder.

    Raises:
        ConfigError: there is no such Python file, or an override is wrong.
        WorkloadError: it does not define what is needed; the message lists all that is missing.
        UserCodeError: importing it raised.
    """
    source = f"--module {path}"
    problem = why_no_file(Path(os.path.abspath(path)), str(path), "*.py")
    if path.suffix != ".py":
        problem = problem or f"got {path.name!r}; allowed: a Python file, FILE.py"
    if problem:
        raise ConfigError(f"{source}: {problem}")
    start = Path.cwd()  # importing the file may change it
    module = import_ahead(Path(os.path.abspath(path)), f"{source}: importing it")
    given = {override.partition("=")[0].strip() for override in overrides}
    names, missing = {key: name for key, name in OPTIONAL.items() if hasattr(module, name)}, []
    for key, find in (("model", _model), ("data", _data)):
        if not given & {key, f"{key}.target"}:
            try:
                names[key] = find(module)
            except WorkloadError as error:
                missing.append(f"{source}: {error}")
    if missing:
        raise WorkloadError("\n".join(missing))
    targets = {key: {"target": f"{path.as_posix()}:{name}"} for key, name in names.items()}
    return config_of(targets, source, start, overrides).model_copy(update={"start": start})


def _model(module: ModuleType) -> str:
    """The name of the model's factory or class."""
    if hasattr(module, "build_model"):
        return "build_model"
    classes = _module_classes(module)
    usable = [name for name, kind in classes.items() if not _required(kind)]
    if len(usable) == 1:
        return usable[0]
    if usable:
        raise WorkloadError(
            f"it defines {len(usable)} nn.Module classes that take no arguments: {listed(usable)}; "
            "needed: build_model() that returns the one to train"
        )
    if classes:
        needs = listed(f"{name}({', '.join(_required(kind))})" for name, kind in classes.items())
        raise WorkloadError(
            f"it defines no build_model(), and no nn.Module class that can be made without arguments: {needs}; "
            "needed: build_model() that returns the model"
        )
    raise WorkloadError(
        "it defines neither build_model() nor an nn.Module class; "
        f"needed: build_model() that returns the model.{_instead(module, 'build_model')}"
    )


def _data(module: ModuleType) -> str:
    if hasattr(module, "build_data"):
        return "build_data"
    raise WorkloadError(
        "it defines no build_data(); "
        f"needed: a function that returns an iterable of batches.{_instead(module, 'build_data')}"
    )


def _module_classes(module: ModuleType) -> dict[str, type[nn.Module]]:
    """The classes that are the file's own, and not imported into it, each by its first name."""
    own: dict[type[nn.Module], str] = {}
    for name, value in vars(module).items():
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.__name__:
            own.setdefault(value, name)
    return {name: kind for kind, name in own.items()}


def _required(kind: type[nn.Module]) -> list[str]:
    """The arguments without which the class cannot be made."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(kind).parameters.values()
    return [item.name for item in parameters if item.default is item.empty and item.kind not in variadic]


def _instead(module: ModuleType, missing: str) -> str:
    """The name that was probably meant, or all that the file defines."""
    own = [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and name not in CONVENTIONS
    ]
    return did_you_mean(missing, own) or (f" It defines {listed(own, most=8)}." if own else "")

"""The targets of a config: import the objects that they name, check their call signatures, and call them.

A Python file may replace a config: its conventional definitions (``build_model``, ``build_data``) are the targets.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from torch import nn

from ampdbg.config.file import config_of
from ampdbg.config.schema import Config, TargetSpec
from ampdbg.config.targets import Target, did_you_mean, why_no_file
from ampdbg.errors import ConfigError, WorkloadError
from ampdbg.quantities import listed, quoted
from ampdbg.workload.user_code import UserCode


@dataclass(frozen=True)
class Found:
    """The object that the target at ``key`` of the config names."""

    key: str
    config: Config
    spec: TargetSpec
    value: Any
    user: UserCode

    @property
    def named(self) -> str:
        """The config line and the target, as messages begin: ``config.yaml:3: model.target: model.py:build``."""
        return f"{self.config.where(f'{self.key}.target')}: {self.spec.target}"

    def refuse(self, problem: str) -> WorkloadError:
        return WorkloadError(f"{self.named} {problem}")

    def made(self, *positional: Any, names: Sequence[str] = ()) -> Any:
        """Call the value with ``positional`` (for its parameters ``names``) and the config's ``args``.

        Raises:
            WorkloadError: the arguments do not fit its signature.
            UserCodeError: it raised.
        """
        self._check(self.value, names, self.spec.args)
        with self.user.running(self.named):
            return self.value(*positional, **self.spec.args)

    def bound(self, names: Sequence[str]) -> Callable[..., Any]:
        """Return a callable for the arguments ``names`` of every step. A class is instantiated first.

        Raises:
            WorkloadError: it is not callable, takes other arguments, or is an instance and ``args`` are given.
        """
        if isinstance(self.value, type):
            return self._callable(self.made(), names, {})
        if not inspect.isroutine(self.value) and not isinstance(self.value, functools.partial):
            self.refuse_arguments()
        return self._callable(self.value, names, self.spec.args)

    def refuse_arguments(self) -> None:
        """Reject ``args`` for an instance, which needs no constructor call.

        Raises:
            WorkloadError: ``args`` are given.
        """
        if self.spec.args:
            given = f"args of {listed(self.spec.args)}"
            raise self.refuse(f"is an instance of {type(self.value).__name__}, which takes no args; got {given}")

    def _callable(self, function: Any, names: Sequence[str], arguments: Mapping[str, Any]) -> Callable[..., Any]:
        if not callable(function):
            raise self.refuse(f"is {a(function)}; needed: a function {self.key}({', '.join(names)})")
        self._check(function, names, arguments)
        return functools.partial(function, **arguments) if arguments else function

    def _check(self, function: Callable[..., Any], names: Sequence[str], args: Mapping[str, Any]) -> None:
        """Raise if the signature does not allow the call ``function(*names, **args)``."""
        signature = signature_of(function)
        try:
            signature.bind(*names, **args)
        except TypeError as error:
            where = self.config.where(f"{self.key}.args" if args else f"{self.key}.target")
            raise WorkloadError(f"{where}: {self.spec.target} {_misfit(signature, names, args, str(error))}") from None


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature. For builtins without one, return a signature that allows any call."""
    try:
        return inspect.signature(function)
    except (ValueError, TypeError):
        return inspect.signature(lambda *args, **kwargs: None)


def required(function: Callable[..., Any]) -> list[str]:
    """Return the names of the required arguments."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = signature_of(function).parameters.values()
    return [item.name for item in parameters if item.default is item.empty and item.kind not in variadic]


def _misfit(signature: inspect.Signature, names: Sequence[str], args: Mapping[str, Any], said: str) -> str:
    parameters = list(signature.parameters.values())
    by_name = [
        item for item in parameters[len(names) :] if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)
    ]
    keywords = [item.name for item in by_name]
    takes = f"it takes {listed(keywords, most=8) or 'none'}"
    if not any(item.kind is item.VAR_KEYWORD for item in parameters):
        unknown = [name for name in args if name not in keywords]
        if unknown:
            return f"has no argument {listed(map(quoted, unknown))}; {takes}.{did_you_mean(unknown[0], keywords)}"
    called = ", ".join([*names, *(f"{name}=..." for name in args)])
    return f"cannot be called with ({called}): {said}"


def a(value: object) -> str:
    """Describe a value in a message: ``"a Linear"``, ``"an int"``, ``"None"``, ``"the class Linear"``."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def first_problem(problems: Mapping[str, object]) -> str | None:
    """Return the first sentence with a true condition, or None."""
    return next((sentence for sentence, holds in problems.items() if holds), None)


_ABSENT = object()

# The top-level modules that builds have imported from the user's folders.
_imported: set[str] = set()
# Those modules in _imported that the next build reuses.
_ahead: set[str] = set()


@dataclass
class Importer:
    """Imports the targets of one build, each file once."""

    config: Config
    user: UserCode
    files: dict[Path, ModuleType] = field(default_factory=dict)

    def find(self, key: str, target: Target) -> object:
        """Return the object that ``target``, given at ``key``, names.

        Raises:
            WorkloadError: the module or name does not exist.
            UserCodeError: the import raised.
        """
        where = self.config.where(f"{key}.target")
        found: object = self._from_file(where, target) if target.file else self._from_module(where, target)
        for part in target.name.split("."):
            inner = getattr(found, part, _ABSENT)
            if inner is _ABSENT:
                raise WorkloadError(f"{where}: got {quoted(target.text)}, but {_has_no(found, part)}")
            found = inner
        return found

    def _from_file(self, where: str, target: Target) -> ModuleType:
        path = target.path(self.config.folder)
        if path not in self.files:
            self.files[path] = _imported_from(path, self.user, f"{where}: importing {target.file}")
        return self.files[path]

    def _from_module(self, where: str, target: Target) -> ModuleType:
        try:
            with self.user.running(f"{where}: importing {target.module}"), _noting(self.user.folders):
                return importlib.import_module(target.module)
        except Exception as error:
            name = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
            if name and f"{target.module}.".startswith(f"{name}."):  # the target's module, or a package around it
                no_module = f"there is no module {quoted(name)}"
                raise WorkloadError(f"{where}: got {quoted(target.text)}, but {no_module}") from None
            raise


def forget_user_modules() -> None:
    """Forget the modules of earlier builds, so that the next build imports the current files.

    Modules that were imported ahead for the next build are kept.
    """
    old = _imported - _ahead
    for name in [name for name in sys.modules if name.partition(".")[0] in old]:
        del sys.modules[name]
    _imported.intersection_update(_ahead)
    _ahead.clear()
    importlib.invalidate_caches()


@contextlib.contextmanager
def imports_apart() -> Iterator[None]:
    """On exit, forget the modules that builds imported inside this context, and restore the earlier modules."""
    names, before = set(_imported), dict(sys.modules)
    try:
        yield
    finally:
        forget_user_modules()
        sys.modules.update({name: one for name, one in before.items() if name.partition(".")[0] in names})
        _imported.update(names)


def _imported_from(path: Path, user: UserCode, doing: str) -> ModuleType:
    own_first = UserCode((path.parent, *user.folders), user.start)
    with own_first.running(doing), _noting(own_first.folders):
        return _import_file(path)


@contextlib.contextmanager
def _noting(folders: Sequence[Path]) -> Iterator[None]:
    """Record the top-level modules that an import takes from ``folders``, even if the import fails."""
    before = set(sys.modules)
    try:
        yield
    finally:
        new = {name for name in set(sys.modules) - before if "." not in name}
        _imported.update(name for name in new if any(_lies_in(sys.modules.get(name), folder) for folder in folders))


def _import_file(path: Path) -> ModuleType:
    if _file_of(sys.modules.get(path.stem)) == path:
        return sys.modules[path.stem]
    _make_way(path.parent)
    name = path.stem if _is_free(path) else f"{path.stem}_{hashlib.sha1(str(path).encode()).hexdigest()[:8]}"
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    module = importlib.util.module_from_spec(cast(importlib.machinery.ModuleSpec, spec))
    sys.modules[name] = module
    _imported.add(name)
    try:
        loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _make_way(folder: Path) -> None:
    """Unload same-named modules from other folders: two folders may each have a ``layers.py`` and import their own."""
    for name in _imported:
        here = (folder / f"{name}.py").exists() or (folder / name / "__init__.py").exists()
        if here and not _lies_in(sys.modules.get(name), folder):
            sys.modules.pop(name, None)


def _is_free(path: Path) -> bool:
    """True if the file's stem names no other module, now or in a later import."""
    name, elsewhere = path.stem, [entry for entry in sys.path if Path(entry) != path.parent]
    if not name.isidentifier() or name in {*sys.modules, *sys.stdlib_module_names}:
        return False
    found = importlib.machinery.PathFinder.find_spec(name, elsewhere)
    return getattr(found, "origin", None) in (None, str(path))


def _file_of(module: ModuleType | None) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(os.path.abspath(file)) if file else None


def _lies_in(module: ModuleType | None, folder: Path) -> bool:
    """True if the top-level ``module`` is a file or a package directly in ``folder``."""
    file = _file_of(module)
    if file is None:
        folders = [Path(entry) for entry in getattr(module, "__path__", ())]
        return any(entry.parent == folder for entry in folders)
    return folder in (file.parent, file.parent.parent if file.stem == "__init__" else None)


def _has_no(owner: object, name: str) -> str:
    public = [item for item in dir(owner) if not item.startswith("_")]
    what = getattr(owner, "__name__", type(owner).__name__)
    return f"{what} has no {quoted(name)}.{did_you_mean(name, public) or f' It has {listed(public, most=8)}.'}"


# A Python file instead of a config

OPTIONAL: Mapping[str, str] = {"loss": "loss", "step": "training_step"}
"""Maps optional keys of the config to the names that define them in the file."""

CONVENTIONS = ("build_model", "build_data", *OPTIONAL.values())


def config_of_module_file(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config that a module file replaces. The next build reuses the imported file.

    The file defines ``build_model()``, or exactly one subclass of ``nn.Module`` that takes no arguments, and
    ``build_data()``. ``loss`` and ``training_step`` are optional. Definitions that ``overrides``
    (``"dotted.key=value"``) replace may be missing. Targets and the checkpoint are relative to the current folder.

    Raises:
        ConfigError: the Python file does not exist, or an override is wrong.
        WorkloadError: the file lacks definitions; the message lists them all.
        UserCodeError: the import raised.
    """
    source = f"--module {path}"
    problem = why_no_file(Path(os.path.abspath(path)), str(path), "*.py")
    if path.suffix != ".py":
        problem = problem or f"got {quoted(path.name)}; allowed: a Python file, FILE.py"
    if problem:
        raise ConfigError(f"{source}: {problem}")
    start = Path.cwd()  # before the import, which may change the current folder
    _ahead.clear()
    forget_user_modules()
    module = _imported_from(Path(os.path.abspath(path)), UserCode((start,)), f"{source}: importing it")
    _ahead.update(_imported)
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
    """Return the name of the model's factory or class."""
    if hasattr(module, "build_model"):
        return "build_model"
    classes = _module_classes(module)
    usable = [name for name, kind in classes.items() if not required(kind)]
    if len(usable) == 1:
        return usable[0]
    needs = listed(f"{name}({', '.join(required(kind))})" for name, kind in classes.items())
    problems = {
        f"it defines {len(usable)} nn.Module classes that take no arguments: {listed(usable)}; "
        "needed: build_model() that returns the one to train": usable,
        f"it defines no build_model(), and no nn.Module class that can be made without arguments: {needs}; "
        "needed: build_model() that returns the model": classes,
        "it defines neither build_model() nor an nn.Module class; "
        f"needed: build_model() that returns the model.{_instead(module, 'build_model')}": True,
    }
    raise WorkloadError(first_problem(problems))


def _data(module: ModuleType) -> str:
    if hasattr(module, "build_data"):
        return "build_data"
    raise WorkloadError(
        "it defines no build_data(); "
        f"needed: a function that returns an iterable of batches.{_instead(module, 'build_data')}"
    )


def _module_classes(module: ModuleType) -> dict[str, type[nn.Module]]:
    """Return the classes that the file itself defines, each under its first name."""
    own: dict[type[nn.Module], str] = {}
    for name, value in vars(module).items():
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.__name__:
            own.setdefault(value, name)
    return {name: kind for kind, name in own.items()}


def _instead(module: ModuleType, missing: str) -> str:
    """Return a hint: the name that the user probably meant, or all names that the file defines."""
    own = [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and name not in CONVENTIONS
    ]
    return did_you_mean(missing, own) or (f" It defines {listed(own, most=8)}." if own else "")

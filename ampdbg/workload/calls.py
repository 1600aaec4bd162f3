"""Calls what a target names with the arguments of the config, after checking them against its signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampdbg.config import Config, TargetSpec
from ampdbg.config.target_names import did_you_mean, listed
from ampdbg.errors import WorkloadError
from ampdbg.workload.user_code import UserCode


@dataclass(frozen=True)
class Found:
    """What the target at ``key`` of the config names."""

    key: str
    config: Config
    spec: TargetSpec
    value: Any
    user: UserCode

    @property
    def named(self) -> str:
        """The place and the target, as a message begins: ``config.yaml:3: model.target: model.py:build``."""
        return f"{self.config.where(f'{self.key}.target')}: {self.spec.target}"

    def refuse(self, problem: str) -> WorkloadError:
        """The error that says what is wrong with this target."""
        return WorkloadError(f"{self.named} {problem}")

    def made(self, *positional: Any, names: Sequence[str] = ()) -> Any:
        """The value called with ``positional`` (which its parameters call ``names``) and the config's ``args``.

        Raises:
            WorkloadError: the arguments do not fit its signature.
            UserCodeError: it raised.
        """
        self._check(self.value, names, self.spec.args)
        with self.user.running(self.named):
            return self.value(*positional, **self.spec.args)

    def bound(self, names: Sequence[str]) -> Callable[..., Any]:
        """Something to call with the arguments ``names`` in every step: a class is made into an instance first.

        Raises:
            WorkloadError: it is not callable, takes other arguments, or is an instance and ``args`` are given.
        """
        if isinstance(self.value, type):
            return self._callable(self.made(), names, {})
        if not inspect.isroutine(self.value) and not isinstance(self.value, functools.partial):
            self.refuse_arguments()
        return self._callable(self.value, names, self.spec.args)

    def refuse_arguments(self) -> None:
        """An instance is made already.

        Raises:
            WorkloadError: ``args`` are given for it.
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
        """Refuses a call ``function(*names, **args)`` that the signature does not allow."""
        try:
            signature = inspect.signature(function)
        except (ValueError, TypeError):  # some builtins have none
            return
        try:
            signature.bind(*names, **args)
        except TypeError as error:
            where = self.config.where(f"{self.key}.args" if args else f"{self.key}.target")
            raise WorkloadError(f"{where}: {self.spec.target} {_misfit(signature, names, args, str(error))}") from None


def _misfit(signature: inspect.Signature, names: Sequence[str], args: Mapping[str, Any], said: str) -> str:
    parameters = list(signature.parameters.values())
    by_name = [
        item for item in parameters[len(names) :] if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)
    ]
    keywords = [item.name for item in by_name]
    takes = f"it takes {listed(keywords) or 'none'}"
    if not any(item.kind is item.VAR_KEYWORD for item in parameters):
        unknown = [name for name in args if name not in keywords]
        if unknown:
            return f"has no argument {listed(map(repr, unknown))}; {takes}.{did_you_mean(unknown[0], keywords)}"
    called = ", ".join([*names, *(f"{name}=..." for name in args)])
    return f"cannot be called with ({called}): {said}"


def a(value: object) -> str:
    """``"a Linear"``, ``"an int"``, ``"None"``, ``"the class Linear"``: what a value is, in a message."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"

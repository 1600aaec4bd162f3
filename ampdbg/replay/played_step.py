"""A step that can be run again: the calls that led to its loss, with what they were given, made by the same code.

A :class:`~ampdbg.replay.tape.Tape` notes them while a loop trains; a capture keeps them.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch.utils import _pytree

from ampdbg.replay.copies import Copying
from ampdbg.replay.random_state import RandomState
from ampdbg.replay.snapshot import ModelState
from ampdbg.source.ownership import Line

Given = Mapping[int, tuple[Any, Any]]
"""What each call of a tape is given, by its number: positional and keyword arguments, with ``Made`` and ``Own`` in
the place of tensors that are not the tape's."""


Modes = Sequence[tuple[torch.nn.Module, bool]]
"""Modules, each with whether it is in training mode."""


@dataclass(frozen=True)
class Made:
    """In the place of a tensor that an earlier call of the tape has made; ``path`` leads to it in what that gave."""

    call: int
    path: str


@dataclass(frozen=True)
class Own:
    """In the place of a tensor that is a model's own: a replay finds it altered and gives it back."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class TapedCall:
    """One call. ``writes`` says that it changes its first argument, which stands for what it gives."""

    function: Callable[..., Any]
    line: Line | None
    lowers: bool
    has_gradients: bool
    random_state: RandomState
    reads: frozenset[int]
    writes: bool = False
    is_whole: bool = True
    """Whether all that it is given is known: no graph from before the tape leads into it."""
    weights: Sequence[tuple[torch.Tensor, int]] = ()
    """The weights that it reads, each with how often it had been written."""
    modes: Modes = ()
    """Those of the model, where they are others than at the first call, as behind a validation."""
    hands_on: bool = False
    """Whether it is a cast or a move that had nothing to do, and gave the tensor that it was given."""

    @property
    def has_its_weights(self) -> bool:
        """Whether the weights that it reads are still those that it has read."""
        return all(weight._version == version for weight, version in self.weights)

    def again(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The same call with other arguments; its line is that of the first time."""
        self.random_state.restore()
        for module, is_training in self.modes:
            vars(module)["training"] = is_training
        with torch.set_grad_enabled(self.has_gradients):
            result = _at(self.line)(self.function, args, kwargs)
        return args[0] if self.writes else result


def torch_name(function: Callable[..., Any]) -> str:
    """What torch calls a function of its own: ``torch.Tensor.add``; "" of any other."""
    with contextlib.suppress(Exception):  # it may be anything that can be called
        return str(torch.overrides.resolve_name(function) or "")
    return ""


@dataclass(frozen=True)
class PlayedStep:
    """A step that a tape was made of; ``given`` has what its calls are given, an entry for each part of the step."""

    calls: Sequence[TapedCall]
    losses: Mapping[int, tuple[Made, ...]]
    """The losses of each part, by the number of its first call."""
    device: str
    given: tuple[Given, ...] = field(repr=False)
    beside: tuple[tuple[torch.nn.Module, ModelState], ...] = field(default=(), repr=False)
    """What the modules that it calls beside the model held before, such as a loss with a running mean."""

    replaced: tuple[str, ...] = ()
    """The names of those of its data that were not finite, and have finite numbers here."""

    def loss(self, given: Given) -> torch.Tensor:
        """The sum of the losses of one part, of shape ().

        Where autocast lowers around it, it lowers what it has lowered when the tape was made, and nothing else.
        """
        results: dict[int, Any] = {}
        torch.clear_autocast_cache()  # it may hold casts of weights as another replay had them
        for number, (args, kwargs) in given.items():
            call = self.calls[number]
            found = Copying(lambda value: _found(value, results))
            with self._autocast(call):
                results[number] = call.again(*found.of((args, kwargs)))
        losses = [_at_path(results, made).reshape(()) for made in self.losses[min(given)]]
        return losses[0] if len(losses) == 1 else torch.stack([loss.float() for loss in losses]).sum()

    def _autocast(self, call: TapedCall) -> Any:
        return contextlib.nullcontext() if call.lowers else torch.autocast(self.device, enabled=False)


def _found(value: Any, results: Mapping[int, Any]) -> Any:
    if isinstance(value, Own):
        return value.tensor
    return _at_path(results, value) if isinstance(value, Made) else value


def _at_path(results: Mapping[int, Any], made: Made) -> Any:
    return next(tensor for path, tensor in made_in(results[made.call]) if path == made.path)


MOST_NESTED = 3
"""A distribution may have another as its base."""


def made_in(result: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in what a call gives, each with its path: those of containers, and what objects hold as attributes,
    such as distributions."""
    if isinstance(result, torch.Tensor):
        yield "", result
        return
    for path, leaf in _pytree.tree_flatten_with_path(result)[0]:
        yield from _held_by(leaf, _pytree.keystr(path))


def _held_by(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth < MOST_NESTED and not isinstance(value, (torch.nn.Module, type, FunctionType, ModuleType)):
        for name, attribute in list(getattr(value, "__dict__", {}).items()):
            yield from _held_by(attribute, f"{path}.{name}", depth + 1)


def _call(function: Any, args: Any, kwargs: Any) -> Any: return function(*args, **kwargs)  # fmt: skip


SPACE = {"__builtins__": builtins}
"""An import that C++ code makes looks for them where the call stands."""


def _at(line: Line | None) -> Callable[..., Any]:
    """``_call`` as if it stood in that line, so that what it runs is known to belong there."""
    if line is None:
        return _call
    file, number, function = line
    code: CodeType = _call.__code__
    return FunctionType(code.replace(co_filename=file, co_firstlineno=number, co_name=function), SPACE)

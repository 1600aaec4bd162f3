"""A step that can be run again: the calls that led to its losses, with what they were given, made by the same code.

A :class:`~ampdbg.replay.recorder.Recorder` notes them while a loop trains; a capture keeps them.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from ampdbg.config.schema import Precision, config_of_script
from ampdbg.ops import MOVES
from ampdbg.precision.emulation import is_emulating
from ampdbg.precision.modes import mode_of
from ampdbg.precision.widening import lifted
from ampdbg.probes.tensors import HALVES, float_values, leaves_of
from ampdbg.record.run import Reach, Step
from ampdbg.replay.copies import Copying
from ampdbg.replay.random_state import RandomState
from ampdbg.replay.run import Run, Tail, name_of_line
from ampdbg.replay.snapshot import ModelState, Snapshot
from ampdbg.replay.state import CONSTANTS
from ampdbg.source.ownership import LibraryLine, Line
from ampdbg.workload.build import Workload
from ampdbg.workload.losses import StepFunction
from ampdbg.workload.user_code import UserCode

Half = Literal["float16", "bfloat16"]

MOVES_OR_CASTS = MOVES | {"type", "tensor", "as_tensor", "__getitem__"}
"""torch's functions that give a tensor's own values, in its format or in another one, by their names."""

CallArguments = Mapping[int, tuple[Any, Any]]
"""What each call of a step is given, by its number: positional and keyword arguments, with ``Made``, ``Own`` and
``ScalePower`` in the place of tensors that others have made, of those that are the model's own, and of the scale."""


@dataclass(frozen=True)
class Made:
    """In the place of a tensor that an earlier call has made; ``path`` leads to it in what that gave, or begins with
    :data:`KEPT` and leads to it in the module that was called, or with :data:`GIVEN` and leads to it in the
    arguments."""

    call: int
    path: str


KEPT = "self."
"""Of what a module keeps as an attribute, as ``self.aux_loss``; no path in what a call gives begins so."""

GIVEN = "given"
"""Of what a module writes into its arguments, as ``batch["features"]``; no path in what a call gives begins so."""


@dataclass(frozen=True)
class Own:
    """In the place of a tensor that is a model's own: a replay finds it altered and gives it back."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class ScalePower:
    """In the place of the loss scale to a power: a replay has a scale of its own."""

    power: int


@dataclass(frozen=True)
class RecordedCall:
    """One call. ``writes`` says that it changes its first argument, which stands for what it gives. ``training`` is
    whether the module that it is of was in training mode."""

    function: Callable[..., Any]
    line: Line | None
    lowers: bool
    has_gradients: bool
    random_state: RandomState
    reads: frozenset[int]
    writes: bool = False
    training: bool | None = None

    @property
    def module(self) -> torch.nn.Module | None:
        """The module that it calls; None where it calls a function."""
        called = self.called
        return called if isinstance(called, torch.nn.Module) else None

    @property
    def called(self) -> Callable[..., Any]:
        """What it calls, at the end of a pass too."""
        return self.function.module if isinstance(self.function, PassEnd) else self.function

    @property
    def described(self) -> str:
        """What it calls, and where, in words."""
        name = getattr(self.called, "__name__", type(self.called).__name__).strip("_")
        return f"{name} on line {self.line[1]} of {PurePath(self.line[0]).name}" if self.line is not None else name

    def again(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The same call with other arguments; its line is that of the first time."""
        self.random_state.restore()
        module = self.module
        if module is not None and self.training is not None and module.training is not self.training:
            module.train(self.training)
        with torch.set_grad_enabled(self.has_gradients):
            result = _at(self.line)(self.function, args, kwargs)
        return args[0] if self.writes else result


@dataclass(frozen=True)
class PassEnd:
    """Calls a module whose step is run again no further, and makes one number of all that it gives.

    A step of such calls fails where any of what its modules give is not finite, and has no gradients. Where a module
    gives anything that gradients lead to, that alone counts: beside it a mask may be infinite.
    """

    module: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The sum, of shape (); it leads nowhere."""
        every = [tensor for _, tensor in made_in(self.module(*args, **kwargs))]
        made = [tensor for tensor in every if tensor.requires_grad] or every
        sums = [values.float().sum().cpu() for tensor in made if (values := float_values(tensor.detach())) is not None]
        return torch.stack([torch.zeros(()), *sums]).sum().requires_grad_()


class OwnFunction:
    """Calls an ``autograd.Function`` of the script's; it has that one's name."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self._function = function
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What its ``apply`` gives."""
        return self._function.apply(*args, **kwargs)


def weighted(output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The loss, of shape (), whose gradient is what ``output.backward(gradient)`` begins with.

    What of that is inf or NaN the script has made of a forward pass that had failed, so it is no data: 0 in its place
    leaves the output's own inf and NaN in the loss, and adds none.
    """
    return (output * torch.nan_to_num(gradient, 0.0, 0.0, 0.0)).sum()


def scaled_gradients(scale: float, outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.autograd.grad`` of outputs that a scaler has scaled, as it does: by a number in float32."""
    each = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    with _disable_current_modes():  # these are none of the step's ops
        scaled = [output * torch.tensor(scale, device=output.device) for output in each]
    return torch.autograd.grad(scaled, *args, **kwargs)


def torch_name(function: Callable[..., Any]) -> str:
    """What torch calls a function of its own: ``torch.Tensor.add``; "" of any other."""
    with contextlib.suppress(Exception):  # it may be anything that can be called
        return str(torch.overrides.resolve_name(function) or "")
    return ""


@dataclass(frozen=True)
class RecordedStep:
    """``calls`` by number, in order; ``losses`` of each part by the number of its first call; ``given`` has what the
    calls are given, an entry for each part. ``beside`` are the modules that it calls and the model does not have, such
    as a loss with a running mean, with what they held before. ``own_scale`` is the loss scale that the script itself
    has put into its losses, and that is not among the calls."""

    calls: Mapping[int, RecordedCall]
    losses: Mapping[int, tuple[Made, ...]]
    device: str
    given: tuple[CallArguments, ...] = field(repr=False)
    beside: tuple[ModelState, ...] = field(default=(), repr=False)
    reach: Reach = "whole"
    own_scale: float = 1.0

    @property
    def scales_gradients(self) -> bool:
        """Gradients at the loss scale are part of its losses."""
        return any(call.function is scaled_gradients for call in self.calls.values())

    def loss(self, given: CallArguments, in_fp32: Collection[int] = (), scale: float = 1.0) -> torch.Tensor:
        """The sum of the losses of one part, of shape (); the calls ``in_fp32`` are run so, whatever autocast does.

        Where autocast lowers around it, it lowers what it has lowered when the step ran, and nothing else.
        """
        results: dict[int, Any] = {}
        torch.clear_autocast_cache()  # it may hold casts of weights as another replay had them
        for number, (args, kwargs) in given.items():
            call = self.calls[number]
            is_pinned = number in in_fp32
            found = Copying(lambda value: self._found(value, results, scale, is_pinned=is_pinned))  # noqa: B023 - used at once
            is_lowered = call.lowers and not is_pinned
            with (
                contextlib.nullcontext() if is_lowered else torch.autocast(self.device, enabled=False),
                lifted("float32") if is_pinned else contextlib.nullcontext(),  # of what casts to half itself
            ):
                again = found.of((args, kwargs))
                results[number] = call.again(*again), again
        losses = [self._at_path(results, made).reshape(()) for made in self.losses[min(given)]]
        return losses[0] if len(losses) == 1 else torch.stack([loss.float() for loss in losses]).sum()

    def _found(self, value: Any, results: Mapping[int, Any], scale: float, *, is_pinned: bool) -> Any:
        if isinstance(value, ScalePower):
            return scale**value.power
        made = self._at_path(results, value) if isinstance(value, Made) else value
        found = value.tensor if isinstance(value, Own) else made
        is_half = is_pinned and isinstance(found, torch.Tensor) and found.dtype in HALVES
        return found.float() if is_half else found

    def _at_path(self, results: Mapping[int, Any], made: Made) -> Any:
        if made.path.startswith(KEPT):
            return attrgetter(made.path.removeprefix(KEPT))(self.calls[made.call].called)
        result, given = results[made.call]
        found = made_in(result) if not made.path.startswith(GIVEN) else made_in_arguments(*given)
        return next(tensor for path, tensor in found if path == made.path)

    def run(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
        half: Half | None,
        clip_grad_norm: float | None = None,
    ) -> Run:
        """The step as a run of one step, under the autocast of its device; ``half`` is what that lowers to, and
        ``clip_grad_norm`` what the script clips its gradients to."""
        share = len(self.given)

        tail = Tail(self.lines)

        def losses(batch: Any, index: int) -> torch.Tensor:
            # A pass gives each part an equal share; the script's own shares are among the calls.
            loss = self.loss(batch, tail.in_fp32, tail.scale)
            return loss * share if share > 1 else loss

        policy: Literal["cuda", "native"] = "cuda" if device.type == "cuda" or is_emulating() else "native"
        precision = Precision(dtype=half or "float32", policy=policy)
        step = StepFunction("the script's step", losses)
        workload = Workload(model, tuple(optimizers), _Parts(self), step, UserCode(()))
        mode = mode_of(precision, device)
        return Run(config_of_script(precision, clip_grad_norm), workload, device, mode, time.monotonic(), tail=tail)

    @property
    def lines(self) -> dict[str, tuple[Line, frozenset[int]]]:
        """The lines of the script beside its model, with the numbers of their calls, by file name and number: what they
        compute between it and the losses, and the other modules that they call."""
        found: dict[Line, set[int]] = {}
        beside = [None, *(state.model for state in self.beside)]
        for number, call in self.calls.items() if self.reach == "whole" else ():
            if call.line is not None and any(call.module is one for one in beside):
                found.setdefault(call.line, set()).add(number)
        return {name_of_line(*line[:2]): (line, frozenset(numbers)) for line, numbers in found.items()}

    def before(self, steps: Sequence[Step], optimizer: int) -> tuple[Step, ...]:
        """Those of the steps of a loop that its optimizer has made; none where its loss is a sum of other numbers."""
        return tuple(step for step in steps if step.optimizer == optimizer) if self.reach == "whole" else ()

    def snapshot(self, number: int, random_state: RandomState, state: ModelState) -> Snapshot:
        """The step with what its calls are given as its batches, a part each, and the modules that they are of."""
        data = tuple(self.data_in([self._without_moves(part) for part in self.given]))
        called = {id(module): module for call in self.calls.values() if (module := call.module) is not None}
        return Snapshot(
            number, self.given, data, random_state, state, beside=tuple(called.values()), states_beside=self.beside
        )

    def data_in(self, parts: Iterable[CallArguments]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that come from outside of parts of it, each once with its name: by what takes them."""
        calls = [(self.calls[number], given[number]) for given in parts for number in given]
        calls.sort(key=lambda one: bool(one[0].reads))  # what takes the results of others has the targets of a loss
        named: dict[int, tuple[str, torch.Tensor]] = {}
        for call, (args, kwargs) in calls:
            for argument, value in ({**dict(enumerate(args, 1)), **kwargs}).items():
                for path, tensor in leaves_of(value):
                    named.setdefault(id(tensor), (f"argument {argument}{path} of {call.described}", tensor))
        yield from named.values()

    def _without_moves(self, part: CallArguments) -> CallArguments:
        """The part without what only casts and moves take that lead into no module: it may be the script's own."""
        of_modules = [self.calls[n].reads for n in part if self.calls[n].module is not None]
        moves = {n for n in part if getattr(self.calls[n].function, "__name__", "") in MOVES_OR_CASTS}
        aside = moves.difference(*of_modules)
        return {n: given for n, given in part.items() if n not in aside}


@dataclass
class _Parts:
    """The parts of one step, as the batches of a workload: there are no further ones."""

    step: RecordedStep
    position: int = 0

    def batches(self) -> Iterator[Any]:
        """The parts of the step."""
        return iter(self.step.given)

    def describe(self, batch: Any) -> str:
        """How many calls a part makes."""
        return f"the step makes {len(batch)} calls"


MOST_NESTED = 3
"""A distribution may have another as its base."""


def made_in(result: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in what a call gives, each with its path: those of containers, and what objects hold as attributes,
    such as distributions."""
    if isinstance(result, torch.Tensor):
        yield "", result
        return
    if type(result) in CONSTANTS:
        return
    for path, leaf in _pytree.tree_flatten_with_path(result)[0]:
        yield from _held_by(leaf, _pytree.keystr(path))


def made_in_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in those arguments of a call that it can put others into, such as a dict, each with its path."""
    named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    holders = {
        key: one for key, one in named.items() if not isinstance(one, torch.Tensor) and type(one) not in CONSTANTS
    }
    for path, tensor in made_in(holders) if holders else ():
        yield GIVEN + path, tensor


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
    call = FunctionType(code.replace(co_filename=file, co_firstlineno=number, co_name=function), SPACE)
    return (lambda *given: _at(line.caller)(call, given, {})) if isinstance(line, LibraryLine) else call

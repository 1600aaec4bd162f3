"""A step that can be replayed: the calls that led to its losses, with their arguments, from the same lines of code.

A :class:`~ampdbg.replay.recorder.Recorder` records the calls while a loop trains; a capture keeps them.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import time
import weakref
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
from ampdbg.errors import AmpdbgError
from ampdbg.ops import MOVES
from ampdbg.precision.emulation import is_emulating
from ampdbg.precision.modes import mode_of
from ampdbg.precision.widening import lifted
from ampdbg.probes.tensors import HALVES, float_values, times_written
from ampdbg.record.run import Reach
from ampdbg.replay.copies import Copying
from ampdbg.replay.random_state import RandomState
from ampdbg.replay.run import Run, Tail, name_of_line
from ampdbg.replay.snapshot import ModelState, Snapshot
from ampdbg.replay.state import CONSTANTS, MOST
from ampdbg.source.ownership import LibraryLine, Line
from ampdbg.workload.build import Workload
from ampdbg.workload.losses import StepFunction
from ampdbg.workload.user_code import UserCode

Half = Literal["float16", "bfloat16"]

MOVES_OR_CASTS = MOVES | {"type", "tensor", "as_tensor", "__getitem__"}
"""The names of torch functions that return a tensor's own values, in the same dtype or in another."""

CallArguments = Mapping[int, tuple[Any, Any]]
"""The positional and keyword arguments of each call of a step, by call number. ``Made``, ``Own`` and ``ScalePower``
replace results of earlier calls, the model's own tensors, and the loss scale."""


@dataclass(frozen=True)
class Made:
    """A placeholder for a tensor that an earlier call made. ``path`` is the path of the tensor in the result. With the
    prefix :data:`KEPT` it is a path in the called module, and with :data:`GIVEN` a path in the arguments."""

    call: int
    path: str


KEPT = "self."
"""The path prefix of a tensor that a module keeps as an attribute, such as ``self.aux_loss``. No result path has it."""

GIVEN = "given"
"""The path prefix of a tensor that a module writes into its arguments, such as ``batch["features"]``."""


@dataclass(frozen=True)
class Own:
    """A placeholder for a tensor of the model: a replay alters it and restores it."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class ScalePower:
    """A placeholder for a power of the loss scale: a replay has its own loss scale."""

    power: int


@dataclass(eq=False, slots=True)
class RecordedCall:
    """One call of a module, or of a function, which has a ``name``.

    Attributes:
        lowers: the autocast dtype by device type.
        steps: the number of optimizer steps before the call.
        given: the arguments, with ``Made`` instead of results of recorded calls.
        reads: the numbers of the calls whose results it takes.
        inputs: the remaining tensors, each with its version.
        past: results of recorded calls outside the autograd graph, each with its version.
        outside_values: detached values of small unrecorded graphs, each with the ``id`` of its leaves.
        results: its live results.
        why_not: the reason why the call cannot be replayed, or "".
        writes: True if it changes its first argument, which then counts as its result.
        training: the mode of the called module.
    """

    function: Callable[..., Any]
    name: str
    line: Line | None
    lowers: Mapping[str, torch.dtype]
    random_state: RandomState
    steps: int
    given: tuple[Any, Any] = ((), {})
    reads: set[int] = field(default_factory=set)
    inputs: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    past: dict[Made, tuple[torch.Tensor, int]] = field(default_factory=dict)
    outside_values: list[tuple[torch.Tensor, set[int]]] = field(default_factory=list)
    results: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    why_not: str = ""
    has_gradients: bool = True
    has_returned: bool = False
    writes: bool = False
    training: bool | None = None

    @property
    def module(self) -> torch.nn.Module | None:
        """The called module, or None for a function."""
        called = self.called
        return called if isinstance(called, torch.nn.Module) else None

    @property
    def called(self) -> Callable[..., Any]:
        """The called function or module, also if a ``PassEnd`` wraps it."""
        return self.function.module if isinstance(self.function, PassEnd) else self.function

    @property
    def described(self) -> str:
        """The name of the function or module and the line of the call, in words."""
        name = getattr(self.called, "__name__", type(self.called).__name__).strip("_")
        return f"{name} on line {self.line[1]} of {PurePath(self.line[0]).name}" if self.line is not None else name

    @property
    def live_results(self) -> list[torch.Tensor]:
        """The results that are still alive, perhaps only as recorded inputs of other calls."""
        return [held for result in self.results if (held := result()) is not None]

    @property
    def data(self) -> Iterator[torch.Tensor]:
        """The tensors that the record keeps alive for a replay, without the model's parameters."""
        tensors = (one for one, _ in (*self.inputs, *self.past.values()))
        return (one for one in tensors if not one.requires_grad)

    def replace_input(self, tensor: torch.Tensor, copied: torch.Tensor) -> None:
        """Use ``copied`` as the recorded argument instead of ``tensor``, which is about to be written."""
        self.inputs = [(copied, times_written(copied)) if one is tensor else (one, times) for one, times in self.inputs]
        self.given = Copying(lambda one: copied if one is tensor else one).of(self.given)

    def takes_data_of(self, call: int) -> bool:
        """True if every result taken from ``call`` is still alive, unchanged, and outside the autograd graph."""
        found: list[Made] = []
        Copying(lambda value: found.append(value) if isinstance(value, Made) else value).of(self.given)
        taken = [self.past.get(made) for made in found if made.call == call]
        return bool(taken) and all(past is not None and times_written(past[0]) == past[1] for past in taken)

    def again(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Repeat the call with new arguments, as if it were on the same line."""
        self.random_state.restore()
        module = self.module
        if module is not None and self.training is not None and module.training is not self.training:
            module.train(self.training)
        with torch.set_grad_enabled(self.has_gradients):
            result = _at(self.line)(self.function, args, kwargs)
        return args[0] if self.writes else result


@dataclass(frozen=True)
class PassEnd:
    """Calls a module at which the replay ends, and reduces all outputs to one number.

    A step of such calls fails if any output is not finite, and has no gradients. If any outputs require gradients, only
    these count: an output without a gradient may be a mask with infinities.
    """

    module: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the sum of the outputs, of shape (), as a leaf without a graph."""
        every = [tensor for _, tensor in made_in(self.module(*args, **kwargs))]
        made = [tensor for tensor in every if tensor.requires_grad] or every
        sums = [values.float().sum().cpu() for tensor in made if (values := float_values(tensor.detach())) is not None]
        return torch.stack([torch.zeros(()), *sums]).sum().requires_grad_()


class OwnFunction:
    """Calls code of the script under its name: an ``autograd.Function``, or what ``torch.compile`` made."""

    def __init__(self, named: Callable[..., Any], run: Callable[..., Any]) -> None:
        self._run = run
        functools.update_wrapper(self, named, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)


def weighted(output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the loss, of shape (), with a backward pass that equals ``output.backward(gradient)``.

    Inf and NaN in ``gradient`` are not data, because the script computed them from a forward pass that had failed. With
    0 instead, the loss keeps the inf and NaN of the output itself and gains none.
    """
    return (output * torch.nan_to_num(gradient, 0.0, 0.0, 0.0)).sum()


def scaled_gradients(scale: float, outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Return ``torch.autograd.grad`` of outputs multiplied by the loss scale in float32, as a scaler does."""
    each = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    with _disable_current_modes():  # these ops do not belong to the step
        scaled = [output * torch.tensor(scale, device=output.device) for output in each]
    return torch.autograd.grad(scaled, *args, **kwargs)


def torch_name(function: Callable[..., Any]) -> str:
    """Return torch's name of a torch function, such as ``torch.Tensor.add``, or "" for a foreign function."""
    with contextlib.suppress(Exception):  # the argument may be any callable
        return str(torch.overrides.resolve_name(function) or "")
    return ""


class NotReplayableError(AmpdbgError):
    """A step cannot be replayed, or its replay shows nothing; the message is the reason."""


@dataclass(frozen=True)
class RecordedStep:
    """The calls of a step by number, in order. ``given`` has one entry for each part. ``losses`` has the losses of each
    part by the number of its first call. ``state`` is the model's before the step. ``beside`` is that of called modules
    outside the model, such as a loss with a running mean. ``own_scale`` is the loss scale that the script put into the
    losses outside of the calls."""

    calls: Mapping[int, RecordedCall]
    losses: Mapping[int, tuple[Made, ...]]
    given: tuple[CallArguments, ...] = field(repr=False)
    state: ModelState = field(repr=False)
    beside: tuple[ModelState, ...] = field(default=(), repr=False)
    reach: Reach = "whole"
    own_scale: float = 1.0

    @functools.cached_property
    def arguments(self) -> CallArguments:
        """The arguments of all calls."""
        return {number: given for part in self.given for number, given in part.items()}

    @property
    def scales_gradients(self) -> bool:
        """True if the losses are computed from gradients at the loss scale."""
        return any(call.function is scaled_gradients for call in self.calls.values())

    def loss(self, given: CallArguments, in_fp32: Collection[int] = (), scale: float = 1.0) -> torch.Tensor:
        """Return the sum of the losses of one part, of shape (). The calls ``in_fp32`` run in FP32 without autocast.

        Under autocast, exactly the calls that ran under autocast in the step do so again.
        """
        results, device_type = dict[int, Any](), self.device.type
        torch.clear_autocast_cache()  # it may hold casts of the weights of another replay
        for number, (args, kwargs) in given.items():
            call = self.calls[number]
            is_pinned = number in in_fp32
            found = Copying(lambda value: self._found(value, results, scale, is_pinned=is_pinned))  # noqa: B023 - used at once
            is_lowered = device_type in call.lowers and not is_pinned
            with (
                contextlib.nullcontext() if is_lowered else torch.autocast(device_type, enabled=False),
                lifted("float32") if is_pinned else contextlib.nullcontext(),  # for code that casts to half itself
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

    @property
    def model(self) -> torch.nn.Module:
        """The model that the step trains."""
        return self.state.model

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))

    def run(
        self, optimizers: Sequence[torch.optim.Optimizer], half: Half | None, clip_grad_norm: float | None = None
    ) -> Run:
        """Return a run of this step under autocast to ``half``, with gradients clipped to ``clip_grad_norm``."""
        share, device = len(self.given), self.device
        tail = Tail(self.lines)

        def losses(batch: Any, index: int) -> torch.Tensor:
            # A pass gives each part an equal share; the calls include the script's own shares.
            loss = self.loss(batch, tail.in_fp32, tail.scale)
            return loss * share if share > 1 else loss

        policy: Literal["cuda", "native"] = "cuda" if device.type == "cuda" or is_emulating() else "native"
        precision = Precision(dtype=half or "float32", policy=policy)
        step = StepFunction("the script's step", losses)
        workload = Workload(self.model, tuple(optimizers), _Parts(self), step, UserCode(()))
        mode = mode_of(precision, device)
        return Run(config_of_script(precision, clip_grad_norm), workload, device, mode, time.monotonic(), tail=tail)

    @property
    def lines(self) -> dict[str, tuple[Line, frozenset[int]]]:
        """The script lines that call modules outside the model, or compute between the model and the losses. They are
        keyed by file name and line number, and each has the numbers of its calls."""
        found: dict[Line, set[int]] = {}
        beside = [None, *(state.model for state in self.beside)]
        for number, call in self.calls.items() if self.reach == "whole" else ():
            if call.line is not None and any(call.module is one for one in beside):
                found.setdefault(call.line, set()).add(number)
        return {name_of_line(*line[:2]): (line, frozenset(numbers)) for line, numbers in found.items()}

    def snapshot(self, number: int, random_state: RandomState) -> Snapshot:
        """Return a snapshot of the step. Its batches are the arguments of the parts."""
        data = tuple(self.data_in([self._without_moves(part) for part in self.given]))
        called = {id(module): module for call in self.calls.values() if (module := call.module) is not None}
        return Snapshot(
            number, self.given, data, random_state, self.state, beside=tuple(called.values()), states_beside=self.beside
        )

    def data_in(self, parts: Iterable[CallArguments]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor from outside these parts once, named after the first call that takes it."""
        calls = [(self.calls[number], given[number]) for given in parts for number in given]
        calls.sort(key=lambda one: bool(one[0].reads))  # last the calls that take a loss's targets
        named: dict[int, tuple[str, torch.Tensor]] = {}
        for call, (args, kwargs) in calls:
            for argument, value in ({**dict(enumerate(args, 1)), **kwargs}).items():
                for path, tensor in made_in(value):
                    named.setdefault(id(tensor), (f"argument {argument}{path} of {call.described}", tensor))
        yield from named.values()

    def _without_moves(self, part: CallArguments) -> CallArguments:
        """Return the part without casts and moves that no module reads: their inputs may be the script's own."""
        of_modules = [self.calls[n].reads for n in part if self.calls[n].module is not None]
        moves = {n for n in part if getattr(self.calls[n].function, "__name__", "") in MOVES_OR_CASTS}
        aside = moves.difference(*of_modules)
        return {n: given for n, given in part.items() if n not in aside}


@dataclass
class _Parts:
    """The parts of one step as the only batches of a workload."""

    step: RecordedStep
    position: int = 0

    def batches(self) -> Iterator[Any]:
        return iter(self.step.given)

    def describe(self, batch: Any) -> str:
        """Return the number of calls in a part, as text."""
        return f"the step makes {len(batch)} calls"


MOST_NESTED = 3
"""The most levels of nested objects that are searched: a distribution may have another as its base."""


def made_in(result: Any, at: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a result, in its containers and in objects such as distributions, with their paths."""
    if isinstance(result, torch.Tensor):
        yield at, result
        return
    if type(result) in CONSTANTS:
        return
    for path, leaf in _pytree.tree_flatten_with_path(result)[0]:
        below = at + _pytree.keystr(path)
        if isinstance(leaf, torch.Tensor):
            yield below, leaf
        elif depth < MOST_NESTED and not isinstance(leaf, (torch.nn.Module, type, FunctionType, ModuleType)):
            for name, attribute in list(getattr(leaf, "__dict__", {}).items()):
                if not isinstance(attribute, (list, tuple, dict)) or len(attribute) <= MOST:
                    yield from made_in(attribute, f"{below}.{name}", depth + 1)


def made_in_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in arguments that a call can add tensors to, such as a dict, each with its path."""
    named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    holders = {
        key: one for key, one in named.items() if not isinstance(one, torch.Tensor) and type(one) not in CONSTANTS
    }
    for path, tensor in made_in(holders) if holders else ():
        yield GIVEN + path, tensor


def _call(function: Any, args: Any, kwargs: Any) -> Any: return function(*args, **kwargs)  # fmt: skip


SPACE = {"__builtins__": builtins}
"""The global names of the frame of a call: an import by C++ code looks up the builtins there."""


def _at(line: Line | None) -> Callable[..., Any]:
    """Return ``_call`` as if it were defined on this line, so that its calls are attributed to that line."""
    if line is None:
        return _call
    file, number, function = line
    code: CodeType = _call.__code__
    call = FunctionType(code.replace(co_filename=file, co_firstlineno=number, co_name=function), SPACE)
    return (lambda *given: _at(line.caller)(call, given, {})) if isinstance(line, LibraryLine) else call

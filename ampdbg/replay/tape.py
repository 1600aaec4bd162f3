"""A tape of the calls that lead to a loss, so that a step can be run again without knowing the loop that it stands in.

While a tape is entered it notes each outermost call of a model's module, and each call of a module or a function of
torch that takes what such a call has made, up to the loss that goes to the loss scaler: with copies of what else they
are given, the random state and autocast. To play it is to make the loss anew, by the very same code.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch._C import _len_torch_function_stack
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from ampdbg.probes.guard import Guard
from ampdbg.probes.seams import Seam, attached, only_follows, replaced
from ampdbg.probes.source_lines import innermost_line
from ampdbg.probes.step_hooks import hooked_steps
from ampdbg.probes.tensors import float_values, leaves_of, times_written
from ampdbg.replay.copies import Copying, duplicate
from ampdbg.replay.narrowings import NARROWS_OR_MOVES, Narrowings
from ampdbg.replay.played_step import Made, Modes, Own, PlayedStep, TapedCall
from ampdbg.replay.random_state import RandomState
from ampdbg.replay.snapshot import ModelState
from ampdbg.replay.state import tensors_in
from ampdbg.replay.taped_calls import TapedCalls
from ampdbg.replay.taped_functions import is_no_part, is_transformed
from ampdbg.source.ownership import Line

MOST_CALLS = 10_000
"""A step of more calls is no step but an epoch."""

NOT_ALL_SEEN = "what makes its loss was not all seen"
"""Why a step cannot be run again where something has come before the tape, or has passed it by."""

OF_SCALED = "its loss takes gradients of what the scaler has scaled"
"""The scale is in them, and what the script divides them by is a number to it: another one cannot be tried."""


class Tape(TorchFunctionMode):
    """Notes the calls of one thread while it is entered.

    Args:
        model: calls of its modules begin the tape.
        device: the kind of device whose autocast counts.
        given_up: called where torch is about to follow code and make a graph of it: the tape is to be left by then, for
            torch would follow that too.
        about_to_call: called with the line of each call before that is made.
        also: functions by torch's names, whose calls on what the loop has itself are part of the tape where its losses
            need them, whatever the format.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: str,
        given_up: Callable[[], None] = lambda: None,
        about_to_call: Callable[[Line | None], None] = lambda line: None,
        also: Collection[str] = (),
    ) -> None:
        super().__init__()
        self._given_up = given_up
        self._about_to_call = about_to_call
        self.losses: list[Made] = []
        self.loss = 0.0
        """The sum of the losses."""
        self.why_not = ""
        """Why the step cannot be run again."""
        self.state = ModelState()
        """The model's before the first call of the step under way; of one that is to be run again, before its first."""
        self._states: list[tuple[int, ModelState]] = []
        self._begins = True
        self._model = model
        self._others: dict[int, tuple[torch.nn.Module, ModelState]] = {}
        self._modes: Modes = ()
        self._trained: dict[int, bool] = {}
        self._device = device
        self._weights = tensors_in(model)  # alive, as one that the model makes anew would leave its id to another
        self._own = {id(tensor) for tensor in self._weights}
        self._modules = {id(module) for module in model.modules()}
        self._thread = threading.get_ident()
        self._calls = TapedCalls()
        self._copies: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self._are_stepped_on = self._has_stepped = False
        self._scaled: set[int] = set()
        self._narrowings = Narrowings(device, also)
        self._alive: list[Any] = []  # or else an id is given to another tensor
        self._inside = 0
        self._beside = 0
        self._guard = Guard()
        self._leaving = ExitStack()

    def __enter__(self) -> Tape:
        """Begins to note."""
        _push_mode(self)
        self._leaving.callback(_taken_out, self)
        self._leaving.enter_context(replaced(torch.nn.Module, "__call__", self._noting_calls))
        return self

    def __exit__(self, *raised: Any) -> None:
        """Notes no more."""
        self._leaving.close()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function of torch's, and notes it where it takes what the tape has made."""
        kwargs = kwargs or {}
        if self._inside or is_transformed() or only_follows() or is_no_part(function):
            return function(*args, **kwargs)
        if self._is_ours(args, kwargs):
            return self._taped(function, args, kwargs)
        result = function(*args, **kwargs)
        is_of_loop = not self._beside or getattr(function, "__name__", "") in NARROWS_OR_MOVES
        if is_of_loop and not self._guard.failure:
            self._guard.hooked(self._narrowings.add, result, function, args, kwargs)
        return result

    def _noting_calls(self, original: Callable[..., Any]) -> Callable[..., Any]:
        is_compiled, entered = torch.compiler.is_dynamo_compiling, [self]
        self._leaving.callback(entered.clear)

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            # The first is all that torch.compile sees. A model that is compiled meanwhile keeps this function for good.
            if is_compiled() or not entered:
                return original(module, *args, **kwargs)
            return entered[0]._called(original, module, args, kwargs)

        return call

    def _called(self, original: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        is_outer = not self._inside and self.is_of_this_thread
        if is_outer and only_follows():
            self._given_up()
            is_outer = False
        is_outer = is_outer and torch.is_grad_enabled() and not is_transformed()
        if is_outer and (id(module) in self._modules or self._is_ours(args, kwargs)):
            return self._taped(module, args, kwargs)
        is_beside = not self._inside and self.is_of_this_thread
        self._beside += is_beside
        try:
            return original(module, *args, **kwargs)
        finally:
            self._beside -= is_beside

    def around(self, seam: Seam, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a function of torch's; what a scaler scales is a loss, and what else goes backward."""
        if seam == "export" and self.is_of_this_thread:
            self._given_up()
        if seam not in ("scale", "engine") or not self.is_of_this_thread:
            return original(*args, **kwargs)
        is_scaled = seam == "scale" and args[0].is_enabled()
        if is_scaled or (seam == "engine" and kwargs.get("accumulate_grad", True) and not self._inside):
            self._add_losses(args[1] if is_scaled else args[0])
        elif seam == "engine" and not kwargs.get("accumulate_grad", True):
            self._note_gradients(*args)
        self._inside += 1
        try:
            result = original(*args, **kwargs)
        finally:
            self._inside -= 1
        if is_scaled:
            self._alive.append([tensor for _, tensor in leaves_of(result)])
            self._scaled.update(map(id, self._alive[-1]))
        return result

    def _note_gradients(
        self, outputs: Any, gradients: Any, keeps_graph: bool, creates_graph: bool, *others: Any
    ) -> None:
        """Notes ``torch.autograd.grad``, where a loss may be made of what it gives."""
        if creates_graph and any(id(output) in self._scaled for output in outputs):
            self.why_not = OF_SCALED  # whatever was said of what was scaled: it is no loss

    @property
    def is_of_this_thread(self) -> bool:
        """Whether it notes the calls of the thread that asks."""
        return threading.get_ident() == self._thread

    def stepped_on(self) -> None:
        """To be called when an optimizer steps on the losses so far: the next loss is the first of another step."""
        self._are_stepped_on = self._has_stepped = True

    def _add_losses(self, outputs: Any) -> None:
        if self._are_stepped_on:
            self.losses.clear()
            self.loss, self.why_not, self._are_stepped_on = 0.0, "", False
        for _, loss in leaves_of(outputs):
            if id(loss) in self._scaled:
                continue
            self.loss += float(loss.detach().sum())
            made = self.placeholder(loss)
            if not isinstance(made, Made):
                self.why_not = self.why_not or NOT_ALL_SEEN
            elif loss.numel() != 1:
                self.why_not = self.why_not or "its loss is no scalar"
            else:
                self.losses.append(made)

    def _is_ours(self, args: Any, kwargs: Any) -> bool:
        """Whether a call takes what the tape has made, or weights to compute with."""
        given = [tensor for _, tensor in leaves_of((args, kwargs))]
        computes = torch.is_grad_enabled()
        return any(
            self._calls.have_made(each) or (computes and each.requires_grad and id(each) in self._own) for each in given
        )

    def _taped(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if len(self._calls.every) >= MOST_CALLS:
            self.why_not = f"it makes more than {MOST_CALLS:,} calls"
        elif self._guard.failure:
            self.why_not = f"ampdbg itself failed to note its calls: {self._guard.failure}"
        else:
            return self._guard.around(Tape._noted, self, self.alone, function, *args, **kwargs)
        return self.alone(function, *args, **kwargs)

    def alone(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs a function; what it calls in its turn is not noted."""
        self._inside += 1
        try:
            return function(*args, **kwargs)
        finally:
            self._inside -= 1

    def _noted(self, run: Callable[..., Any], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        given, random_state = _Taking(self), RandomState.now()
        if self._begins or not self._calls.every:
            self._note_state()
        if isinstance(function, torch.nn.Module) and (self._modes or self._has_other_modes(function)):
            self._note_modes()
        if isinstance(function, torch.nn.Module) and self._is_another(function):
            self._others[id(function)] = function, ModelState.now(function)
        taken = given.copying.of((args, kwargs))
        lowers = torch.is_autocast_enabled(self._device)
        line, has_gradients = innermost_line(), torch.is_grad_enabled()
        self._about_to_call(line)
        result = run(function, *args, **kwargs)
        name, is_first = getattr(function, "__name__", ""), bool(args) and result is args[0]
        hands_on = is_first and name in NARROWS_OR_MOVES  # in another format it gives another tensor
        writes = name in ("__setitem__", "__set__") or (is_first and not hands_on)
        weights = [(weight, weight._version) for weight in (*given.own, *_weights_of(function))]
        call = TapedCall(
            function,
            line,
            lowers,
            has_gradients,
            random_state,
            frozenset(given.reads),
            writes,
            given.is_whole,
            weights,
            self._modes,
            hands_on,
        )
        self._calls.add(call, taken, args[0] if writes else result)
        return result

    def step_begins(self) -> None:
        """To be called when another step begins while this is entered: what it computes with is as the last left it."""
        self._begins = True

    def _note_state(self) -> None:
        """Notes the model's, in the modes of the first of all calls: those of the others are told by these."""
        modules, self._begins = list(self._model.modules()), False
        self._trained = self._trained or {id(module): module.training for module in modules}
        modes = [(module, self._trained.get(id(module), module.training)) for module in modules]
        self.state = ModelState.now(self._model).in_modes(modes)
        self._states.append((len(self._calls.every), self.state))

    def _is_another(self, called: torch.nn.Module) -> bool:
        """Whether a module has no part in the model, and is called for the first time."""
        return id(called) not in self._others and self._modules.isdisjoint(map(id, called.modules()))

    @property
    def has_nan_beside(self) -> bool:
        """Whether a module that it calls beside the model held NaN before: an earlier step has spoilt it."""
        buffers = (buffer for _, state in self._others.values() for buffer in state.buffers.values())
        return any(bool(values.isnan().any()) for values in map(float_values, buffers) if values is not None)

    def _note_modes(self) -> None:
        """One list for all calls between two changes: there may be thousands of calls, of thousands of modules."""
        modes = [(module, module.training) for module in self._model.modules()]
        if len(modes) != len(self._modes) or any(
            now[0] is not then[0] or now[1] != then[1] for now, then in zip(modes, self._modes, strict=True)
        ):
            self._modes = modes

    def _has_other_modes(self, called: torch.nn.Module) -> bool:
        """Whether a module is in training mode that was not at the first call, or the other way round."""
        return any(self._trained.get(id(module), module.training) != module.training for module in called.modules())

    def narrowed(self, tensor: torch.Tensor) -> Made | None:
        """What stands for a half tensor that the loop has made of a wider one: the call, which is on the tape now."""
        known = self._narrowings.of(tensor)
        if known is None:
            return None
        given = _Taking(self)
        taken = given.copying.of((known.args, known.kwargs))
        reads, state = frozenset(given.reads), RandomState.now()
        call = TapedCall(
            known.function, known.line, known.lowers, known.has_gradients, state, reads, is_whole=given.is_whole
        )
        self._calls.add(call, taken, tensor)
        return self._calls.maker_of(tensor)

    def placeholder(self, tensor: torch.Tensor) -> Made | Own | None:
        """What stands for a tensor on the tape; None where it is neither made there nor the model's own."""
        if id(tensor) in self._own:
            return Own(tensor)
        return self._calls.maker_of(tensor)

    def is_past(self, tensor: torch.Tensor, made: Made) -> bool:
        """Whether a tensor of the tape that no gradient leads to is data by now: an optimizer has stepped since on the
        weights that it was made with, as where a GAN's discriminator steps after the generator that gave its input."""
        return self._has_stepped and not tensor.requires_grad and not self._calls.have_their_weights(made)

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor as it is now; the same one as long as nothing writes into it."""
        known = self._copies.get(id(tensor))
        if known is None or known[1] != times_written(tensor):
            copy = duplicate(tensor.detach()).requires_grad_(tensor.requires_grad)
            known = self._copies[id(tensor)] = tensor, times_written(tensor), copy
        return known[2]

    def played(self) -> PlayedStep | None:
        """The step to be run again; None where it cannot be, and ``why_not`` says why."""
        if not self.losses:
            self.why_not = self.why_not or "no loss went backward in it"
            return None
        parts = self._calls.parts_of(self.losses)
        needed = [self._calls.every[number] for part, _ in parts for number in part]
        if not all(call.is_whole for call in needed):
            self.why_not = self.why_not or NOT_ALL_SEEN
        elif not all(call.has_its_weights for call in needed):
            self.why_not = self.why_not or "its weights are others by now"
        if self.why_not:
            return None
        ends = {min(part): losses for part, losses in parts}
        first = min(ends)
        known = [state for number, state in self._states if number <= first]
        self.state = known[-1].in_modes(self._calls.every[first].modes)
        given = tuple(self._calls.given_to(part) for part, _ in parts)
        return PlayedStep(self._calls.every, ends, self._device, given, tuple(self._others.values()))


@contextlib.contextmanager
def taping(tape: Tape, about_to_step: Callable[[Optimizer, GradScaler | None], None]) -> Iterator[None]:
    """Notes what a loop does on a tape, and calls ``about_to_step`` while the weights are still those of the step.

    It is called right before each step of an optimizer, or before the ``step`` of an enabled scaler that is to call
    it, with that: by then the scaler may have found that it withholds the step.
    """
    scaling: set[int] = set()
    """The threads that are inside of the step of an enabled scaler."""

    def around(seam: Seam, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        if seam != "step" or thread in scaling or not args[0].is_enabled():
            return tape.around(seam, original, *args, **kwargs)
        about_to_step(args[1] if len(args) > 1 else kwargs["optimizer"], args[0])
        scaling.add(thread)
        try:
            return tape.around(seam, original, *args, **kwargs)
        finally:
            scaling.discard(thread)

    def hooked(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() not in scaling:
            about_to_step(optimizer, None)

    with ExitStack() as stack:
        stack.enter_context(hooked_steps(hooked))
        stack.enter_context(tape)
        stack.enter_context(attached(around))
        yield


class _Taking:
    """Takes what one call is given onto the tape."""

    def __init__(self, tape: Tape) -> None:
        self.reads: set[int] = set()
        self.own: list[torch.Tensor] = []
        self.is_whole = True
        self.copying = Copying(self._taken)
        self._tape = tape

    def _taken(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        known = self._tape.placeholder(value)
        if isinstance(known, Made) and self._tape.is_past(value, known):
            return self._tape.copy_of(value)
        if isinstance(known, Made):
            self.reads.add(known.call)
        elif isinstance(known, Own):
            self.own.append(value)
        elif (made := self._tape.narrowed(value)) is not None:
            self.reads.add(made.call)
            return made
        else:
            self.is_whole &= value.is_leaf
            return self._tape.copy_of(value)
        return known


def _weights_of(function: Callable[..., Any]) -> Iterable[torch.Tensor]:
    return function.parameters() if isinstance(function, torch.nn.Module) else ()


def _taken_out(mode: TorchFunctionMode) -> None:
    """Takes the mode out, also from below one that somebody has entered since."""
    above: list[TorchFunctionMode] = []
    while _len_torch_function_stack() and (top := _pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        _push_mode(other)

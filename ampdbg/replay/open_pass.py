"""The forward pass that a loop has under way: its outermost calls of modules, until their loss goes backward.

A script may end in the middle of a step: it finds a loss that is NaN and exits, or an assert of its own fails on what
its model gives. No optimizer steps then, and no tape runs. These notes do, from the first step to the last, so they
cost next to nothing: what a call is given is noted by reference, and what it gives is not held at all. The gradients
that come to that are held by reference until the next pass begins, where they are small.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch._C import get_autocast_dtype, is_autocast_enabled  # as they are, where an emulated GPU has other names
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

from ampdbg.probes.guard import Guard
from ampdbg.probes.models import WRAPPERS
from ampdbg.probes.seams import only_follows, replaced
from ampdbg.probes.source_lines import innermost_line
from ampdbg.probes.tensors import Mark, leaves_of, nonfinite, read_aside, times_written
from ampdbg.probes.unfollowed import leave_ours_alone
from ampdbg.replay.noted_call import NotedCall
from ampdbg.replay.pass_buffers import PassBuffers
from ampdbg.replay.pass_end import GivenGradients, PassEnd, rest
from ampdbg.replay.played_step import Made, PlayedStep, TapedCall, made_in
from ampdbg.replay.random_state import RandomState, RandomStates
from ampdbg.replay.state import tensors_in

MOST_CALLS = 1000
"""A pass of more calls is no pass but an epoch."""

PRUNED_FROM = 16
"""So many calls are kept before those are looked for whose results nobody has any more; fewer, where a module is called
again, as in an evaluation: the batches of many steps are not to be held."""

DEVICES = ("cpu", "cuda")
"""The kinds of device whose autocast is noted."""


class WatchedLoop(Protocol):
    """What tells of the loop whose passes are noted."""

    backward_passes: int
    """How many have gone backward so far."""

    @property
    def is_paused(self) -> bool:
        """Whether nothing is to be noted now."""


class OpenPass:
    """Notes the outermost calls of modules of one thread while it is entered.

    Args:
        watched: the loop.
        next_begins: called when another pass begins, while the last is still noted.
    """

    def __init__(self, watched: WatchedLoop, next_begins: Callable[[], None] = lambda: None) -> None:
        self._watched = watched
        self._next_begins = next_begins
        self._passes = 0
        self._calls: dict[int, NotedCall] = {}
        self._number = 0
        self._prune_at = PRUNED_FROM
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], Made]] = {}
        self._models: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()
        self._helpers: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()
        self._helpers_at = 0
        self._thread = threading.get_ident()
        self._is_inside = False
        self._is_left = False
        self._begun, self._trains = False, False
        self._random_states = RandomStates()
        self.buffers = PassBuffers()
        """Those of the modules that it calls, as they were before."""
        self._scalars: deque[tuple[weakref.ref[torch.Tensor], Mark]] = deque(maxlen=PRUNED_FROM)
        self._guard = Guard()
        self._leaving = ExitStack()

    def __enter__(self) -> OpenPass:
        """Begins to note."""
        leave_ours_alone()
        self._leaving.enter_context(replaced(torch.nn.Module, "__call__", self._noting_calls))
        return self

    def __exit__(self, *raised: Any) -> None:
        """Notes no more; what was noted stays."""
        self._is_left = True
        self._leaving.close()

    def _noting_calls(self, original: Callable[..., Any]) -> Callable[..., Any]:
        is_compiled = torch.compiler.is_dynamo_compiling
        guarded = self._guard.hooked

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            # The first is all that torch.compile sees, where it follows a model. Most calls are within another. Whoever
            # has taken this function meanwhile, as torch's compiler does when it is imported, keeps it for good.
            if is_compiled() or self._is_inside or self._is_left or only_follows():
                return original(module, *args, **kwargs)
            if not self._notes_this_one():
                guarded(self._helps, module)
                return original(module, *args, **kwargs)
            if _hands_on(module):
                return original(module, *args, **kwargs)
            self._is_inside = True
            try:
                guarded(self._begins, module, args, kwargs)
                result = original(module, *args, **kwargs)
                guarded(self._returns, result)
                return result
            finally:
                self._is_inside = False

        return call

    def _notes_this_one(self) -> bool:
        is_of_pass = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        if not is_of_pass or threading.get_ident() != self._thread:
            return False
        return not self._guard.failure and not self._watched.is_paused

    @property
    def is_under_way(self) -> bool:
        """Whether calls were made that no backward pass has followed."""
        return bool(self._calls) and self._passes == self._watched.backward_passes

    @property
    def has_gone_backward(self) -> bool:
        """Whether one backward pass has followed its calls, and no more."""
        return bool(self._calls) and self._passes + 1 == self._watched.backward_passes

    @property
    def trained(self) -> tuple[torch.nn.Module, ...]:
        """The modules with weights of their own that were called to train, in order."""
        called = (call.module for call in self._calls.values() if call.module.training)
        return tuple(module for module in called if self._has_weights(module))

    @property
    def called(self) -> tuple[torch.nn.Module, ...]:
        """The modules that were called, in order, those within others left out."""
        return tuple(call.module for call in self._calls.values())

    @property
    def lost_loss(self) -> torch.Tensor | None:
        """What was given for a loss since a module was called to train, where somebody holds it still and it is not
        finite; else None.

        On a GPU only those are looked at that nobody has to wait for any more: the loop cannot have gone by others.
        """
        held = [(result(), mark) for result, mark in self._scalars]
        losses = [scalar for scalar, mark in held if scalar is not None and mark.is_passed]
        values = read_aside([loss.detach() for loss in losses])
        return next((loss for loss, value in zip(losses, values, strict=True) if not math.isfinite(value)), None)

    @property
    def has_helpers(self) -> bool:
        """Whether other modules were called without gradients since the last backward pass, or have frozen weights
        alone: a teacher, or what encodes the data. What the calls are given may then be what these have computed."""
        if any(call.is_of_frozen for call in self._calls.values()):
            return True
        called = {id(module) for call in self.called for module in call.modules()}
        return self._helpers_at == self._passes and any(key not in called for key in self._helpers)

    def forget(self) -> None:
        """Lets go of what was noted."""
        self._calls.clear()
        self._made.clear()
        self._scalars.clear()
        self.buffers.forget()
        self._number = 0

    def lowers_to(self, device: str) -> torch.dtype | None:
        """What autocast of a kind of device lowers to in the last call where it is on; None where it is in none."""
        return next((call.lowers[device] for call in reversed(self._calls.values()) if device in call.lowers), None)

    def played(
        self, model: torch.nn.Module, device: str, most: int | None = None, *, scale: float | None = None
    ) -> PlayedStep | None:
        """The pass to be run again: all calls that lead to what no other call takes; None where none can be.

        Its loss is what the last calls give where that is a scalar to be differentiated. Else it is the sum of all
        that they give, which is not finite where any of it is, and leads nowhere.

        Args:
            model: whose weights count; what computes with none of them, nor with what they led to, is left out.
            device: the kind whose autocast counts.
            most: of so many calls at most, the first of all.
            scale: that of the step's loss, whose gradients are to lead back from all that the calls gave; where they
                are not known there is no pass.
        """
        own = {id(tensor) for tensor in tensors_in(model)}
        wanted = self._of_last_pass(dict(self._of_model(own)))
        wanted = dict(itertools.islice(wanted.items(), most))
        ends = [number for number in wanted if not any(number in other.reads for other in wanted.values())]
        given: dict[int, tuple[Any, Any]] = {}
        calls: dict[int, TapedCall] = {}
        for number, noted in wanted.items():
            again = noted.given_again(own)
            if again is None:
                return None
            given[number] = again
            is_lowered, reads = device in noted.lowers, frozenset(noted.reads)
            is_end = number in ends and scale is None
            function: Callable[..., Any] = PassEnd(noted.module, noted.scalars) if is_end else noted.module
            calls[number] = TapedCall(function, noted.line, is_lowered, True, noted.random_state, reads)
        last = self._last_of(wanted, ends, scale)
        if not ends or last is None:
            return None
        beside = {
            id(noted.module): noted.module
            for noted in wanted.values()
            if own.isdisjoint(map(id, tensors_in(noted.module)))
        }
        states = [(module, self.buffers.state(module)) for module in beside.values()]
        known = tuple((module, state) for module, state in states if state is not None)
        if len(known) < len(states):
            return None
        function, taken = last
        if taken:
            ends = [self._number] if scale is not None else [*ends, self._number]
            given[self._number] = tuple(taken), {}
            reads = frozenset(made.call for made in taken)
            calls[self._number] = replace(calls[max(wanted)], function=function, line=None, reads=reads)
        every = [calls.get(number, _NOTHING) for number in range(self._number + bool(taken))]
        losses = {min(wanted): tuple(Made(number, "") for number in ends)}
        return PlayedStep(every, losses, device, (given,), known)

    def _of_last_pass(self, calls: Mapping[int, NotedCall]) -> dict[int, NotedCall]:
        """Those since the last backward pass that was seen, with the earlier ones of which they take something."""
        needed: set[int] = set()
        for number, call in reversed(list(calls.items())):
            if call.backward == self._passes or number in needed:
                needed |= {number, *call.reads}
        return {number: call for number, call in calls.items() if number in needed}

    def _last_of(
        self, wanted: Mapping[int, NotedCall], ends: Collection[int], scale: float | None
    ) -> tuple[Callable[..., Any], Sequence[Made]] | None:
        """What is called behind the last calls, and what it takes, which may be nothing; None where a gradient that it
        needs is not held."""
        if scale is None:
            is_whole = all(wanted[number].scalars for number in ends)
            return PassEnd(rest, 0), [] if is_whole else self._unread(wanted, ends)
        found = {Made(number, path): one for number, call in wanted.items() for path, one in call.gradients.items()}
        known = [gradient for gradient in found.values() if gradient is not None]
        if not known or len(known) < len(found):
            return None
        finite = (None if nonfinite([("", gradient)]) else gradient for gradient in known)
        return GivenGradients(tuple(finite), scale), list(found)

    def _unread(self, wanted: Mapping[int, NotedCall], ends: Collection[int]) -> list[Made]:
        """What calls give that others take from, and none takes: the script may make a part of its loss of it."""
        taken = {made for call in wanted.values() for made in call.takes}
        inner = ((number, call) for number, call in wanted.items() if number not in ends)
        given = (Made(number, path) for number, call in inner for path in call.paths if "." not in path)
        return [made for made in given if made not in taken]  # an object's own parts are no such thing

    def _of_model(self, own: set[int]) -> Iterator[tuple[int, NotedCall]]:
        """The calls that can be made again, and compute with the weights or with what others made of them."""
        found: set[int] = set()
        last = max(self._calls, default=0)
        for number, call in self._calls.items():
            is_got_over = not call.has_returned and number != last
            has_weights = any(id(weight) in own for weight in call.module.parameters())
            is_as_it_was = call.is_whole and all(times_written(value) == times for value, times in call.inputs)
            if is_as_it_was and not is_got_over and call.reads <= found and (has_weights or call.reads):
                found.add(number)
                yield number, call

    def _begins(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._begun = False
        backward = self._watched.backward_passes
        has_gone = self._passes != backward
        is_again = len(self._calls) < PRUNED_FROM and any(call.module is module for call in self._calls.values())
        is_again = is_again and not self._takes_its_own(args, kwargs)  # such as a loss of each of two heads
        if has_gone or is_again:
            self._next_begins()
        if has_gone:
            self._passes, is_again = backward, False
            self._forget_what_is_over(args, kwargs)
        if is_again or len(self._calls) >= self._prune_at:
            self._prune()
        if len(self._calls) >= MOST_CALLS:
            return
        noted = self._taken(module, args, kwargs)
        has_weights = self._has_weights(module)
        if not noted.reads and not has_weights:  # such as a transform of data
            return
        self._trains = module.training if has_weights else self._trains
        # A call that takes what another made follows it: seldom is a random number drawn in between.
        before = self._calls[max(noted.reads)].random_state if noted.reads else self._random_states.before_a_call()
        noted.random_state = before
        self.buffers.note(self._number, module)
        self._begun, self._calls[self._number] = True, noted
        self._number += 1

    def _takes_its_own(self, args: Any, kwargs: Any) -> bool:
        """Whether a call is given what others of the pass have made."""
        return any(self._made_by(leaf) is not None for _, leaf in leaves_of((args, kwargs)))

    def _forget_what_is_over(self, args: Any, kwargs: Any) -> None:
        """Lets go of the calls of a pass that has gone backward, where the next one does not begin with what they made:
        a GAN's discriminator steps on what its generator gave, and is called on that once more for the generator's own
        loss."""
        goes_on = self._takes_its_own(args, kwargs)
        if goes_on:
            self._prune()
        if not goes_on or len(self._calls) >= PRUNED_FROM:
            self.forget()

    def _made_by(self, value: torch.Tensor) -> Made | None:
        """What stands for a tensor that one of the calls gave, and that leads its gradients there."""
        held, made = self._made.get(id(value), (None, None))
        return made if held is not None and held() is value and value.requires_grad and not value.is_leaf else None

    def _helps(self, module: torch.nn.Module) -> None:
        """Notes a call without gradients."""
        is_of_loop = threading.get_ident() == self._thread and not self._watched.is_paused
        if torch.is_grad_enabled() or not is_of_loop or not self._has_weights(module):
            return
        if self._helpers_at != self._watched.backward_passes:
            self._helpers.clear()
            self._helpers_at = self._watched.backward_passes
        self._helpers[id(module)] = module

    def _has_weights(self, module: torch.nn.Module) -> bool:
        if self._models.get(id(module)) is module:  # by id: one of the user's own may have no hash
            return True
        has_weights = next(module.parameters(), None) is not None
        if has_weights:
            self._models[id(module)] = module
        return has_weights

    def _returns(self, result: Any) -> None:
        noted, number = self._calls.get(self._number - 1) if self._begun else None, self._number - 1
        if noted is not None:
            noted.has_returned = True
            self._random_states.after_a_call()
        for path, tensor in made_in(result):
            if not tensor.requires_grad:
                continue
            held, is_scalar = weakref.ref(tensor), tensor.numel() == 1 and _is_given_itself(tensor, result)
            if is_scalar and self._trains:  # also of a module without weights: a loss of what functions made of them
                self._scalars.append((held, Mark(tensor)))
            if noted is not None:
                noted.gives.append(held)
                noted.paths.append(path)
                noted.scalars += is_scalar
                self._hold_gradient(noted, path, tensor)
                self._made[id(tensor)] = held, Made(number, path)

    def _hold_gradient(self, noted: NotedCall, path: str, tensor: torch.Tensor) -> None:
        """Holds its gradient when that comes, while the call is noted still; nothing of the tensor shows."""
        node, place, guarded, held = tensor.grad_fn, tensor.output_nr, self._guard.hooked, weakref.ref(noted)

        def came(gradients: Sequence[torch.Tensor | None]) -> None:
            still = held()
            if still is not None:
                guarded(still.hold_gradient, path, gradients[place])

        if node is not None:
            node.register_prehook(came)

    def _taken(self, module: torch.nn.Module, args: Any, kwargs: Any) -> NotedCall:
        lowers = {kind: get_autocast_dtype(kind) for kind in DEVICES if is_autocast_enabled(kind)}
        noted = NotedCall(module, innermost_line(), lowers, _NO_STATE, self._passes)

        def each(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if value.requires_grad and not value.is_leaf:
                made = self._made_by(value)
                if made is None:
                    noted.is_whole = False  # nor is it held: a graph hangs on it
                    return None
                noted.takes.add(made)
                noted.reads.add(made.call)
                return made
            noted.inputs.append((value, times_written(value)))
            return value

        noted.given = tuple(map(_mapped(each), args)), {name: _mapped(each)(value) for name, value in kwargs.items()}
        return noted

    def _prune(self) -> None:
        """Forgets the calls that nothing which somebody holds was made of."""
        needed: set[int] = set()
        waiting = [number for number, call in self._calls.items() if call.is_held]
        while waiting:
            number = waiting.pop()
            if number not in needed:
                needed.add(number)
                waiting += self._calls[number].reads
        self._calls = {number: call for number, call in self._calls.items() if number in needed}
        self._made = {key: known for key, known in self._made.items() if known[1].call in needed}
        self.buffers.keep(needed)
        self._prune_at = max(PRUNED_FROM, 2 * len(self._calls))


def _hands_on(module: torch.nn.Module) -> bool:
    """Whether a call is that of the model inside, and not to be made again itself: it readies DistributedDataParallel
    for a backward pass, and where none follows the next call raises."""
    held = module._modules
    return _is_of_ddp(module) or any(_is_of_ddp(held[name]) for name in WRAPPERS if name in held)


def _is_of_ddp(module: torch.nn.Module | None) -> bool:
    return DistributedDataParallel in type(module).__mro__  # of an abstract class `isinstance` takes ten times as long


def _is_given_itself(tensor: torch.Tensor, result: Any) -> bool:
    """Whether it is no attribute of an object in what a call gives: the one spread of a distribution is no loss."""
    return tensor is result or any(tensor is leaf for _, leaf in leaves_of(result))


def _mapped(each: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What makes a container anew of what ``each`` makes of the values in it; nearly always there is none."""

    def of(value: Any) -> Any:
        is_plain = value is None or isinstance(value, (torch.Tensor, bool, int, float, str))
        return each(value) if is_plain else _pytree.tree_map(each, value)

    return of


_NO_STATE = RandomState(None, None, torch.empty(0), ())

_NOTHING = TapedCall(lambda: None, None, lowers=False, has_gradients=False, random_state=_NO_STATE, reads=frozenset())

"""What a step needs to be run again: its batches, the random state, buffers and attributes from before it.

The weights are not copied for it: a replay is made while they are still those of the step, before the optimizer
has written them or after the scaler has withheld it. Only around the replay itself there is a copy of them. The
batches are copied, as a step may write into them.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ampdbg.probes.module_calls import run_eagerly
from ampdbg.probes.pause import unwatched
from ampdbg.probes.tensors import is_finite
from ampdbg.record.run import Investigation
from ampdbg.replay.copies import Copying, Left, duplicate
from ampdbg.replay.draws import Draws
from ampdbg.replay.random_state import RandomState
from ampdbg.replay.run import Run
from ampdbg.replay.state import LARGEST, NOT_OWN, duplicated, own_attributes, restored, written
from ampdbg.replay.surroundings import surroundings_restored


@dataclass(frozen=True, eq=False)
class SavedTensor:
    """A tensor among a model's attributes as it was: its contents, and the very object that the model held.

    The contents are a copy, but those of a tensor that was computed, such as a weight's transpose: it follows what
    it was computed from, and leads the gradients there.
    """

    contents: torch.Tensor
    tensor: weakref.ref[torch.Tensor] | None
    is_leaf: bool
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> SavedTensor:
        """The tensor as it is now."""
        contents = duplicated(tensor) if tensor.is_leaf else tensor.detach()
        return SavedTensor(contents, weakref.ref(tensor), tensor.is_leaf, tensor.requires_grad)

    def made(self, held: Collection[int]) -> torch.Tensor:
        """That object with those contents where it is among the ``held`` still, else an equal one."""
        own = self.tensor() if self.tensor else None
        if own is not None and id(own) in held and (not self.is_leaf or self._is_written_into(own)):
            return own
        return duplicated(self.contents).requires_grad_(self.is_leaf and self.requires_grad)

    def _is_written_into(self, own: torch.Tensor) -> bool:
        is_alike = own.is_leaf and own.requires_grad == self.requires_grad and own.dtype is self.contents.dtype
        return is_alike and own.shape == self.contents.shape and written(own.data, self.contents)


@dataclass(frozen=True, eq=False)
class ModelState:
    """What a step found in a model besides its parameters: buffers by name, and plain attributes by module.

    Plain data are numbers, strings, tensors, arrays, generators of random numbers, and containers of them; in the
    place of any other attribute stands ``Left``. ``model`` is whose they are: what a module of it has beyond these
    was made by the step.
    """

    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    model: weakref.ref[torch.nn.Module] | None = None

    @staticmethod
    def now(model: torch.nn.Module) -> ModelState:
        """What they are at this moment."""
        modules = list(model.named_modules())
        of_model = {id(buffer) for _, module in modules for buffer in module._buffers.values()}
        copying = Copying(lambda value: _saved_leaf(value, of_model), strict=True)
        with torch.no_grad():
            buffers = dict(_copied_buffers(modules))
            attributes = {
                name: copying.each(own_attributes(module))
                for name, module in modules
                if not isinstance(module, torch.jit.ScriptModule)
            }
        return ModelState(buffers, attributes, weakref.ref(model))

    def write(self, model: torch.nn.Module, held: Collection[int]) -> None:
        """Makes the model's buffers and attributes so; ``held`` are the ids of objects that are restored later.

        What the model does not have, or has in another shape, as one that is built anew, stays as it is.
        """
        is_own = self.model is not None and self.model() is model
        attributes = (self if is_own else self.for_another_model()).attributes
        copying = Copying(lambda saved: saved.made(held), strict=True)
        with torch.no_grad():
            for name, module in model.named_modules():
                self._write_buffers(name, module)
                if name not in attributes:
                    continue
                if is_own:
                    for other in [key for key in vars(module) if key not in attributes[name] and key not in NOT_OWN]:
                        del vars(module)[other]
                made = copying.each(attributes[name])
                vars(module).update((key, value) for key, value in made.items() if value is not Left.AS_IT_IS)

    def for_another_model(self) -> ModelState:
        """The same for a model that is built anew; nothing leads to the tensors of this one."""

        def change(value: Any) -> Any:
            if not isinstance(value, SavedTensor):
                return value
            return replace(value, tensor=None) if value.is_leaf else Left.AS_IT_IS

        copying = Copying(change, strict=True)
        attributes = {name: copying.each(saved) for name, saved in self.attributes.items()}
        return replace(self, attributes=attributes, model=None)

    def in_modes(self, modes: Iterable[tuple[torch.nn.Module, bool]]) -> ModelState:
        """The same, but with these of the model's modules in training mode or not."""
        model = self.model() if self.model is not None else None
        if model is None:
            return self
        of_modules = {id(module): is_training for module, is_training in modes}
        attributes = {
            name: {**self.attributes[name], "training": of_modules[id(module)]}
            for name, module in model.named_modules()
            if name in self.attributes and id(module) in of_modules
        }
        return replace(self, attributes={**self.attributes, **attributes})

    def unpoisoned(self, first: ModelState) -> ModelState:
        """The same, but where a value holds inf or NaN that of ``first``, or none where ``first`` had none.

        It is this very object where nothing is spoilt. What is still what it was at first is meant to be so: a mask.
        """
        buffers = _unpoisoned(self.buffers, first.buffers)
        attributes = {
            name: _unpoisoned(saved, first.attributes.get(name, {})) for name, saved in self.attributes.items()
        }
        if buffers is self.buffers and all(attributes[name] is saved for name, saved in self.attributes.items()):
            return self
        return replace(self, buffers=buffers, attributes=attributes)

    def _write_buffers(self, name: str, module: torch.nn.Module) -> None:
        for key, buffer in module._buffers.items():
            contents = self.buffers.get(f"{name}.{key}".lstrip("."))
            if buffer is None or contents is None or not _has_shape_of(contents, buffer):
                continue
            if not written(buffer.data, contents):
                module._buffers[key] = duplicated(contents)


def _copied_buffers(modules: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each but those that cannot be copied: a replay starts with what the model has of them by then."""
    for name, module in modules:
        for key, buffer in module._buffers.items():
            with contextlib.suppress(Exception):  # a class of the user's own may raise anything
                if buffer is not None:
                    yield f"{name}.{key}".lstrip("."), duplicated(buffer)


def _has_shape_of(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.is_nested and other.is_nested if one.is_nested or other.is_nested else one.shape == other.shape


def _saved_leaf(value: Any, buffers: Collection[int]) -> Any:
    if not isinstance(value, torch.Tensor) or id(value) in buffers or not _is_plain(value):
        return Left.AS_IT_IS
    try:
        return SavedTensor.of(value)
    except Exception:  # noqa: BLE001 - as of a buffer that cannot be copied
        return Left.AS_IT_IS


def _is_plain(tensor: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_nested or tensor.is_inference() or tensor.nbytes > LARGEST)


def _unpoisoned(saved: Mapping[str, Any], first: Mapping[str, Any]) -> Mapping[str, Any]:
    """The saved values; of spoilt ones those of ``first``, or none where it has none. Itself where all are sound."""
    spoilt = {key for key, value in saved.items() if not _is_sound(value, first.get(key))}
    if not spoilt:
        return saved
    kept = {key: value for key, value in saved.items() if key not in spoilt}
    return {**kept, **{key: first[key] for key in spoilt if key in first}}


def _is_sound(saved: Any, first: Any) -> bool:
    """Whether all tensors of a saved value are finite, or it is one that holds what it held at first."""
    unsound: list[torch.Tensor] = []

    def look(one: Any) -> Any:
        contents = _contents_of(one)
        if isinstance(contents, torch.Tensor) and not is_finite(contents):
            unsound.append(contents)
        return one

    Copying(look, strict=True).of(saved)
    return not unsound or _are_equal(_contents_of(saved), _contents_of(first))


def _contents_of(saved: Any) -> Any:
    return saved.contents if isinstance(saved, SavedTensor) else saved


def _are_equal(one: Any, other: Any) -> bool:
    """Whether both are tensors of the same numbers, with NaN in the same places."""
    try:
        return bool(one.shape == other.shape and torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
    except (AttributeError, TypeError, RuntimeError):  # no tensors; sparse, of other dtypes, on other devices
        return False


@dataclass(frozen=True)
class Snapshot:
    """A step as it was before its forward pass. ``batches`` has one entry a micro-batch, on the device.

    They are copies that belong to the snapshot. ``data`` are those parts of them that come from outside of the step.
    ``weights`` are copies of the model's parameters, in order, where the step is to be run again later. ``beside`` are
    objects that it calls and the model does not have, such as a loss with a running mean; ``states_beside`` is what
    those that are modules held, where it is known.
    """

    step: int
    batches: tuple[Any, ...]
    data: tuple[Any, ...]
    random_state: RandomState
    state: ModelState = field(default_factory=ModelState)
    weights: tuple[torch.Tensor, ...] = ()
    beside: tuple[Any, ...] = ()
    states_beside: tuple[tuple[torch.nn.Module, ModelState], ...] = ()
    draws: Draws = field(default_factory=Draws)
    """What its dropouts draw from, noted when it is first run again."""


def take_snapshot(model: torch.nn.Module, step: int, batches: tuple[Any, ...], *beside: Any) -> Snapshot:
    """The step that is about to run; its state and its batches are copied."""
    copies = duplicate(batches)
    return Snapshot(step, copies, copies, RandomState.now(), ModelState.now(model), beside=beside)


@contextlib.contextmanager
def rewound(model: torch.nn.Module, snapshot: Snapshot) -> Iterator[None]:
    """Model, batches and random state as they were before the step, but for the weights, which are those of now.

    Gradients are cleared. Afterwards all is as it is now, the weights too, should the step write into them. No watch
    notes what is done meanwhile, and nothing is compiled: the compiler would choose other code for steps to come.
    """
    random_state = RandomState.now()
    held_apart = restored(model, *snapshot.beside, batches=snapshot.batches)
    with unwatched(), run_eagerly(), surroundings_restored(), held_apart as held:
        try:
            snapshot.state.write(model, held.ids)
            for module, state in snapshot.states_beside:
                state.write(module, held.ids)
            snapshot.random_state.restore()
            yield
        finally:
            random_state.restore()


@dataclass(frozen=True)
class FailingStep:
    """A step that was investigated, with its loss scale; its snapshot has the weights that it had."""

    made: Investigation
    snapshot: Snapshot
    scale: float


def failing_step(model: torch.nn.Module, snapshot: Snapshot, scale: float, made: Investigation) -> FailingStep:
    """The step with the weights that the model has now: to be called while those are still the step's."""
    weights = tuple(weight.detach().clone() for weight in model.parameters())
    return FailingStep(made, replace(snapshot, weights=weights), scale)


@contextlib.contextmanager
def weights_of(model: torch.nn.Module, failing: FailingStep) -> Iterator[None]:
    """The model has the weights of the step; afterwards those that it has now."""
    now = [weight.detach().clone() for weight in model.parameters()]
    _write(model, failing.snapshot.weights)
    try:
        yield
    finally:
        _write(model, now)


def further_steps(run: Run, failing: FailingStep, count: int) -> Iterator[Snapshot]:
    """The failing step on the batches that come after its own in the data, ``count`` times."""
    micro = len(failing.snapshot.batches)
    batches = itertools.islice(run.workload.batches(), (failing.snapshot.step + 1) * micro, None)
    for _ in range(count):
        taken = tuple(itertools.islice(batches, micro))
        if len(taken) < micro:  # a script's step has none but its own
            return
        yield replace(failing.snapshot, batches=taken, random_state=RandomState.now())


def _write(model: torch.nn.Module, weights: tuple[torch.Tensor, ...] | list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)

"""Build a live Workload from a config: the model, its optimizers and schedules, checkpoint, batches and losses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.jit._trace import TopLevelTracedModule
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ampdbg.config.schema import Config
from ampdbg.config.targets import parse_target
from ampdbg.errors import WorkloadError
from ampdbg.quantities import listed
from ampdbg.workload.batches import Batches, BatchSource
from ampdbg.workload.checkpoint import Checkpoint
from ampdbg.workload.losses import StepFunction, choose_step, losses_in
from ampdbg.workload.optimizers import Schedule, steps_noted, trainable, training_of
from ampdbg.workload.targets import Found, Importer, a, first_problem, forget_user_modules
from ampdbg.workload.user_code import UserCode


@dataclass(frozen=True)
class Workload:
    """A model to train, its optimizers, and the step that turns a batch into losses.

    ``model`` is on the device and in training mode. Every parameter group of ``optimizers`` has a ``name``.
    ``scaler_state`` is the checkpoint's loss-scaler state. ``notes`` list states not loaded and schedules not stepped.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    source: Batches
    step: StepFunction
    user: UserCode
    schedules: tuple[Schedule, ...] = ()
    scaler_state: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    def batches(self) -> Iterator[Any]:
        """Yield the batches on the device, endlessly: the data restarts at its end.

        Raises:
            WorkloadError: the data is empty, or cannot restart.
            UserCodeError: reading the data raised.
        """
        return self.source.batches()

    def clear_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def scheduled(self) -> Iterator[None]:
        """Wrap an update of the weights. On exit, step the schedules of the optimizers that have taken a step.

        Raises:
            UserCodeError: a scheduler raised, for example after its last step.
        """
        with steps_noted(schedule.optimizer for schedule in self.schedules if schedule.every) as taken:
            yield
        for schedule in self.schedules:
            if id(schedule.optimizer) in taken:
                with self.user.running("the learning-rate scheduler's step"):
                    schedule.step_was_taken()

    def losses(self, batch: Any) -> dict[str, torch.Tensor]:
        """Return the losses of one batch by name, each of shape (). A single loss is ``{"loss": ...}``.

        Raises:
            WorkloadError: the user's code returned no usable loss.
            UserCodeError: the user's code raised; the exception is its ``__cause__``.
        """
        with self.user.running(self.step.source, details=lambda: self.source.describe(batch)):
            output = self.step.call(batch, max(self.source.position, 0))
        try:
            return losses_in(output, self.step)
        except WorkloadError as error:
            raise WorkloadError(f"{error}\n{self.source.describe(batch)}") from None


def build_workload(config: Config, device: torch.device) -> Workload:
    """Import the targets of ``config`` and build the workload. This function sets no random seed.

    Raises:
        WorkloadError: a target does not exist, does not suit its key, or takes other arguments.
        UserCodeError: the user's code raised.
    """
    forget_user_modules()
    folders = dict.fromkeys([*(file.parent for file in config.target_files()), config.folder])
    user = UserCode(tuple(folders), config.start)
    with user.reading("building the workload"):
        found = _find_all(config, user)
        model, checkpoint = _model(found["model"]), Checkpoint(config)
        checkpoint.load_model(model, user)
        with user.running(f"moving {type(model).__name__} to {device}"):
            model.to(device)
        training = training_of(model, found, config, user)
        notes = checkpoint.load_training(model, training, config.optimizer.groups)
        return Workload(
            model=model,
            optimizers=training.optimizers,
            source=BatchSource(found["data"], device),
            step=choose_step(model, found.get("loss"), found.get("step"), device),
            user=user,
            schedules=training.schedules,
            scaler_state=checkpoint.scaler(),
            notes=(*notes, *(schedule.note for schedule in training.schedules if schedule.note)),
        )


def _find_all(config: Config, user: UserCode) -> dict[str, Found]:
    """Return the object of every target, or report all missing objects together."""
    importer, found, missing = Importer(config, user), {}, []
    for key, spec in config.targets().items():
        try:
            found[key] = Found(key, config, spec, importer.find(key, parse_target(spec.target)), user)
        except WorkloadError as error:
            missing.append(str(error))
    if missing:
        raise WorkloadError("\n".join(missing))
    return found


def _model(found: Found) -> nn.Module:
    if isinstance(found.value, nn.Module):
        found.refuse_arguments()
        model = found.value
    elif callable(found.value):
        model = found.made()
    else:
        raise found.refuse(f"is {a(found.value)}; needed: an nn.Module class, factory or instance")
    if not isinstance(model, nn.Module):
        raise found.refuse(f"returned {a(model)}; needed: an nn.Module")
    problem = _why_unusable(model) or _why_untrainable(model)
    if problem:
        raise found.refuse(f"gave a {type(model).__name__} {problem}")
    if not model.training:
        # from_pretrained returns models in evaluation mode; every training loop calls train().
        model.train()
    return model


def _modules_below(
    model: nn.Module, name: str = "", around: tuple[nn.Module, ...] = ()
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield the model and its descendants: the name, the module, and True if the module contains itself.

    ``nn.Module.modules()`` is not used, because it requires initialized and hashable modules.
    """
    is_in_itself = any(model is outer for outer in around)
    yield name, model, is_in_itself
    held = {} if is_in_itself else getattr(model, "_modules", {})
    for key, inner in held.items():
        if inner is not None:
            yield from _modules_below(inner, f"{name}.{key}".lstrip("."), (*around, model))


def _why_unusable(model: nn.Module) -> str | None:
    found = list(_modules_below(model))
    endless = listed(name for name, _, is_in_itself in found if is_in_itself)
    bare = _classes(module for _, module, _ in found if not hasattr(module, "_parameters"))
    unhashable = _classes(module for _, module, _ in found if type(module).__hash__ is None)
    traced = listed(name or "the model itself" for name, module, _ in found if isinstance(module, TopLevelTracedModule))
    return first_problem(
        {
            f"with a module inside itself: {endless}; torch's .to(), .train() and .state_dict() never finish on it: "
            "keep a parent where torch registers no module, as in a list: self.parent = [parent]": endless,
            f"with modules whose __init__ does not call super().__init__(): {bare}": bare,
            f"with modules that define __eq__ and no __hash__: {unhashable}; add `__hash__ = nn.Module.__hash__`": (
                unhashable
            ),
            f"with code from torch.jit.trace: {traced}; torch cannot run a traced module while ampdbg watches its "
            "ops: give the module that was traced": traced,
        }
    )


def _classes(modules: Iterable[nn.Module]) -> str:
    return listed(dict.fromkeys(type(module).__name__ for module in modules))


def _why_untrainable(model: nn.Module) -> str | None:
    parameters: list[tuple[str, Any]] = list(model.named_parameters())
    lazy = listed(name for name, parameter in parameters if is_lazy(parameter))
    meta = listed(name for name, parameter in parameters if parameter.device.type == "meta")
    return first_problem(
        {
            f"with lazy parameters, which have no shape yet: {lazy}; run one batch through it in the factory": lazy,
            f"with parameters on the meta device, which hold no values: {meta}": meta,
            "without a trainable parameter; needed: at least one with requires_grad": not trainable(model),
        }
    )

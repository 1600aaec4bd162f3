"""From a config to a live Workload: the model, its optimizers, its batches, its losses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ampdbg.config.schema import Config, TargetSpec
from ampdbg.config.targets import listed, parse_target
from ampdbg.errors import WorkloadError
from ampdbg.workload.batches import BatchSource
from ampdbg.workload.checkpoints import load_checkpoint
from ampdbg.workload.losses import StepFunction, choose_step, losses_in
from ampdbg.workload.optimizers import build_optimizers, trainable
from ampdbg.workload.targets import Found, Importer, a, forget_user_modules
from ampdbg.workload.user_code import UserCode

_TARGETS = ("model", "data", "loss", "step", "optimizer")


@dataclass(frozen=True)
class Workload:
    """A model to train, its optimizers, and how a batch becomes losses.

    ``model`` is on the device and in training mode; every parameter group of ``optimizers`` has a ``name``.
    Learning-rate schedulers that a ``configure_optimizers`` returns are left aside.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    source: BatchSource
    step: StepFunction
    user: UserCode

    def batches(self) -> Iterator[Any]:
        """The batches on the device, endless: the data is started again at its end.

        Raises:
            WorkloadError: it is empty, or cannot be started again.
            UserCodeError: reading it raised.
        """
        return self.source.batches()

    def losses(self, batch: Any) -> dict[str, torch.Tensor]:
        """The losses of one batch by name, each of shape (); ``{"loss": ...}`` where there is one.

        Raises:
            WorkloadError: what the user's code returned holds no usable loss.
            UserCodeError: the user's code raised; the exception is its ``__cause__``.
        """
        with self.user.running(self.step.source, details=lambda: self.source.describe(batch)):
            output = self.step.call(batch, max(self.source.position, 0))
        try:
            return losses_in(output, self.step)
        except WorkloadError as error:
            raise WorkloadError(f"{error}\n{self.source.describe(batch)}") from None


def build_workload(config: Config, device: torch.device) -> Workload:
    """Imports the targets of ``config`` and makes the live workload; seeds nothing itself.

    Raises:
        WorkloadError: a target does not exist, is not what its key needs, or takes other arguments.
        UserCodeError: the user's code raised.
    """
    forget_user_modules()
    user = UserCode(_folders(config), config.start)
    with user.reading("building the workload"):
        return _built(config, device, user)


def _built(config: Config, device: torch.device, user: UserCode) -> Workload:
    found = _find_all(config, user)
    model = _model(found["model"])
    if config.checkpoint is not None:
        load_checkpoint(model, config.folder / config.checkpoint, config.where("checkpoint"), user)
    with user.running(f"moving {type(model).__name__} to {device}"):
        model.to(device)
    return Workload(
        model=model,
        optimizers=_optimizers(model, found["optimizer"], config, user),
        source=BatchSource(found["data"], device),
        step=choose_step(model, found.get("loss"), found.get("step"), device),
        user=user,
    )


def _optimizers(model: nn.Module, found: Found, config: Config, user: UserCode) -> tuple[Optimizer, ...]:
    """An ``optimizer`` that is written in the config comes before the model's ``configure_optimizers``."""
    grouping, has_own = config.optimizer.groups, callable(getattr(model, "configure_optimizers", None))
    if has_own and "optimizer" not in config.model_fields_set:
        return build_optimizers(model, None, grouping, user)
    try:
        return build_optimizers(model, found, grouping, user)
    except WorkloadError as error:
        own = f"{type(model).__name__}.configure_optimizers()"
        hint = f". It comes before {own}; leave the key out to use that" if has_own else ""
        raise WorkloadError(f"{error}{hint}") from None


def _specs(config: Config) -> dict[str, TargetSpec]:
    specs = ((key, getattr(config, key)) for key in _TARGETS)
    return {key: spec for key, spec in specs if spec is not None}


def _folders(config: Config) -> tuple[Path, ...]:
    """The folders of the target files, and the config's own."""
    targets = [parse_target(spec.target) for spec in _specs(config).values()]
    files = [target.path(config.folder) for target in targets if target.file]
    return tuple(dict.fromkeys([*(file.parent for file in files), config.folder]))


def _find_all(config: Config, user: UserCode) -> dict[str, Found]:
    """What every target names; all that are missing are reported together."""
    importer, found, missing = Importer(config, user), {}, []
    for key, spec in _specs(config).items():
        value = importer.find(key, parse_target(spec.target))
        if isinstance(value, WorkloadError):
            missing.append(str(value))
        else:
            found[key] = Found(key, config, spec, value, user)
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
    problem = _why_untrainable(model)
    if problem:
        raise found.refuse(f"gave a {type(model).__name__} {problem}")
    if not model.training:
        # from_pretrained returns models in evaluation mode; every training loop calls this.
        model.train()
    return model


def _modules_below(model: nn.Module) -> Iterator[nn.Module]:
    """The model and all that is in it; ``modules()`` needs them whole and hashable."""
    done, waiting = set[int](), [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in done:
            done.add(id(module))
            yield module
            waiting += [inner for inner in vars(module).get("_modules", {}).values() if inner is not None]


def _why_untrainable(model: nn.Module) -> str | None:
    modules = list(_modules_below(model))
    bare = [type(module).__name__ for module in modules if "_parameters" not in vars(module)]
    if bare:
        return f"with modules whose __init__ does not call super().__init__(): {listed(dict.fromkeys(bare))}"
    unhashable = [type(module).__name__ for module in modules if type(module).__hash__ is None]
    if unhashable:
        names = listed(dict.fromkeys(unhashable))
        return f"with modules that define __eq__ and no __hash__: {names}; add `__hash__ = nn.Module.__hash__`"
    parameters: list[tuple[str, Any]] = list(model.named_parameters())
    lazy = [name for name, parameter in parameters if is_lazy(parameter)]
    if lazy:
        return f"with lazy parameters, which have no shape yet: {listed(lazy)}; run one batch through it in the factory"
    meta = [name for name, parameter in parameters if parameter.device.type == "meta"]
    if meta:
        return f"with parameters on the meta device, which hold no values: {listed(meta)}"
    if not trainable(model):
        return "without a trainable parameter; needed: at least one with requires_grad"
    return None

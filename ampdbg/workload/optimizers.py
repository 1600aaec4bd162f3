"""The optimizers of a run and their learning-rate schedules, from a config or from a LightningModule."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ampdbg.config.schema import Config
from ampdbg.errors import WorkloadError
from ampdbg.workload.targets import Found, a, first_problem, required, signature_of
from ampdbg.workload.user_code import UserCode


def groups_of(model: nn.Module, grouping: str) -> list[dict[str, Any]]:
    """Return the trainable parameters in named groups: one per parameter, one per module, or a single one."""
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in trainable(model):
        names = {"parameter": name, "module": name.rpartition(".")[0] or "(root)", "single": "all"}
        groups.setdefault(names[grouping], []).append(parameter)
    return [{"params": parameters, "name": name} for name, parameters in groups.items()]


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that require a gradient, each once, with their qualified names."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


@dataclass(frozen=True)
class Training:
    """The optimizers of a model and their schedules. Every parameter group has a ``name``."""

    optimizers: tuple[Optimizer, ...]
    schedules: tuple[Schedule, ...] = ()


def training_of(model: nn.Module, found: Mapping[str, Found], config: Config, user: UserCode) -> Training:
    """Return the optimizers and schedules of a run. ``found`` holds the objects that the config's targets name.

    An ``optimizer`` or ``scheduler`` in the config takes precedence over the model's ``configure_optimizers``. If
    that method requires arguments, as in minGPT, the default optimizer is used instead. Groups made by
    ``configure_optimizers``, or by a function that takes the model, do not change.

    Raises:
        WorkloadError: the result is not an optimizer or scheduler, or its parameters belong to another model.
        UserCodeError: making it raised.
    """
    configure: Any = getattr(model, "configure_optimizers", None)
    own, has_own = f"{type(model).__name__}.configure_optimizers()", callable(configure) and not required(configure)
    schedules: tuple[Schedule, ...] = ()
    if has_own and "optimizer" not in config.model_fields_set:
        with user.running(own):
            made = configure()
        optimizers = _optimizers_over(model, made, own)
        schedules = tuple(_schedules_in(made, optimizers, own))
    else:
        try:
            made = _made(model, found["optimizer"], config.optimizer.groups)
            optimizers = _optimizers_over(model, made, found["optimizer"].named)
        except WorkloadError as error:
            hint = f". This key overrides {own}; leave it out to use that" if has_own else ""
            raise WorkloadError(f"{error}{hint}") from None
    if "scheduler" in found:
        schedules = tuple(_schedule_of(found["scheduler"], optimizer) for optimizer in optimizers)
    return Training(optimizers, schedules)


def _optimizers_over(model: nn.Module, made: Any, source: str) -> tuple[Optimizer, ...]:
    optimizers = tuple(_parts_of(made)[0])
    if not optimizers or not all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
        raise WorkloadError(f"{source} gave {a(made)}; needed: a torch.optim.Optimizer, or a list of them")
    bare = [type(optimizer).__name__ for optimizer in optimizers if not hasattr(optimizer, "param_groups")]
    if bare:
        raise WorkloadError(f"{source} gave a {bare[0]} whose __init__ does not call super().__init__()")
    _check_owner(model, optimizers, source)
    _name_groups(model, optimizers)
    return optimizers


def _made(model: nn.Module, found: Found, grouping: str) -> Any:
    if isinstance(found.value, Optimizer):
        found.refuse_arguments()
        return found.value
    if not callable(found.value):
        raise found.refuse(f"is {a(found.value)}; needed: an Optimizer class, or a function that returns an optimizer")
    if next(iter(signature_of(found.value).parameters), "") == "model" and not isinstance(found.value, type):
        return found.made(model, names=("model",))
    return found.made(groups_of(model, grouping), names=("params",))


def _parts_of(made: Any) -> tuple[list[Any], list[Any]]:
    """Return the optimizers and the schedulers from any result that Lightning allows for ``configure_optimizers``.

    It is an optimizer; a list or tuple of optimizers; ``(optimizer, scheduler)``, or a pair of lists; a dict with
    ``"optimizer"`` and ``"lr_scheduler"``; or a list of such dicts. A scheduler may be wrapped in Lightning's mapping.
    """
    if isinstance(made, Mapping):
        return [made.get("optimizer")], [made.get("lr_scheduler")]
    if not isinstance(made, (list, tuple)):
        return [made], []
    if len(made) == 2 and (isinstance(made[0], (list, tuple)) or isinstance(made[1], LRScheduler)):
        optimizers, schedulers = (side if isinstance(side, (list, tuple)) else [side] for side in made)
        return [*optimizers], [*schedulers]
    parts = [_parts_of(item) for item in made]
    return [one for optimizers, _ in parts for one in optimizers], [one for _, found in parts for one in found]


def _check_owner(model: nn.Module, optimizers: Sequence[Optimizer], source: str) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            kind = type(optimizer).__name__
            raise WorkloadError(
                f"{source}: the {kind} holds no parameter of the model; needed: an optimizer over the model that "
                "the config builds. Write a function optimizer(model) that makes it"
            )


def _name_groups(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Name each unnamed group after its parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for index, group in enumerate(groups):
        if not group.get("name"):
            inside = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
            group["name"] = _name_of(inside) or f"group {index}"


def _name_of(names: Sequence[str]) -> str:
    """Return ``head.weight`` for one name, ``blocks.* (12)`` for names in one module, else the first and a count."""
    if len(names) < 2:
        return "".join(names)
    common = os.path.commonprefix([name.split(".") for name in names])  # noqa: RUF071 - of lists, not of strings
    if common:
        return f"{'.'.join(common)}.* ({len(names)})"
    return f"{names[0]} and {len(names) - 1} more"


@dataclass
class Schedule:
    """A scheduler and the number of its optimizer's steps between two scheduler steps (``every``).

    If ``every`` is 0, ampdbg does not step the scheduler, and ``note`` gives the reason.
    """

    scheduler: Any
    optimizer: Any
    every: int = 1
    note: str = ""
    taken: int = 0

    def step_was_taken(self) -> None:
        self.taken += 1
        if self.every and self.taken % self.every == 0:
            self.scheduler.step()


@contextlib.contextmanager
def steps_noted(optimizers: Iterable[Optimizer]) -> Iterator[set[int]]:
    """Collect the ``id`` of each optimizer that steps inside this context. A loss scaler withholds some steps."""
    taken: set[int] = set()

    def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not getattr(optimizer, "found_inf", None):  # a fused optimizer is called anyway, and skips on its own
            taken.add(id(optimizer))

    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.callback(optimizer.register_step_post_hook(note).remove)
        yield taken


def _schedule_of(found: Found, optimizer: Optimizer) -> Schedule:
    if not callable(found.value):
        raise found.refuse(f"is {a(found.value)}; needed: an LRScheduler class, or a function that returns one")
    made = found.made(optimizer, names=("optimizer",))
    if not isinstance(made, LRScheduler) or isinstance(made, ReduceLROnPlateau):
        raise found.refuse(f"gave {a(made)}; needed: an LRScheduler that is stepped after each step, without a metric")
    if made.optimizer is not optimizer:
        raise found.refuse(f"gave {a(made)} of another optimizer; needed: one of the optimizer that it is called with")
    return Schedule(made, optimizer)


def _schedules_in(made: Any, optimizers: Sequence[Optimizer], source: str) -> Iterator[Schedule]:
    """Yield the schedules in the result of ``configure_optimizers``. By default, Lightning steps them once an epoch."""
    own = {id(optimizer) for optimizer in optimizers}
    for given in filter(None, _parts_of(made)[1]):
        settings = given if isinstance(given, Mapping) else {"scheduler": given}
        scheduler, frequency = settings.get("scheduler"), settings.get("frequency", 1)
        if isinstance(frequency, bool) or not isinstance(frequency, int) or frequency < 1:
            raise WorkloadError(f"{source} gave the frequency {frequency!r:.80}; needed: a whole number of at least 1")
        optimizer = getattr(scheduler, "optimizer", None)
        is_of_the_run = isinstance(scheduler, LRScheduler) and id(optimizer) in own
        problems = {
            "it is no LRScheduler over an optimizer of the run": not is_of_the_run,
            "it waits for the metric of a validation": isinstance(scheduler, ReduceLROnPlateau),
            "it waits for the end of an epoch": settings.get("interval", "epoch") != "step",
        }
        why, what = first_problem(problems), f"the {type(scheduler).__name__} of {source}"
        note = f"ampdbg does not step {what}: {why}; the learning rate stays constant"
        yield Schedule(scheduler, optimizer, 0 if why else frequency, note if why else "")

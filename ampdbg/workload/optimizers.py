"""Optimizers over named parameter groups: one a parameter, one a module, or a single one."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ampdbg.errors import WorkloadError
from ampdbg.workload.targets import Found, a
from ampdbg.workload.user_code import UserCode

Group = dict[str, Any]


GROUPINGS: Mapping[str, Callable[[str], str]] = {
    "parameter": lambda name: name,
    "module": lambda name: name.rpartition(".")[0] or "(root)",
    "single": lambda name: "all",
}
"""Groupings: the name of the group that a parameter is in, by the parameter's qualified name."""


def groups_of(model: nn.Module, grouping: str) -> list[Group]:
    """The trainable parameters in named groups: one for each, one for each module, or a single one."""
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in trainable(model):
        groups.setdefault(GROUPINGS[grouping](name), []).append(parameter)
    return [{"params": parameters, "name": name} for name, parameters in groups.items()]


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that require a gradient, each once, by qualified name."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def build_optimizers(model: nn.Module, found: Found | None, grouping: str, user: UserCode) -> tuple[Optimizer, ...]:
    """The optimizers of a run; every parameter group of theirs has a ``name``.

    Args:
        model: has at least one trainable parameter.
        found: the config's optimizer target; None where the model's own ``configure_optimizers`` is to be used.
        grouping: ``parameter``, ``module`` or ``single``; what a function that takes the model, or
            ``configure_optimizers``, groups itself is left as it is.

    Raises:
        WorkloadError: the result is no optimizer, or one over another model's parameters.
        UserCodeError: making it raised.
    """
    if found is None:
        own: Any = model
        source = f"{type(model).__name__}.configure_optimizers()"
        with user.running(source):
            made = own.configure_optimizers()
    else:
        source, made = found.named, _made(model, found, grouping)
    optimizers = optimizers_in(made)
    if not optimizers:
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
    if _first_parameter(found.value) == "model" and not isinstance(found.value, type):
        return found.made(model, names=("model",))
    return found.made(groups_of(model, grouping), names=("params",))


def _first_parameter(function: Callable[..., Any]) -> str:
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except (ValueError, TypeError):  # some builtins have no signature
        return ""


def optimizers_in(made: Any) -> tuple[Optimizer, ...]:
    """The optimizers in any of the shapes that Lightning's ``configure_optimizers`` may return; empty for others.

    An optimizer; a list or tuple of them; ``(optimizer, scheduler)``, or lists of both;
    a dict with ``"optimizer"``; a list of such dicts. Schedulers are left aside.
    """
    if isinstance(made, Optimizer):
        return (made,)
    if isinstance(made, Mapping):
        return optimizers_in(made.get("optimizer"))
    if isinstance(made, Sequence) and not isinstance(made, str):
        if len(made) == 2 and (isinstance(made[0], (list, tuple)) or isinstance(made[1], LRScheduler)):
            return optimizers_in(made[0])
        inner = [optimizers_in(item) for item in made]
        return tuple(optimizer for found in inner for optimizer in found) if all(inner) else ()
    return ()


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
    """Names the groups that have no name after the parameters in them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for index, group in enumerate(groups):
        if not group.get("name"):
            inside = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
            group["name"] = _name_of(inside) or f"group {index}"


def _name_of(names: Sequence[str]) -> str:
    """``head.weight`` alone; ``blocks.*`` (12) for what has a common module; else the first and how many more."""
    if len(names) < 2:
        return "".join(names)
    common = os.path.commonprefix([name.split(".") for name in names])  # noqa: RUF071 - of lists, not of strings
    if common:
        return f"{'.'.join(common)}.* ({len(names)})"
    return f"{names[0]} and {len(names) - 1} more"

"""From a config to a live Workload: the model and its checkpoint, its optimizers, its batches, its losses."""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ampdbg.config.schema import Config
from ampdbg.config.targets import parse_target
from ampdbg.errors import WorkloadError, first_line
from ampdbg.quantities import listed
from ampdbg.workload.batches import Batches, BatchSource
from ampdbg.workload.losses import StepFunction, choose_step, losses_in
from ampdbg.workload.targets import Found, Importer, a, forget_user_modules
from ampdbg.workload.user_code import UserCode

# Where training scripts put the state dict within what they save.
_NESTINGS = ("state_dict", "model_state_dict", "model")
# What DistributedDataParallel and torch.compile put before every name.
_WRAPPERS = ("module.", "_orig_mod.")


@dataclass(frozen=True)
class Workload:
    """A model to train, its optimizers, and how a batch becomes losses.

    ``model`` is on the device and in training mode; every parameter group of ``optimizers`` has a ``name``.
    Learning-rate schedulers that a ``configure_optimizers`` returns are left aside.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    source: Batches
    step: StepFunction
    user: UserCode

    def batches(self) -> Iterator[Any]:
        """The batches on the device, endless: the data is started again at its end.

        Raises:
            WorkloadError: it is empty, or cannot be started again.
            UserCodeError: reading it raised.
        """
        return self.source.batches()

    def clear_gradients(self) -> None:
        """Before a step's first pass."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

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
    folders = dict.fromkeys([*(file.parent for file in config.target_files()), config.folder])
    user = UserCode(tuple(folders), config.start)
    with user.reading("building the workload"):
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


def _find_all(config: Config, user: UserCode) -> dict[str, Found]:
    """What every target names; all that are missing are reported together."""
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
    problem = _why_untrainable(model)
    if problem:
        raise found.refuse(f"gave a {type(model).__name__} {problem}")
    if not model.training:
        # from_pretrained returns models in evaluation mode; every training loop calls this.
        model.train()
    return model


def _modules_below(model: nn.Module) -> Iterator[nn.Module]:
    """The model and all that is in it; ``modules()`` needs them whole and hashable."""
    yield model
    for inner in vars(model).get("_modules", {}).values():
        if inner is not None:
            yield from _modules_below(inner)


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


# The checkpoint


def load_checkpoint(model: nn.Module, path: Path, where: str, user: UserCode) -> None:
    """Loads the tensors in ``path`` into ``model``.

    Raises:
        WorkloadError: the file cannot be read, holds more than tensors, or does not fit the model.
        UserCodeError: the model's own loading hooks raised.
    """
    state = _unwrapped(_state_dict(_read(path, where), where, path))
    with user.running(f"{where}: loading {path.name} into the {type(model).__name__}"):
        problems = _load(model, state)
    if problems:
        lines = "\n  ".join(problems)
        raise WorkloadError(f"{where}: {path.name} does not fit the {type(model).__name__}\n  {lines}")


def _read(path: Path, where: str) -> Any:
    try:
        if path.suffix == ".safetensors":
            return _read_safetensors(path, where)
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise WorkloadError(
            f"{where}: {path.name} is damaged, or holds Python objects; allowed: tensors only. "
            "Save it again with torch.save(model.state_dict(), path)"
        ) from None
    except WorkloadError:
        raise
    except Exception as error:  # noqa: BLE001 - unpickling a file that is no pickle raises anything
        reason = first_line(error).rstrip(".")
        raise WorkloadError(
            f"{where}: {path.name} cannot be read; allowed: what torch.save wrote, or a .safetensors file ({reason})"
        ) from None


def _read_safetensors(path: Path, where: str) -> Any:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise WorkloadError(f"{where}: reading {path.name} needs safetensors; pip install safetensors numpy") from None
    try:
        return load_file(path, device="cpu")
    except SafetensorError as error:
        raise WorkloadError(f"{where}: {path.name} is no safetensors file: {error}") from None


def _state_dict(content: Any, where: str, path: Path) -> Mapping[str, Any]:
    """The mapping of names to tensors, also where a training script saved more than that."""
    saved = content if isinstance(content, Mapping) else {}
    inner = next((saved[key] for key in _NESTINGS if isinstance(saved.get(key), Mapping)), saved)
    if any(isinstance(value, torch.Tensor) for value in inner.values()):
        odd = [key for key in inner if not isinstance(key, str)]
        if odd:
            raise WorkloadError(f"{where}: {path.name} holds a tensor under {odd[0]!r:.80}; allowed: names to tensors")
        return dict(inner)
    keys = f" with the keys {listed(map(str, saved), most=8)}" if saved else ""
    kind = type(content).__name__
    raise WorkloadError(
        f"{where}: {path.name} holds no state dict but a {kind}{keys}; "
        f"allowed: names to tensors, at the top or under {', '.join(_NESTINGS)}"
    )


def _unwrapped(state: Mapping[str, Any]) -> Mapping[str, Any]:
    for wrapper in _WRAPPERS:
        if all(name.startswith(wrapper) for name in state):
            return _unwrapped({name[len(wrapper) :]: value for name, value in state.items()})
    return state


def _load(model: nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Loads what fits, and says what does not; a missing name that shares its tensor with a present one does."""
    own = model.state_dict()
    misshapen = {name: _shapes(state[name], own[name]) for name in own if name in state}
    misshapen = {name: shapes for name, shapes in misshapen.items() if shapes}
    fitting = {name: value for name, value in state.items() if name not in misshapen}
    result = model.load_state_dict(fitting, strict=False)
    loaded = {_memory(own[name]) for name in own if name in fitting}
    missing = [name for name in result.missing_keys if name not in misshapen and _memory(own.get(name)) not in loaded]
    found = (
        ("missing", missing),
        ("not in the model", list(result.unexpected_keys)),
        ("of another shape", [f"{name} ({shapes})" for name, shapes in misshapen.items()]),
    )
    return [f"{len(names)} {problem}: {listed(names, most=4)}" for problem, names in found if names]


def _shapes(given: Any, needed: Any) -> str:
    """What the two shapes are, if they differ."""
    if not isinstance(given, torch.Tensor) or not isinstance(needed, torch.Tensor) or given.shape == needed.shape:
        return ""
    return f"{list(given.shape)} in the file, {list(needed.shape)} in the model"


def _memory(value: Any) -> object:
    """What two tied tensors have in common; an object of its own for anything that cannot be tied."""
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return object()
    return value.data_ptr(), tuple(value.shape), value.stride()


# The optimizers


def groups_of(model: nn.Module, grouping: str) -> list[dict[str, Any]]:
    """The trainable parameters in named groups: one for each, one for each module, or a single one."""
    if grouping == "single":
        return [{"params": [parameter for _, parameter in trainable(model)], "name": "all"}]
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in trainable(model):
        owner = name.rpartition(".")[0] or "(root)"
        groups.setdefault(name if grouping == "parameter" else owner, []).append(parameter)
    return [{"params": parameters, "name": name} for name, parameters in groups.items()]


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that require a gradient, each once, by qualified name."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _optimizers(model: nn.Module, found: Found, config: Config, user: UserCode) -> tuple[Optimizer, ...]:
    """The optimizers of a run; every parameter group of theirs has a ``name``.

    An ``optimizer`` that is written in the config comes before the model's ``configure_optimizers``. What that, or a
    function that takes the model, has grouped itself is left as it is.

    Raises:
        WorkloadError: the result is no optimizer, or one over another model's parameters.
        UserCodeError: making it raised.
    """
    configure, own = getattr(model, "configure_optimizers", None), f"{type(model).__name__}.configure_optimizers()"
    if callable(configure) and "optimizer" not in config.model_fields_set:
        with user.running(own):
            made = configure()
        return _optimizers_over(model, made, own)
    try:
        return _optimizers_over(model, _made(model, found, config.optimizer.groups), found.named)
    except WorkloadError as error:
        hint = f". It comes before {own}; leave the key out to use that" if callable(configure) else ""
        raise WorkloadError(f"{error}{hint}") from None


def _optimizers_over(model: nn.Module, made: Any, source: str) -> tuple[Optimizer, ...]:
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

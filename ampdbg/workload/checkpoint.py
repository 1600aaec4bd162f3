"""A training checkpoint: read without running code of it, and put into model, optimizers, schedules and loss scaler.

Each part is found under the names that training scripts and libraries give it; what does not fit is said in one
message.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ampdbg.config.schema import CheckpointFiles, Config
from ampdbg.errors import WorkloadError, first_line
from ampdbg.quantities import listed
from ampdbg.workload.optimizers import Training
from ampdbg.workload.training_state import SavedPart, load_optimizers, load_schedules, scaler_state
from ampdbg.workload.user_code import UserCode

Part = Literal["optimizer", "scaler", "scheduler"]

_NESTINGS: Mapping[str, tuple[str, ...]] = {
    "model": ("state_dict", "model_state_dict", "model"),
    "optimizer": ("optimizer", "optimizer_state_dict", "optimizer_states", "optimizers", "optim"),
    "scaler": ("scaler", "scaler_state_dict", "grad_scaler", "amp_scaler", "MixedPrecision", "amp"),
    "scheduler": ("scheduler", "scheduler_state_dict", "lr_scheduler", "lr_scheduler_state_dict", "lr_schedulers"),
}
"""Where training scripts, Lightning (plurals, MixedPrecision) and Apex (amp) put each part within what they save."""

_MARKS: Mapping[Part, str] = {"optimizer": "param_groups", "scaler": "scale", "scheduler": "last_epoch"}
"""The key by which the state of each part is known that is no part of something larger."""

# What DistributedDataParallel and torch.compile put before every name.
_WRAPPERS = ("module.", "_orig_mod.")


class Checkpoint:
    """The checkpoint that a config names, read; an empty one where it names none.

    Raises:
        WorkloadError: a file cannot be read, holds more than tensors, or has nothing of the part that it is given for.
    """

    def __init__(self, config: Config) -> None:
        self._read: dict[Path, Any] = {}
        self._folder, given = config.folder, config.checkpoint
        self._model: tuple[Path, str] | None = None
        self._parts: dict[Part, SavedPart] = {}
        if isinstance(given, Path):
            self._model = given, config.where("checkpoint")
            content = self._content(*self._model)
            for part in _MARKS:
                inside = _inside(content, part)
                if inside:
                    self._parts[part] = SavedPart(inside, f"{config.where('checkpoint')}: the {part} in {given.name}")
        elif isinstance(given, CheckpointFiles):
            if given.model is not None:
                self._model = given.model, config.where("checkpoint.model")
            for part, files in (
                ("optimizer", given.optimizer or ()),
                ("scaler", (given.scaler,) if given.scaler else ()),
                ("scheduler", given.scheduler or ()),
            ):
                if files:
                    self._parts[part] = self._part(part, files, config.where(f"checkpoint.{part}"))

    def load_model(self, model: nn.Module, user: UserCode) -> None:
        """Loads the weights.

        Raises:
            WorkloadError: they do not fit the model.
            UserCodeError: the model's own loading hooks raised.
        """
        if self._model is None:
            return
        file, where = self._model
        state = _unwrapped(_state_dict(self._content(file, where), where, file))
        with user.running(f"{where}: loading {file.name} into the {type(model).__name__}"):
            problems = _load(model, state)
        if problems:
            lines = "\n  ".join(problems)
            raise WorkloadError(f"{where}: {file.name} does not fit the {type(model).__name__}\n  {lines}")

    def load_training(self, model: nn.Module, training: Training, grouping: str) -> tuple[str, ...]:
        """Loads the states of optimizers and schedulers; says of what there is no state, or nothing to put it into.

        Args:
            model: its parameters are the optimizers'.
            training: what to load into.
            grouping: how a config groups parameters, which a training script need not have done.

        Raises:
            WorkloadError: they do not fit.
        """
        optimizer, scheduler = self._parts.get("optimizer"), self._parts.get("scheduler")
        if optimizer is not None:
            load_optimizers(optimizer, training.optimizers, model, grouping)
        known = [one for one in training.schedules if isinstance(one.scheduler, torch.optim.lr_scheduler.LRScheduler)]
        if scheduler is not None and known:
            load_schedules(scheduler, known)
        elif scheduler is not None:
            return (f"{scheduler.where} is left aside: no scheduler is named, and the learning rate stays as it is",)
        elif optimizer is not None and any(one.every for one in known):
            return ("the checkpoint has no state of a learning-rate scheduler: it begins anew",)
        return ()

    def scaler(self) -> Mapping[str, Any] | None:
        """The state of the loss scaler as ``GradScaler.load_state_dict`` takes it; None where there is none.

        Raises:
            WorkloadError: it is no such state.
        """
        saved = self._parts.get("scaler")
        return None if saved is None else scaler_state(saved)

    def _content(self, file: Path, where: str) -> Any:
        if file not in self._read:
            self._read[file] = _read(self._folder / file, where)
        return self._read[file]

    def _part(self, part: Part, files: Sequence[Path], where: str) -> SavedPart:
        states: list[Any] = []
        for file in files:
            content = self._content(file, where)
            is_bare = isinstance(content, Mapping) and _MARKS[part] in content
            found = (content,) if is_bare else _inside(content, part)
            if not found:
                keys = f" with the keys {listed(map(_text, content), most=8)}" if isinstance(content, Mapping) else ""
                raise WorkloadError(
                    f"{where}: {file.name} holds no state of {_AN[part]} but a {type(content).__name__}{keys}; "
                    f"allowed: its state_dict(), at the top or under {', '.join(_NESTINGS[part])}"
                )
            states += found
        return SavedPart(tuple(states), f"{where}: {listed(file.name for file in files)}")


_AN: Mapping[Part, str] = {"optimizer": "an optimizer", "scaler": "a loss scaler", "scheduler": "a scheduler"}


def _text(key: object) -> str:
    return repr(key)[:80] if not isinstance(key, str) else key[:80]


def _inside(content: Any, part: Part) -> tuple[Any, ...]:
    """The states of a part in what a training script has saved; empty where there are none, or only empty ones."""
    saved = content if isinstance(content, Mapping) else {}
    for key in _NESTINGS[part]:
        value = saved.get(key)
        states = (value,) if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
        if any(isinstance(state, Mapping) and any(_has_any(inner) for inner in state.values()) for state in states):
            return tuple(states)
    return ()


def _has_any(value: Any) -> bool:
    return not isinstance(value, (Mapping, list, tuple)) or len(value) > 0


# Files


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
        return load_file(path, device="cpu")
    except SafetensorError as error:
        raise WorkloadError(f"{where}: {path.name} is no safetensors file: {error}") from None


# The model


def _state_dict(content: Any, where: str, path: Path) -> Mapping[str, Any]:
    """The mapping of names to tensors, also where a training script saved more than that."""
    saved = content if isinstance(content, Mapping) else {}
    inner = next((saved[key] for key in _NESTINGS["model"] if isinstance(saved.get(key), Mapping)), saved)
    if any(isinstance(value, torch.Tensor) for value in inner.values()):
        odd = [key for key in inner if not isinstance(key, str)]
        if odd:
            raise WorkloadError(f"{where}: {path.name} holds a tensor under {odd[0]!r:.80}; allowed: names to tensors")
        return dict(inner)
    keys = f" with the keys {listed(map(_text, saved), most=8)}" if saved else ""
    kind = type(content).__name__
    raise WorkloadError(
        f"{where}: {path.name} holds no state dict but a {kind}{keys}; "
        f"allowed: names to tensors, at the top or under {', '.join(_NESTINGS['model'])}"
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

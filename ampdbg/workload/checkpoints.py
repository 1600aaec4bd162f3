"""Loads a checkpoint into the model: tensors only, from .pt or .safetensors, every misfit in one message."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ampdbg.config.targets import listed
from ampdbg.errors import WorkloadError
from ampdbg.workload.user_code import UserCode

# Where training scripts put the state dict within what they save.
_NESTINGS = ("state_dict", "model_state_dict", "model")
# What DistributedDataParallel and torch.compile put before every name.
_WRAPPERS = ("module.", "_orig_mod.")


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
        reason = (str(error).strip().partition("\n")[0] or type(error).__name__).rstrip(".")
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
    inner = next((content[key] for key in _NESTINGS if _is_mapping(content) and _is_mapping(content.get(key))), content)
    if _is_mapping(inner) and any(isinstance(value, torch.Tensor) for value in inner.values()):
        odd = [key for key in inner if not isinstance(key, str)]
        if odd:
            raise WorkloadError(f"{where}: {path.name} holds a tensor under {odd[0]!r:.80}; allowed: names to tensors")
        return dict(inner)
    keys = f" with the keys {listed(map(str, content))}" if _is_mapping(content) else ""
    kind = type(content).__name__
    raise WorkloadError(
        f"{where}: {path.name} holds no state dict but a {kind}{keys}; "
        f"allowed: names to tensors, at the top or under {', '.join(_NESTINGS)}"
    )


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


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

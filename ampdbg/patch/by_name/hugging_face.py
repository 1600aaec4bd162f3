"""What ``_keep_in_fp32_modules`` of transformers would do for a set of pins, without importing transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

BASE = "PreTrainedModel"
ATTRIBUTE = "_keep_in_fp32_modules"


def keep_in_fp32_note(model: nn.Module, names: Sequence[str]) -> str:
    """A sentence for pins that are layers with weights inside a ``transformers.PreTrainedModel``; else "".

    Args:
        model: the root of the names.
        names: pins, as the config takes them.
    """
    modules = dict(model.named_modules())
    pinned = [modules[name] for name in names if name in modules]
    if not names or len(pinned) < len(names) or not all(map(_is_layer, pinned)):
        return ""
    owners = {_owner(name, modules) for name in names}
    parts = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    if None in owners or not all(part and not part.isdigit() for part in parts):
        return ""
    kinds = " and ".join(sorted({type(owner).__name__ for owner in owners}))
    listed = "[" + ", ".join(f'"{part}"' for part in parts) + "]"
    if all(set(parts) <= set(getattr(owner, ATTRIBUTE, None) or ()) for owner in owners):
        return (
            f"{kinds} has {ATTRIBUTE} for this already: it keeps the weights in FP32 when a checkpoint is loaded in "
            "half, and does nothing under autocast"
        )
    beside = _beside(parts, names, modules)
    more = f" (and of {beside} more modules of that name)" if beside else ""
    return (
        f"for {kinds} loaded in half (dtype=torch.float16), {ATTRIBUTE} = {listed} in the class keeps these weights"
        f"{more} in FP32 too; under autocast it does nothing"
    )


def _is_layer(module: nn.Module) -> bool:
    return not any(True for _ in module.children()) and any(True for _ in module.parameters(recurse=False))


def _owner(name: str, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """The outermost model of transformers that holds the module: its class decides how weights are loaded."""
    return next((modules[above] for above in _from_the_root(name) if _is_pretrained(modules[above])), None)


def _from_the_root(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(len(parts)))


def _is_pretrained(module: nn.Module) -> bool:
    return any(kind.__name__ == BASE and kind.__module__.startswith("transformers.") for kind in type(module).__mro__)


def _beside(parts: Sequence[str], names: Sequence[str], modules: Mapping[str, nn.Module]) -> int:
    return sum(name.rpartition(".")[2] in parts and _is_layer(modules[name]) for name in set(modules) - set(names))

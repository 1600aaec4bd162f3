"""What an op's schema says of it: its name, whether it is a view, what it writes, which arguments are numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class OpTraits:
    """``written`` and ``numeric`` are argument names with their positions: tensors that the op writes into, and
    arguments whose plain numbers are values and not sizes or dimensions. ``allocates`` says that what it
    returns is memory as it was found, ``overwrites`` that it does not read what it writes over."""

    name: str
    is_view: bool
    allocates: bool
    overwrites: bool
    written: tuple[tuple[int, str], ...]
    numeric: tuple[tuple[int, str], ...]


_known: dict[Any, OpTraits] = {}

_ALLOCATING = frozenset("empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize_".split())
_OVERWRITING = frozenset("copy_ fill_ zero_ uniform_ normal_ bernoulli_ random_ exponential_ log_normal_".split())
_TAKES_A_VALUE = ("number", "Tensor", "Optional[number]", "Optional[Tensor]", "float", "Optional[float]")


def traits_of(op: Any) -> OpTraits:
    """The traits of an op overload, looked up once."""
    known = _known.get(op)
    if known is None:
        known = _known[op] = _read(op)
    return known


def _read(op: Any) -> OpTraits:
    arguments = [(position, argument) for position, argument in enumerate(op._schema.arguments)]
    base_name = op._schema.name.rpartition("::")[2]
    return OpTraits(
        name=str(op),
        is_view=_is_view(op, base_name),
        allocates=base_name in _ALLOCATING,
        overwrites=base_name in _OVERWRITING or any(a.is_out for _, a in arguments),
        written=tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write),
        numeric=tuple((i, a.name) for i, a in arguments if str(a.type) in _TAKES_A_VALUE),
    )


def _is_view(op: Any, base_name: str) -> bool:
    # _unsafe_view only promises that nobody else looks at what it views; what lift_fresh returns is no view of
    # anything but a tensor that the user's code wrote out.
    if base_name in ("_unsafe_view", "lift_fresh"):
        return base_name == "_unsafe_view"
    aliases = [item.alias_info for item in op._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def numbers_in(traits: OpTraits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[float]:
    """The plain numbers that were given as values."""
    values = (_argument(position, name, args, kwargs) for position, name in traits.numeric)
    return [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]


def written_by(traits: OpTraits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that the op writes into."""
    return tensors_in([_argument(position, name, args, kwargs) for position, name in traits.written])


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of nested lists and tuples."""
    return list(_tensors(value))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _argument(position: int, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[position] if position < len(args) else kwargs.get(name)

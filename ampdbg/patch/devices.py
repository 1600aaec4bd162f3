"""The tensor that a block takes its device from: ``x.device.type`` holds on any machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import libcst as cst

from ampdbg.patch.half_casts import PinnedStatement
from ampdbg.patch.modes import viewed
from ampdbg.patch.steps import value_of
from ampdbg.source.bindings import Bindings, dotted
from ampdbg.source.expressions import assigned_codes, code_of, find, names_bound_inside, spelled, walk
from ampdbg.source.source_text import EditError

_TENSOR_TYPES = ("torch.Tensor", "Tensor")


def device_type_of(pinned: Sequence[PinnedStatement], cast: Sequence[str]) -> str:
    """``x.device.type`` of a tensor that is there when the block is entered, a plain name where there is one.

    Args:
        pinned: what stands in the block.
        cast: the expressions that are cast in it; they are tensors.

    Raises:
        EditError: no such tensor has a name.
    """
    inner = {name for item in pinned for name in names_bound_inside(item.statement)}
    bindings = pinned[0].names.bindings
    local, uncertain = bindings.local, (bindings.maybe_numbers | bindings.maybe_none) - _asked(pinned)
    # A name that the reader knows, rather than one that the edit has just introduced or an attribute.
    read = sorted(_tensors_read(pinned, cast), key=lambda text: (text not in local, not text.isidentifier()))
    named = (text for text in read if "(" not in text)
    candidates = (text for text in (*named, *_others(pinned)) if _root(text) not in inner | uncertain)
    found = next(candidates, "")
    if not found:
        raise EditError("no tensor that the device could be taken from has a name there")
    return f"{found}.device.type"


def _asked(pinned: Sequence[PinnedStatement]) -> set[str]:
    """The names that are asked for a method or an attribute: tensors, whatever else they may be elsewhere."""
    attributes = (attribute for item in pinned for attribute in find(item.statement, cst.Attribute))
    return {attribute.value.value for attribute in attributes if isinstance(attribute.value, cst.Name)}


def _root(text: str) -> str:
    text = text.removeprefix("next(iter(")
    return text.partition(".")[0].partition("[")[0].strip()


def _tensors_read(pinned: Sequence[PinnedStatement], cast: Sequence[str]) -> list[str]:
    """Tensors that the statements read before they assign to them, as the source spells them, in its order."""
    found: list[str] = []
    made: set[str] = set()
    for item in pinned:
        known = item.names.half | item.names.full | set(cast)
        value = value_of(item.statement)
        for node in walk(value) if value is not None else ():
            if isinstance(node, (cst.Name, cst.Attribute, cst.Subscript)) and (code := code_of(node)) not in made:
                found += [spelled(node)] if code in known else []
        made |= assigned_codes(item.statement)
    return found


def _others(pinned: Sequence[PinnedStatement]) -> Iterator[str]:
    """What a pinned call is given; parameters annotated as tensors; the first element that a comprehension takes."""
    bindings = pinned[0].names.bindings
    yield from (name for item in pinned for name in _given(item))
    yield from (name for name in bindings.parameters if _is_tensor_parameter(name, bindings))
    seen = frozenset().union(*(item.names.half | item.names.full for item in pinned))
    made: set[str] = set()
    for item in pinned:
        for loop in find(item.statement, cst.CompFor):
            iterated = loop.iter.args[0].value if isinstance(loop.iter, cst.Call) and loop.iter.args else loop.iter
            if isinstance(iterated, cst.Name) and iterated.value not in made:
                yield f"{iterated.value}[0]"
            elif (held := viewed(iterated)) in bindings.local - made:
                yield f"next(iter({held}.values()))"
        made |= assigned_codes(item.statement)
    # Nothing that the block reads: a parameter that holds a tensor elsewhere in the function.
    yield from (name for name in bindings.parameters if name in seen)


def _given(pinned: PinnedStatement) -> Iterator[str]:
    """The plain names among the arguments of the pinned calls: tensors, as far as can be told."""
    for call in find(pinned.statement, cst.Call):
        if code_of(call.func) in pinned.callees:
            yield from (
                arg.value.value
                for arg in call.args
                if isinstance(arg.value, cst.Name) and pinned.names.is_tensor(arg.value)
            )


def _is_tensor_parameter(name: str, bindings: Bindings) -> bool:
    annotation = bindings.parameters[name].annotation
    return annotation is not None and dotted(annotation.annotation) in _TENSOR_TYPES

"""A whole function in FP32: its body in a block with autocast off, its half arguments cast first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import libcst as cst

from ampdbg.patch.blocks import autocast_in, rebinding, with_autocast_off
from ampdbg.patch.casts import cast, root_name
from ampdbg.patch.regions import writes_in_place
from ampdbg.patch.source_pins import FunctionPin
from ampdbg.source.bindings import Bindings
from ampdbg.source.expressions import walk
from ampdbg.source.imports import disables_autocast
from ampdbg.source.source_file import EditError, functions_in, parts_of


def function_of(module: cst.Module, pin: FunctionPin) -> cst.FunctionDef:
    """The function that a pin names.

    Raises:
        EditError: there is no such function, or several.
    """
    found = [node for qualname, node in functions_in(module) if qualname == parts_of(pin.function)]
    if len(found) != 1:
        count = "no function" if not found else f"{len(found)} functions"
        raise EditError(f"the file has {count} named {pin.function}")
    return found[0]


def with_body_in_fp32(
    function: cst.FunctionDef, updated: cst.FunctionDef, pin: FunctionPin, bindings: Bindings
) -> tuple[cst.FunctionDef, bool]:
    """The function with its body wrapped, and whether the file must import torch for it.

    Raises:
        EditError: it is a coroutine or a generator, no argument of it is a tensor, or it writes into one.
    """
    _refuse_suspended(function)
    body = _as_block(updated.body)
    first = 1 if function.get_docstring() is not None else 0
    statements = list(body.body[first:])
    if _is_off_already(statements, bindings):
        return updated, False
    names = half_parameters(pin, bindings)
    _refuse_writes(function, names, bindings)
    autocast, needs_import = autocast_in(bindings)
    device_type = f"{names[0]}.device.type"
    indent = body.indent or bindings.module.default_indent
    block = with_autocast_off(autocast, device_type, [*_casts(names, bindings), *statements], indent)
    # Comments at the end of the function stay in the block that they were written in.
    block = block.with_changes(body=block.body.with_changes(footer=body.footer))
    wrapped = body.with_changes(body=[*body.body[:first], block], footer=())
    return updated.with_changes(body=wrapped), needs_import


def half_parameters(pin: FunctionPin, bindings: Bindings) -> list[str]:
    """The parameters to cast, in their order.

    Raises:
        EditError: one that held a half tensor is no parameter by name, or there is none.
    """
    names = [name for name in bindings.parameters if name not in ("self", "cls")]
    if unknown := [name for name in pin.half_names if name not in names]:
        raise EditError(f"{', '.join(unknown)} is no named parameter, so the function cannot cast it")
    if not pin.half_names:
        raise EditError("none of its parameters held a half tensor")
    return [name for name in names if name in pin.half_names]


def _casts(names: Sequence[str], bindings: Bindings) -> list[cst.BaseStatement]:
    """``x, y = x.float(), y.float()``, and for what may be None or a number a condition of its own."""
    optional = [name for name in names if bindings.parameters[name].default is not None]
    always = [name for name in names if name not in optional]
    lines: list[cst.BaseStatement] = [rebinding(always)] if always else []
    for name in optional:
        assignment = cst.Assign([cst.AssignTarget(cst.Name(name))], cast(cst.Name(name)))
        body = cst.IndentedBlock([cst.SimpleStatementLine([assignment])])
        is_number = name in bindings.maybe_numbers
        is_there = f"not isinstance({name}, (int, float))" if is_number else f"{name} is not None"
        lines.append(cst.If(cst.parse_expression(is_there), body))
    return lines


def _refuse_writes(function: cst.FunctionDef, names: Sequence[str], bindings: Bindings) -> None:
    """What is written into an argument reaches the caller; written into its cast, it would not."""
    for name in names:
        same = {name, *bindings.aliases(name)}
        if any(root_name(target) in same for target in _written_into(function.body)):
            raise EditError(f"it writes into its argument {name} in place; assign the result to a new name first")


def _written_into(body: cst.CSTNode) -> Iterator[cst.CSTNode]:
    for item in walk(body):
        match item:
            case cst.AugAssign(target=target) | cst.AssignTarget(target=cst.Subscript() as target):
                yield target
            case cst.Call() if writes_in_place(item):
                yield item.func
                yield from (arg.value for arg in item.args)


def _refuse_suspended(function: cst.FunctionDef) -> None:
    if function.asynchronous is not None:
        raise EditError("it is a coroutine, and other code would run with autocast off")
    if any(isinstance(node, cst.Yield) for node in walk(function.body)):
        raise EditError("it is a generator, and the caller's code would run with autocast off")


def _as_block(body: cst.BaseSuite) -> cst.IndentedBlock:
    if isinstance(body, cst.IndentedBlock):
        return body
    lines = [cst.SimpleStatementLine([small]) for small in body.body if isinstance(small, cst.BaseSmallStatement)]
    return cst.IndentedBlock(lines)


def _is_off_already(statements: Sequence[cst.CSTNode], bindings: Bindings) -> bool:
    return (
        len(statements) == 1
        and isinstance(statements[0], cst.With)
        and any(disables_autocast(item.item, bindings.imports) for item in statements[0].items)
    )

"""Edits that keep constants such as mask values and eps within the range of half.

The edited code computes the same in FP32: there ``max(eps, torch.finfo(x.dtype).tiny)`` is ``eps``. For a softmax, all
mask values below -1e9 are equivalent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import libcst as cst
import torch

from ampdbg.formats import FLOAT16
from ampdbg.patch.edits import Edited, Refused, torch_in
from ampdbg.patch.statements import called_name, with_replaced
from ampdbg.source.expressions import (
    Bindings,
    bare,
    canonical,
    code_of,
    dotted,
    find,
    keyword_of,
    names_read,
    spelled,
    walk,
    with_imported,
)
from ampdbg.source.source_file import EditError, read_source

ROUNDS_TO_ONE = 1 - 2.0 ** -(FLOAT16.precision + 1)
"""From this value on, a number rounds to 1 in half. Half has no number between 1 - 2**-11 and 1."""


@dataclass(frozen=True)
class ConstantRole:
    """A use of a constant, and its replacement beside a half tensor.

    A number that ``is_lost`` in half is replaced by ``number``, and another expression that ``may_be`` lost by
    ``named``. In these templates ``{}`` is the constant, ``{finfo}`` the tensor's, and ``{end}`` min or max, by the
    number's sign.
    """

    is_lost: Callable[[float], bool]
    number: str
    may_be: Callable[[_Constants, cst.BaseExpression, cst.BaseExpression], bool]
    named: str = ""


def _is_beyond(value: float) -> bool:
    return FLOAT16.largest < abs(value) < math.inf


def _is_eps(constants: _Constants, constant: cst.BaseExpression, other: cst.BaseExpression) -> bool:
    return "eps" in dotted(constant).rpartition(".")[2].lower()


FILLED = ConstantRole(
    _is_beyond,
    "{finfo}.{end}",
    lambda constants, constant, owner: constants.may_be_number(constant) and "inf" not in spelled(constant),
    "max({}, {finfo}.min)",
)
NUMBER = replace(FILLED, may_be=lambda constants, constant, owner: "inf" not in spelled(constant))
"""The fill value of a method that accepts only a number."""

MULTIPLIED = ConstantRole(
    lambda value: value < 0 and _is_beyond(value),
    "({finfo}.min / 2)",
    lambda constants, constant, other: constants.may_be_number(constant) and constants.is_tensor(other),
    "max({}, {finfo}.min / 2)",
)
"""A mask value in a product. Half of the range is left for the term that it is added to."""

SUBTRACTED = ConstantRole(
    lambda value: value > 0 and _is_beyond(value), "({finfo}.max / 2)", lambda constants, constant, other: False
)
LEAST = ConstantRole(
    lambda value: 0.0 < value < FLOAT16.smallest_subnormal, "max({}, {finfo}.tiny)", _is_eps, "max({}, {finfo}.tiny)"
)
"""An eps, recognized by its size or its name."""

GREATEST = ConstantRole(
    lambda value: ROUNDS_TO_ONE <= value < 1, "min({}, 1 - {finfo}.eps)", lambda constants, constant, other: False
)
SHORT_OF_ONE = ConstantRole(lambda value: False, "", _is_eps, "max({}, {finfo}.eps)")
"""The distance from 1 of a probability's upper bound."""

TENSOR_FACTORIES = {"tensor": 0, "scalar_tensor": 0, "full": 1}
"""Functions that create a tensor from a number and take a dtype, each with the position of the number."""

BOUNDS = ((LEAST, 0, "min"), (GREATEST, 1, "max"))

ARGUMENTS: Mapping[str, Sequence[tuple[ConstantRole, int, str]]] = {
    **dict.fromkeys(["masked_fill", "masked_fill_"], ((NUMBER, 1, "value"),)),
    "new_full": [(FILLED, 1, "fill_value")],
    "full_like": [(FILLED, 0, "fill_value")],
    "fill_": [(FILLED, 0, "value")],
    "new_tensor": [(FILLED, 0, "data")],
    **dict.fromkeys(["clamp", "clamp_", "clip", "clip_"], BOUNDS),
    **dict.fromkeys(["clamp_min", "clamp_min_"], ((LEAST, 0, "min"),)),
    **dict.fromkeys(["clamp_max", "clamp_max_"], ((GREATEST, 0, "max"),)),
}
"""Methods that take a constant, with its position and keyword. torch has the same functions."""

OPERANDS: Mapping[type[cst.CSTNode], ConstantRole] = {cst.Multiply: MULTIPLIED, cst.Add: LEAST}

HALF_ENDINGS = ("dtype", "float16", "half")
"""Endings of the spelling of a half dtype, as in ``x.dtype`` and ``torch.float16``."""

ConstantUse = tuple[ConstantRole, cst.BaseExpression | None, cst.BaseExpression]
"""The role, the constant (None if it is omitted), and the tensor expression that it is combined with."""

Replacements = Iterator[tuple[cst.BaseExpression, str]]
"""Constants, each with the source of its replacement."""

NOTHING = "the line has no constant that can be kept within the range of half"

LIMITS = {"finfo": torch.finfo, **{name: held for name, held in vars(torch).items() if isinstance(held, torch.dtype)}}

NUMERIC: Mapping[str, Any] = {
    **{f"{module}.{name}": held for module in ("torch", "numpy") for name, held in LIMITS.items()},
    **dict.fromkeys(("torch", "numpy"), SimpleNamespace(**LIMITS)),
}
"""Names that a constant expression may use, by the module they come from, with torch's dtypes for NumPy's."""


def edit_constants(source: bytes, lines: Collection[int], half: Collection[str] = ()) -> Edited:
    """Keep the constants of statements within the range of the half tensors that they are combined with.

    A mask value out of range becomes ``torch.finfo(x.dtype).min``. In a product it becomes half of that, so that adding
    to it stays in range. A mask created elsewhere is clamped where it is cast to half. A divisor's lower bound, or a
    term added to it, becomes at least ``torch.finfo(x.dtype).tiny``.

    ``lines`` has a line of each statement, from 1, and ``half`` the expressions there that held half tensors.
    """
    line, needs_import = 0, False
    new: dict[int, cst.BaseExpression] = {}
    try:
        file = read_source(source)
        for line in lines:
            located = file.at(line)
            name, is_missing = torch_in(located.bindings)
            constants = _Constants(located.bindings, frozenset(half), name)
            found = dict(constants.replaced(located.line))
            # A name may be a number or a tensor, so names are edited only if no literal number is.
            numbers = {constant: text for constant, text in found.items() if constants.value(constant) is not None}
            found = numbers or dict(constants.clamped(located.line)) or found
            if not found:
                raise EditError(NOTHING, line)
            new |= {id(constant): cst.parse_expression(text) for constant, text in found.items()}
            needs_import |= is_missing
        module = with_replaced(file.module, new)
        after = file.with_module(with_imported(module, "torch") if needs_import else module)
    except EditError as error:
        return Edited(source, (Refused(error.line or line, str(error)),))
    return Edited(after, ())


@dataclass(frozen=True)
class _Constants:
    """The constants of a statement; ``half`` are expressions with half tensors, ``torch`` is torch's local name."""

    bindings: Bindings
    half: frozenset[str]
    torch: str

    def value(self, node: cst.BaseExpression) -> float | None:
        """Return the value of a numeric expression such as ``-10**9`` or ``np.finfo(np.float32).min``, or None."""
        imports = self.bindings.imports.items()
        known = {"__builtins__": {"float": float}} | {name: NUMERIC[of] for name, of in imports if of in NUMERIC}
        try:
            return float(eval(code_of(node), known))
        except Exception:  # noqa: BLE001 - it contains another name, or is not a real number
            return None

    def replaced(self, statement: cst.CSTNode) -> Replacements:
        """Yield each constant that half cannot hold, with its replacement."""
        cast = {id(node) for owner, _ in self.clamped(statement) for node in walk(owner)}
        for node in walk(statement):
            yield from self._made(node)
            for role, constant, other in self._positions(node, cast):
                # In `1 - p`, no eps that half can hold helps: from p = 0.9998 on, p rounds to 1 in half.
                is_in_vain = role is LEAST and self._taken_from_one(other) is not None
                if constant is not None and not is_in_vain and (tensor := self._tensor_of(other)):
                    yield from self._within(role, constant, other, f"{tensor}.dtype")

    def _within(
        self, role: ConstantRole, constant: cst.BaseExpression, other: cst.BaseExpression, dtype: str
    ) -> Replacements:
        """Yield the replacement of a constant beside a tensor of this dtype, if one is needed."""
        match constant:
            case cst.Call(func=cst.Attribute(attr=cst.Name(value="tensor")), args=[cst.Arg(value=inner)]):
                constant = inner
        value = self.value(constant)
        if value is None:
            is_replaced, text, end = role.may_be(self, constant, other), role.named, ""
        else:
            is_replaced, text, end = role.is_lost(value), role.number, "min" if value < 0 else "max"
        if is_replaced:
            yield constant, text.format(spelled(constant), finfo=f"{self.torch}.finfo({dtype})", end=end)

    def _positions(self, node: cst.CSTNode, cast: Collection[int]) -> Iterator[ConstantUse]:
        """Yield the uses of constants in the node itself, without products in a mask that is ``cast`` to half."""
        match node:
            case cst.Call(func=cst.Attribute(value=owner, attr=cst.Name(value=name)), args=args):
                yield from self._arguments(name, owner, args)
            case cst.Assign(targets=[cst.AssignTarget(target=cst.Subscript(value=owner))], value=value):
                yield FILLED, value, owner
            case cst.BinaryOperation(
                operator=cst.Subtract(), right=cst.BinaryOperation(left=one, operator=cst.Multiply(), right=other)
            ):
                yield SUBTRACTED, one, other
                yield SUBTRACTED, other, one
            case cst.BinaryOperation(left=one, operator=operator, right=other) if type(operator) in OPERANDS:
                role = OPERANDS[type(operator)]
                yield from ((role, one, other), (role, other, one)) if id(node) not in cast else ()

    def _arguments(self, name: str, owner: cst.BaseExpression, args: Sequence[cst.Arg]) -> Iterator[ConstantUse]:
        if name == "where" and len(args) == 3:
            yield FILLED, args[1].value, args[2].value
            yield FILLED, args[2].value, args[1].value
        if self.bindings.origin(owner) == "torch" and args:
            owner, args = args[0].value, args[1:]
        for role, index, keyword in ARGUMENTS.get(name, ()):
            constant = _argument(args, index, keyword)
            yield role, constant, owner
            if role is GREATEST and constant is not None:
                yield SHORT_OF_ONE, self._taken_from_one(constant), owner

    def _made(self, node: cst.CSTNode) -> Replacements:
        """Yield the number from which a call creates a tensor, if the call's dtype may be half."""
        if isinstance(node, cst.Call) and (name := called_name(node)) in TENSOR_FACTORIES:
            constant = _argument(node.args, TENSOR_FACTORIES[name], "fill_value")
            dtype = _argument(node.args, len(node.args), "dtype")
            if constant and dtype and spelled(dtype).endswith(HALF_ENDINGS):
                yield from self._within(FILLED, constant, dtype, spelled(dtype))

    def clamped(self, statement: cst.CSTNode) -> Replacements:
        """Yield each FP32 mask that is cast to half, clamped so that adding to it stays in range."""
        for call in find(statement, cst.Call):
            match call:
                case cst.Call(func=cst.Attribute(value=owner, attr=cst.Name(value=name)), args=args):
                    dtype = self._dtype_of(name, args)
                    if dtype and not self.is_tensor(owner):
                        mask = f"({spelled(owner)})" if owner.lpar else spelled(owner)
                        yield owner, f"{mask}.clamp(min={self.torch}.finfo({dtype}).min / 2)"

    def _dtype_of(self, name: str, args: Sequence[cst.Arg]) -> str:
        """Return the half dtype that a call casts to, or "" if it is not such a cast."""
        to = _argument(args, 0, "dtype")
        text = "" if to is None else spelled(to)
        match name:
            case "half":
                return f"{self.torch}.float16"
            case "to" if text.endswith(HALF_ENDINGS):
                return text
            case "to" if canonical(text) in self.half:
                return f"{text}.dtype"
            case "type_as" if text:
                return f"{text}.dtype"
        return ""

    def may_be_number(self, node: cst.BaseExpression) -> bool:
        return bool(dotted(node)) and not self.is_tensor(node)

    def is_tensor(self, node: cst.BaseExpression) -> bool:
        return bool(self.half & {code_of(item) for item in walk(node) if isinstance(item, cst.BaseExpression)})

    def _tensor_of(self, node: cst.BaseExpression) -> str:
        """Return a name or attribute in the expression that seems to hold a half tensor, or ""."""
        parts = [item for item in walk(node) if isinstance(item, (cst.Name, cst.Attribute)) and dotted(item)]
        seen = (spelled(item) for item in parts if code_of(item) in self.half)
        bindings = self.bindings
        local = bindings.local - bindings.maybe_plain_values - bindings.imports.keys() - {"self", "cls"}
        read = names_read(node) & local
        plain = (item.value for item in parts if isinstance(item, cst.Name) and item.value in read)
        return next(seen, "") or next(plain, "")

    def _taken_from_one(self, node: cst.BaseExpression) -> cst.BaseExpression | None:
        """Return ``p`` if the expression is ``1 - p``, else None."""
        match bare(node):
            case cst.BinaryOperation(left=one, operator=cst.Subtract(), right=taken) if self.value(one) == 1:
                return taken
        return None


def _argument(args: Sequence[cst.Arg], index: int, keyword: str) -> cst.BaseExpression | None:
    named = [arg.value for arg in args if keyword_of(arg) == keyword]
    plain = [arg.value for arg in args if not (keyword_of(arg) or arg.star)]
    return next(iter((*named, *plain[index:])), None)

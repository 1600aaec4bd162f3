"""Edits that keep constants such as mask values and eps within the range of half.

The edited code computes the same in FP32: there ``max(eps, torch.finfo(x.dtype).tiny)`` is ``eps``. For a softmax, all
mask values below -1e9 are equivalent.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from ampdbg.formats import FLOAT16
from ampdbg.patch.edits import Edited, Refused, torch_in
from ampdbg.patch.statements import called_name, canonical
from ampdbg.source.document import Document
from ampdbg.source.edits import Edit, Fix, applied, replaced
from ampdbg.source.expressions import argument, walk
from ampdbg.source.names import Bindings, dotted
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
    may_be: Callable[[_Constants, ast.expr, ast.expr], bool]
    named: str = ""


def _is_beyond(value: float) -> bool:
    return FLOAT16.largest < abs(value) < math.inf


def _is_eps(constants: _Constants, constant: ast.expr, other: ast.expr) -> bool:
    return "eps" in dotted(constant).rpartition(".")[2].lower()


FILLED = ConstantRole(
    _is_beyond,
    "{finfo}.{end}",
    lambda constants, constant, owner: constants.may_be_number(constant) and "inf" not in ast.unparse(constant),
    "max({}, {finfo}.min)",
)
NUMBER = replace(FILLED, may_be=lambda constants, constant, owner: "inf" not in ast.unparse(constant))
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

OPERANDS: Mapping[type[ast.AST], ConstantRole] = {ast.Mult: MULTIPLIED, ast.Add: LEAST}

HALF_ENDINGS = ("dtype", "float16", "half")
"""Endings of the spelling of a half dtype, as in ``x.dtype`` and ``torch.float16``."""

ConstantUse = tuple[ConstantRole, ast.expr | None, ast.expr]
"""The role, the constant (None if it is omitted), and the tensor expression that it is combined with."""

Replacements = Iterator[tuple[ast.expr, str]]
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
    edits: list[Edit] = []
    try:
        file = read_source(source)
        for line in lines:
            located = file.at(line)
            name, is_missing = torch_in(located.bindings)
            constants = _Constants(file.document, located.bindings, frozenset(half), name)
            found = dict(constants.replaced(located.statement))
            # A name may be a number or a tensor, so names are edited only if no literal number is.
            numbers = {constant: text for constant, text in found.items() if constants.value(constant) is not None}
            found = numbers or dict(constants.clamped(located.statement)) or found
            if not found:
                raise EditError(NOTHING, line)
            edits += (replaced(file.document, constant, text) for constant, text in found.items())
            needs_import |= is_missing
    except EditError as error:
        return Edited(source, (Refused(error.line or line, str(error)),))
    after = applied(file.document, [Fix(tuple(edits), ("torch",) * needs_import)])
    return Edited(after.encode(file.encoding), ())


@dataclass(frozen=True)
class _Constants:
    """The constants of a statement; ``half`` are expressions with half tensors, ``torch`` is torch's local name."""

    document: Document
    bindings: Bindings
    half: frozenset[str]
    torch: str

    def value(self, node: ast.expr) -> float | None:
        """Return the value of a numeric expression such as ``-10**9`` or ``np.finfo(np.float32).min``, or None."""
        imports = self.bindings.imports.items()
        known = {"__builtins__": {"float": float}} | {name: NUMERIC[of] for name, of in imports if of in NUMERIC}
        try:
            return float(eval(ast.unparse(node), known))
        except Exception:  # noqa: BLE001 - it contains another name, or is not a real number
            return None

    def replaced(self, statement: ast.AST) -> Replacements:
        """Yield each constant that half cannot hold, with its replacement."""
        cast = {node for owner, _ in self.clamped(statement) for node in ast.walk(owner)}
        for node in walk(statement):
            yield from self._made(node)
            for role, constant, other in self._positions(node, cast):
                # In `1 - p`, no eps that half can hold helps: from p = 0.9998 on, p rounds to 1 in half.
                is_in_vain = role is LEAST and self._taken_from_one(other) is not None
                if constant is not None and not is_in_vain and (tensor := self._tensor_of(other)):
                    yield from self._within(role, constant, other, f"{tensor}.dtype")

    def _within(self, role: ConstantRole, constant: ast.expr, other: ast.expr, dtype: str) -> Replacements:
        """Yield the replacement of a constant beside a tensor of this dtype, if one is needed."""
        match constant:
            case ast.Call(func=ast.Attribute(attr="tensor"), args=[inner]):
                constant = inner
        value = self.value(constant)
        if value is None:
            is_replaced, text, end = role.may_be(self, constant, other), role.named, ""
        else:
            is_replaced, text, end = role.is_lost(value), role.number, "min" if value < 0 else "max"
        if is_replaced:
            yield constant, text.format(self.document.spelled(constant), finfo=f"{self.torch}.finfo({dtype})", end=end)

    def _positions(self, node: ast.AST, cast: Collection[ast.AST]) -> Iterator[ConstantUse]:
        """Yield the uses of constants in the node itself, without products in a mask that is ``cast`` to half."""
        match node:
            case ast.Call():
                yield from self._arguments(node)
            case ast.Assign(targets=[ast.Subscript(value=owner)], value=value):
                yield FILLED, value, owner
            case ast.BinOp(op=ast.Sub(), right=ast.BinOp(left=one, op=ast.Mult(), right=other)):
                yield SUBTRACTED, one, other
                yield SUBTRACTED, other, one
            case ast.BinOp(left=one, op=operator, right=other) if type(operator) in OPERANDS:
                role = OPERANDS[type(operator)]
                yield from ((role, one, other), (role, other, one)) if node not in cast else ()

    def _arguments(self, call: ast.Call) -> Iterator[ConstantUse]:
        match call:
            case ast.Call(func=ast.Attribute(attr="where"), args=[_, one, other]):
                yield FILLED, one, other
                yield FILLED, other, one
            case ast.Call(func=ast.Attribute(value=owner, attr=name), args=args):
                is_torchs = self.bindings.origin(owner) == "torch" and bool(args)
                for role, index, keyword in ARGUMENTS.get(name, ()):
                    constant, tensor = argument(call, keyword, index + is_torchs), args[0] if is_torchs else owner
                    yield role, constant, tensor
                    if role is GREATEST and constant is not None:
                        yield SHORT_OF_ONE, self._taken_from_one(constant), tensor

    def _made(self, node: ast.AST) -> Replacements:
        """Yield the number from which a call creates a tensor, if the call's dtype may be half."""
        if isinstance(node, ast.Call) and (name := called_name(node)) in TENSOR_FACTORIES:
            constant, dtype = argument(node, "fill_value", TENSOR_FACTORIES[name]), argument(node, "dtype")
            if constant and dtype and self.document.spelled(dtype).endswith(HALF_ENDINGS):
                yield from self._within(FILLED, constant, dtype, self.document.spelled(dtype))

    def clamped(self, statement: ast.AST) -> Replacements:
        """Yield each FP32 mask that is cast to half, clamped so that adding to it stays in range."""
        for node in walk(statement):
            match node:
                case ast.Call(func=ast.Attribute(value=owner, attr=name) as method):
                    dtype = self._dtype_of(name, argument(node, "dtype", 0))
                    if dtype and not self.is_tensor(owner):
                        mask = self.document.source(method).removesuffix(name)
                        yield method, f"{mask}clamp(min={self.torch}.finfo({dtype}).min / 2).{name}"

    def _dtype_of(self, name: str, to: ast.expr | None) -> str:
        """Return the half dtype that a call casts to, or "" if it is not such a cast."""
        text = "" if to is None else self.document.spelled(to)
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

    def may_be_number(self, node: ast.AST) -> bool:
        return bool(dotted(node)) and not self.is_tensor(node)

    def is_tensor(self, node: ast.AST) -> bool:
        return bool(self.half & {ast.unparse(one) for one in ast.walk(node) if isinstance(one, ast.expr)})

    def _tensor_of(self, node: ast.AST) -> str:
        """Return a name or attribute in the expression that seems to hold a half tensor, or ""."""
        parts = [one for one in walk(node) if isinstance(one, (ast.Name, ast.Attribute)) and dotted(one)]
        seen = (dotted(one) for one in parts if dotted(one) in self.half)
        bindings = self.bindings
        local = bindings.local - bindings.maybe_plain_values - bindings.imports.keys() - {"self", "cls"}
        plain = (one.id for one in parts if isinstance(one, ast.Name) and one.id in local)
        return next(seen, "") or next(plain, "")

    def _taken_from_one(self, node: ast.AST) -> ast.expr | None:
        """Return ``p`` if the expression is ``1 - p``, else None."""
        match node:
            case ast.BinOp(left=one, op=ast.Sub(), right=taken) if self.value(one) == 1:
                return taken
        return None

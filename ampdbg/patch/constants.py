"""Constants that half cannot hold, kept within its range where the code writes them: a mask's, an eps.

In FP32 the edited code computes what it did: ``max(eps, torch.finfo(x.dtype).tiny)`` is ``eps`` there, and to a softmax
one number below -1e9 is as good as another.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import libcst as cst

from ampdbg.formats import FLOAT16, FLOAT32
from ampdbg.patch.edits import Edited, Refused, torch_in
from ampdbg.patch.statements import Replaced
from ampdbg.source.expressions import Bindings, bare, code_of, dotted, find, names_read, spelled, walk, with_imported
from ampdbg.source.source_file import EditError, read_source

FILLS = {"masked_fill": 1, "masked_fill_": 1, "new_full": 1, "fill_": 0, "new_tensor": 0}
"""Methods that write a number into a tensor of their own kind, and which argument that is."""

MASKS = ("masked_fill", "masked_fill_")
"""Those of them that take nothing but a number."""

CREATES = {"tensor": 0, "scalar_tensor": 0, "full": 1}
"""Functions that make a tensor of a number, of a dtype in their arguments, and which argument the number is."""

LEAST_VALUES = ("clamp", "clamp_", "clamp_min", "clamp_min_", "clip", "clip_")
"""Methods whose first argument, or ``min``, is the least value that they leave; torch has them as functions too."""

GREATEST_VALUES = {"clamp": 1, "clamp_": 1, "clip": 1, "clip_": 1, "clamp_max": 0, "clamp_max_": 0}
"""Those that leave a greatest one, ``max``, and which argument that is."""

ROUNDS_TO_ONE = 1 - 2.0 ** -(FLOAT16.precision + 1)
"""From here on it is 1 in half, which has no number between 1 - 2**-11 and 1."""

FLOATS = ("float", "float32")
"""How torch's float32 is called."""

Replacements = Iterator[tuple[cst.BaseExpression, str]]
"""Constants, and what replaces each."""

NOTHING = "the line has no constant that can be kept within the range of half"


def edit_constants(source: bytes, lines: Collection[int], half: Collection[str] = ()) -> Edited:
    """Keeps the constants of statements within the range of the tensors that they are written into.

    A mask beyond it becomes ``torch.finfo(x.dtype).min``, and half of that where it is multiplied: what is added to
    it stays in range. A mask made elsewhere is clamped where it is cast to half. What is added to a divisor, or is its
    least value, becomes at least ``torch.finfo(x.dtype).tiny``.

    Args:
        source: the file's bytes.
        lines: a line of each statement, from 1.
        half: expressions that held half tensors there, as the source spells them.

    Returns:
        The new file, or the reason why it is as it was.
    """
    line, needs_import = 0, False
    new: dict[int, cst.BaseExpression] = {}
    try:
        file = read_source(source)
        for line in lines:
            located = file.at(line)
            bindings = Bindings(file.module, located.function)
            torch, is_missing = torch_in(bindings)
            constants = _Constants(bindings, frozenset(half), torch)
            found = dict(constants.replaced(located.line))
            # A name may be a number or a tensor: it is edited where no number is written out.
            numbers = {constant: text for constant, text in found.items() if _value(constant) is not None}
            found = numbers or dict(constants.clamped(located.line)) or found
            if not found:
                raise EditError(NOTHING, line)
            _refuse_comparisons(located.function or file.module)
            new |= {id(constant): cst.parse_expression(text) for constant, text in found.items()}
            needs_import |= is_missing
        module = file.module.visit(Replaced(new))
        after = file.with_module(with_imported(module, "torch") if needs_import else module)
    except EditError as error:
        return Edited(source, (Refused(error.line or line, str(error)),), changed=False)
    return Edited(after, (), after != source)


def _refuse_comparisons(code: cst.CSTNode) -> None:
    """What compares with a number beyond half would come to another result.

    Raises:
        EditError: the code does.
    """
    for comparison in find(code, cst.Comparison):
        parts = [comparison.left, *(target.comparator for target in comparison.comparisons)]
        if any((value := _value(part)) is not None and FLOAT16.largest < abs(value) < math.inf for part in parts):
            raise EditError(
                "the code compares with a number that half cannot hold; another number would change its meaning"
            )


@dataclass(frozen=True)
class _Constants:
    """The constants of a statement, in which ``half`` held half tensors; ``torch`` is how torch is called."""

    bindings: Bindings
    half: frozenset[str]
    torch: str

    @property
    def finfo(self) -> str:
        return f"{self.torch}.finfo"

    def replaced(self, statement: cst.CSTNode) -> Replacements:
        """Each constant that half cannot hold, and what replaces it."""
        cast = {id(node) for owner, _ in self.clamped(statement) for node in walk(owner)}
        for node in walk(statement):
            match node:
                case cst.Call(func=cst.Attribute(value=owner, attr=cst.Name(value=name)), args=args):
                    yield from self._in_call(name, owner, args)
                case cst.Assign(targets=[cst.AssignTarget(target=cst.Subscript(value=owner))], value=value):
                    yield from self._filled(value, owner)
                case cst.BinaryOperation(left=left, operator=cst.Multiply(), right=right) if id(node) not in cast:
                    yield from self._multiplied(left, right)
                    yield from self._multiplied(right, left)
                case cst.BinaryOperation(
                    operator=cst.Subtract(), right=cst.BinaryOperation(left=left, operator=cst.Multiply(), right=right)
                ):
                    yield from self._subtracted(left, right)
                    yield from self._subtracted(right, left)
                case cst.BinaryOperation(left=left, operator=cst.Add(), right=right):
                    yield from self._least(left, right)
                    yield from self._least(right, left)

    def clamped(self, statement: cst.CSTNode) -> Replacements:
        """A mask made in FP32, where it is cast to half: what is added to it there stays in range."""
        for call in find(statement, cst.Call):
            match call:
                case cst.Call(func=cst.Attribute(value=owner, attr=cst.Name(value=name)), args=args):
                    dtype = self._dtype_of(name, args)
                    if dtype and not self._is_tensor(owner):
                        mask = f"({spelled(owner)})" if owner.lpar else spelled(owner)
                        yield owner, f"{mask}.clamp(min={self.finfo}({dtype}).min / 2)"

    def _dtype_of(self, name: str, args: Sequence[cst.Arg]) -> str:
        """What a cast to half casts to; "" where a call is none."""
        if name == "half":
            return f"{self.torch}.float16"
        to = _argument(args, 0, "dtype") if name in ("to", "type_as") else None
        if to is None:
            return ""
        text = spelled(to)
        if name == "to" and text.endswith(("dtype", "float16", "half")):
            return text
        return f"{text}.dtype" if name == "type_as" or code_of(to) in self.half else ""

    def _in_call(self, name: str, owner: cst.BaseExpression, args: Sequence[cst.Arg]) -> Replacements:
        dtype = _argument(args, len(args), "dtype") if name in CREATES else None
        if dtype is not None and spelled(dtype).endswith(("dtype", "float16", "half")):
            yield from self._within(_argument(args, CREATES[name], "fill_value"), spelled(dtype))
        elif name in FILLS:
            yield from self._filled(_argument(args, FILLS[name], "value"), owner, is_number=name in MASKS)
        elif name in {*LEAST_VALUES, *GREATEST_VALUES}:
            yield from self._bounded(name, owner, args)
        elif name == "full_like" and args:
            yield from self._filled(_argument(args, 1, "fill_value"), args[0].value)
        elif name == "where" and len(args) == 3:
            yield from self._filled(args[1].value, args[2].value)
            yield from self._filled(args[2].value, args[1].value)

    def _bounded(self, name: str, owner: cst.BaseExpression, args: Sequence[cst.Arg]) -> Replacements:
        """The least and the greatest value that a method leaves, or torch's function of that name."""
        if self.bindings.origin(owner) == "torch" and args:
            owner, args = args[0].value, args[1:]
        if name in LEAST_VALUES:
            yield from self._least(_argument(args, 0, "min"), owner)
        if name in GREATEST_VALUES:
            yield from self._greatest(_argument(args, GREATEST_VALUES[name], "max"), owner)

    def _filled(
        self, constant: cst.BaseExpression | None, owner: cst.BaseExpression, *, is_number: bool = False
    ) -> Replacements:
        """A number that is written into ``owner``, or what ``is_number`` or may be one."""
        match constant:
            case cst.Call(func=cst.Attribute(attr=cst.Name(value="tensor")), args=[cst.Arg(value=inner)]):
                constant = inner
        if tensor := self._tensor_of(owner):
            yield from self._within(constant, f"{tensor}.dtype", is_number=is_number)

    def _within(self, constant: cst.BaseExpression | None, dtype: str, *, is_number: bool = False) -> Replacements:
        """A number, or what ``is_number`` or may be one, within the range of a dtype."""
        if constant is None:
            return
        value = _value(constant)
        if value is not None and FLOAT16.largest < abs(value) < math.inf:
            yield constant, f"{self.finfo}({dtype}).{'min' if value < 0 else 'max'}"
        elif value is None and "inf" not in spelled(constant) and (is_number or self._may_be_number(constant)):
            yield constant, f"max({spelled(constant)}, {self.finfo}({dtype}).min)"

    def _multiplied(self, constant: cst.BaseExpression, other: cst.BaseExpression) -> Replacements:
        """A mask's number, or a name that may be one beside a half tensor."""
        tensor = self._tensor_of(other)
        if not tensor:
            return
        value, least = _value(constant), f"{self.finfo}({tensor}.dtype).min / 2"
        if value is not None and -math.inf < value < -FLOAT16.largest:
            yield constant, f"({least})"
        elif value is None and self._may_be_number(constant) and self._is_tensor(other):
            yield constant, f"max({spelled(constant)}, {least})"

    def _subtracted(self, constant: cst.BaseExpression, other: cst.BaseExpression) -> Replacements:
        """A mask's number in a product that is taken away."""
        value, tensor = _value(constant), self._tensor_of(other)
        if tensor and value is not None and FLOAT16.largest < value < math.inf:
            yield constant, f"({self.finfo}({tensor}.dtype).max / 2)"

    def _least(self, constant: cst.BaseExpression | None, other: cst.BaseExpression) -> Replacements:
        """An eps, by its size or its name; none that half can hold helps ``1 - p``, which is 0 there from 0.9998 on."""
        tensor = self._tensor_of(other)
        if constant is None or not tensor or _taken_from_one(other) is not None:
            return
        value = _value(constant)
        is_small = value is not None and 0.0 < value < FLOAT16.smallest_subnormal
        if is_small or (value is None and "eps" in dotted(constant).rpartition(".")[2].lower()):
            yield constant, f"max({spelled(constant)}, {self.finfo}({tensor}.dtype).tiny)"

    def _greatest(self, constant: cst.BaseExpression | None, other: cst.BaseExpression) -> Replacements:
        """A probability's greatest value, by its size, or by the name of what it is short of 1."""
        tensor = self._tensor_of(other)
        if constant is None or not tensor:
            return
        value, short = _value(constant), _taken_from_one(constant)
        if value is not None and ROUNDS_TO_ONE <= value < 1:
            yield constant, f"min({spelled(constant)}, 1 - {self.finfo}({tensor}.dtype).eps)"
        elif value is None and short is not None and "eps" in dotted(short).rpartition(".")[2].lower():
            yield short, f"max({spelled(short)}, {self.finfo}({tensor}.dtype).eps)"

    def _may_be_number(self, node: cst.BaseExpression) -> bool:
        return bool(dotted(node)) and not self._is_tensor(node)

    def _is_tensor(self, node: cst.BaseExpression) -> bool:
        return bool(self.half & {code_of(item) for item in walk(node) if isinstance(item, cst.BaseExpression)})

    def _tensor_of(self, node: cst.BaseExpression) -> str:
        """A name or an attribute in the expression that holds a half tensor, as far as is known; "" for none."""
        parts = [item for item in walk(node) if isinstance(item, (cst.Name, cst.Attribute)) and dotted(item)]
        read = names_read(node)
        seen = (spelled(item) for item in parts if code_of(item) in self.half)
        plain = (item.value for item in parts if isinstance(item, cst.Name) and item.value in read)
        return next(seen, "") or next(filter(self._may_be_tensor, plain), "")

    def _may_be_tensor(self, name: str) -> bool:
        """A plain name belongs to the function and is neither a number nor ``self``."""
        is_local = name in self.bindings.local and name not in self.bindings.numbers
        return is_local and name not in ("self", "cls") and name not in self.bindings.imports


def _argument(args: Sequence[cst.Arg], index: int, keyword: str) -> cst.BaseExpression | None:
    by_name = next((arg.value for arg in args if arg.keyword is not None and arg.keyword.value == keyword), None)
    plain = [arg.value for arg in args if arg.keyword is None and not arg.star]
    return by_name or (plain[index] if len(plain) > index else None)


def _taken_from_one(node: cst.BaseExpression) -> cst.BaseExpression | None:
    """``p`` of ``1 - p``; None of anything else."""
    match bare(node):
        case cst.BinaryOperation(left=one, operator=cst.Subtract(), right=taken) if _value(one) == 1:
            return taken
        case _:
            return None


def _value(node: cst.BaseExpression) -> float | None:
    """The number that an expression of numbers alone is: ``-1e9``, ``-10**9``, ``float("-1e9")``."""
    try:
        return _computed(node)
    except (ValueError, OverflowError):
        return None


def _computed(node: cst.BaseExpression) -> float:
    """As a float, so that no integer takes long to compute.

    Raises:
        ValueError: the expression holds something else, or is no real number.
        OverflowError: the number is too large.
    """
    match bare(node):
        case cst.Integer() | cst.Float() as number:
            return float(number.evaluated_value)
        case cst.UnaryOperation(operator=cst.Minus(), expression=inner):
            return -_computed(inner)
        case cst.BinaryOperation(left=left, operator=cst.Subtract(), right=right):
            return _computed(left) - _computed(right)
        case cst.BinaryOperation(left=left, operator=cst.Power(), right=right):
            return math.pow(_computed(left), _computed(right))
        case cst.Call(func=cst.Name(value="float"), args=[cst.Arg(value=cst.SimpleString() as text)]):
            return float(ast.literal_eval(text.value))
        case cst.Attribute(
            value=cst.Call(func=finfo, args=[cst.Arg(value=of)]), attr=cst.Name(value="min" | "max" as end)
        ):
            if not dotted(finfo).endswith("finfo") or dotted(of).rpartition(".")[2] not in FLOATS:
                raise ValueError
            return FLOAT32.largest if end == "max" else -FLOAT32.largest
        case _:
            raise ValueError

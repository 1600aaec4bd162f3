"""The casts of consecutive statements that run in FP32: at each use, or once in front of them where nobody can tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import libcst as cst

from ampdbg.patch.half_casts import HalfCasts, PinnedStatement
from ampdbg.patch.modes import called_name
from ampdbg.source.expressions import assigned_codes, code_of, find, names_assigned, names_bound_inside

REBIND_FROM = 3
"""From so many uses on, a name is cast once at the block's start: ``q = q.float()``."""

_TO_A_DTYPE = frozenset({"to", "type", "type_as", "half", "bfloat16"})


@dataclass(frozen=True)
class CastStatements:
    """The statements with their casts; ``cast`` are the expressions that were, ``rebound`` names at the start first.

    ``sure`` are those of them that are cast whenever the statements run, and not in a branch alone.
    """

    statements: tuple[cst.BaseSmallStatement, ...]
    rebound: tuple[str, ...]
    cast: tuple[str, ...]
    sure: frozenset[str]


def cast_statements(
    pinned: Sequence[PinnedStatement],
    made: frozenset[str] = frozenset(),
    may_rebind: Callable[[str], bool] = lambda name: False,
) -> CastStatements:
    """Casts the half names of consecutive statements, those left out that the statements made before (in FP32).

    Args:
        pinned: what stands in the block.
        made: what already holds FP32 when the block is entered.
        may_rebind: whether nothing behind the block reads what a name held before it, so that a name that is used
            often may be cast once, in front of the statements.

    Raises:
        EditError: a name that would be cast may hold a number.
    """
    once = _cast_in_order(pinned, made)
    uses = Counter(once.cast)
    often = [
        code
        for code, count in uses.items()
        if count >= REBIND_FROM and code in once.sure and _can_rebind(code, pinned, may_rebind)
    ]
    if not often:
        return once
    again = _cast_in_order(pinned, made | set(often))
    return CastStatements(again.statements, tuple(often), tuple(dict.fromkeys(once.cast)), once.sure)


def _cast_in_order(pinned: Sequence[PinnedStatement], made: frozenset[str]) -> CastStatements:
    statements, cast, sure, known = [], [], set(), set(made)
    for item in pinned:
        casts = HalfCasts(item, frozenset(known))
        statements.append(_visited(item.statement, casts))
        cast += casts.cast
        sure |= casts.sure
        assigned = assigned_codes(item.statement)
        known = known - assigned if _asks_for_a_dtype(item.statement) else known | assigned
    return CastStatements(tuple(statements), (), tuple(cast), frozenset(sure))


def _visited(statement: cst.BaseSmallStatement, casts: HalfCasts) -> cst.BaseSmallStatement:
    result = statement.visit(casts)
    return result if isinstance(result, cst.BaseSmallStatement) else statement


def _can_rebind(code: str, pinned: Sequence[PinnedStatement], may_rebind: Callable[[str], bool]) -> bool:
    """Plain names of the function alone; not those of a comprehension, nor those that another function sees.

    What is asked for its dtype keeps its meaning, and nobody must read the name afterwards: written in place, asked
    for its dtype, or stored, it would no longer be what it was.
    """
    statements = [item.statement for item in pinned]
    inner = {name for statement in statements for name in names_bound_inside(statement)}
    bindings = pinned[0].names.bindings
    if code not in bindings.local or code in inner or code in bindings.shared or _asks_its_dtype(code, statements):
        return False
    is_replaced = any(code in names_assigned(item) for item in statements if isinstance(item, cst.Assign))
    return is_replaced or may_rebind(code)


def _asks_its_dtype(code: str, statements: Sequence[cst.CSTNode]) -> bool:
    return any(
        attribute.attr.value in ("dtype", "type") and code_of(attribute.value) == code
        for statement in statements
        for attribute in find(statement, cst.Attribute)
    )


def _asks_for_a_dtype(statement: cst.CSTNode) -> bool:
    """Whether what it assigns may be in half for all that its operands are not: ``.to(q.dtype)``, ``dtype=``."""
    calls = list(find(statement, cst.Call))
    keywords = {arg.keyword.value for call in calls for arg in call.args if arg.keyword is not None}
    return "dtype" in keywords or not _TO_A_DTYPE.isdisjoint(called_name(call) for call in calls)

"""Whether a name is read again after a block: then the block must not change what it holds."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from ampdbg.source.expressions import find, names_assigned, names_in, names_read, target_names, walk

_Loop = cst.For | cst.While


def is_read_later(name: str, block: Sequence[cst.CSTNode], scope: cst.CSTNode) -> bool:
    """Whether anything that may run after ``block`` reads what ``name`` held in it. In doubt it is read.

    Args:
        name: a plain name of the function.
        block: consecutive statements, as nodes of ``scope``.
        scope: the function's body.
    """
    order = {id(node): index for index, node in enumerate(walk(scope))}
    if not block or any(id(node) not in order for node in block):
        return True
    end = max(order[id(node)] for statement in block for node in walk(statement))
    if any(order[id(node)] > end for node in _reads(name, scope)):
        return True
    first = id(block[0])
    loops = [loop for loop in walk(scope) if isinstance(loop, _Loop) and any(id(node) == first for node in walk(loop))]
    return not all(_binds_first(name, loop) for loop in loops)


def _reads(name: str, scope: cst.CSTNode) -> list[cst.Name]:
    targets = (target.target for item in find(scope, cst.Assign) for target in item.targets)
    bound = {id(item) for target in targets for item in target_names(target)}
    return [item for item in names_in(scope) if item.value == name and id(item) not in bound]


def _binds_first(name: str, loop: _Loop) -> bool:
    """Whether every turn of a loop binds the name before anything in it reads the name."""
    if isinstance(loop, cst.For) and name in names_assigned(cst.AssignTarget(loop.target)):
        return True
    if isinstance(loop, cst.While) and name in names_read(loop.test):
        return False
    for statement in loop.body.body:
        if name in names_read(statement):  # what is assigned to counts among these
            return _binds(name, statement)
    return True


def _binds(name: str, statement: cst.CSTNode) -> bool:
    small = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
    return isinstance(small, cst.Assign) and name in names_assigned(small) and not _reads(name, small)

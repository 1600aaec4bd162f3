"""What to pin in a source file: statements, calls of child modules, whole functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

NamesSeen = Mapping[int, tuple[str, ...]] | tuple[str, ...]
"""Expressions as they stand in the source: of all lines together, or by the first line of each statement."""


@dataclass(frozen=True)
class StatementPin:
    """Lines of one function whose operations must run in FP32.

    Attributes:
        function: ``co_name`` or qualified name of the function; "" for whatever stands on the lines, ``<module>`` for
            the module's own code.
        lines: counted from 1.
        half_names: names, attributes (``self.weight``), elements (``batch["x"]``) and calls (``self.k(x)``) that held
            half tensors there, as a trace saw them.
        full_names: those that held other tensors. Without any of either, nothing is known, and every operand is cast.
            Unpinned lines may be among the two: what is known of them may keep two blocks together.
    """

    function: str
    lines: tuple[int, ...]
    half_names: NamesSeen = ()
    full_names: NamesSeen = ()


@dataclass(frozen=True)
class CallPin:
    """Calls of a child module, in code that the user owns, that must run in FP32.

    ``function`` is its name, or its whole qualified name (``Block.forward``), by which it is that one alone.
    ``callee`` is what is called, as it stands in the source: ``self.attn``, ``self.blocks[0]``, ``block`` in a loop.
    ``lines`` are where. The rest is as in :class:`StatementPin`.
    """

    function: str
    callee: str
    lines: tuple[int, ...]
    half_names: NamesSeen = ()
    full_names: NamesSeen = ()


@dataclass(frozen=True)
class FunctionPin:
    """A function that must run in FP32 as a whole.

    ``function`` is its qualified name: ``Block.forward``. ``half_names`` are the parameters that held half tensors.
    """

    function: str
    half_names: tuple[str, ...]


SourcePin = StatementPin | CallPin | FunctionPin


@dataclass(frozen=True)
class Refused:
    """A pin, or a line of one, that was left alone; ``line`` is 0 where it is the whole file, ``file`` where known."""

    line: int
    reason: str
    file: str = ""

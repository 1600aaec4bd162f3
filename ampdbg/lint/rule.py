"""The data of a rule, and of its hits."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ampdbg.record.findings import Severity
from ampdbg.source.edits import Fix

if TYPE_CHECKING:
    from ampdbg.lint.facts import Facts


@dataclass(frozen=True)
class RuleHit:
    """A hit of a rule at a node.

    ``step`` is the remedy here, if it is not the code's own. Hits that share a ``fix`` are cured by it together. With
    ``in_half_only`` the hit counts only if some file of the project trains in half.
    """

    code: str
    node: ast.AST
    message: str = ""
    step: str = ""
    severity: Severity | None = None
    fix: Fix | None = field(default=None, compare=False)
    in_half_only: bool = False


@dataclass(frozen=True)
class Rule:
    """A rule, which is checked in the files that have each of ``mentions``.

    A mention is a word, or alternative words with bars between them. A file must also match ``pattern``, a regular
    expression, which is far slower to search for.

    ``since`` is the first torch version in which the code is wrong: a project that allows an older one gets no finding.

    In an example of ``invalid`` each line with a hit ends with ``# <-`` and its code. Examples of ``valid`` have none.
    """

    codes: tuple[str, ...]
    mentions: tuple[str, ...]
    check: Callable[[Facts], Iterator[RuleHit]]
    invalid: tuple[str, ...]
    valid: tuple[str, ...]
    pattern: str = ""
    since: tuple[int, int] | None = None

    @cached_property
    def _mentions(self) -> list[list[bytes]]:
        return [[word.encode() for word in words.split("|")] for words in self.mentions]

    def may_find(self, content: bytes) -> bool:
        """True if the bytes of a file have the rule's words and match its pattern."""
        is_mentioned = all(any(word in content for word in words) for words in self._mentions)
        return is_mentioned and re.search(self.pattern.encode(), content) is not None


LOOP = """
import torch

def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = model(x).mean()
"""
"""A correct training loop up to its loss, with which the examples begin; BACKWARD and STEP complete it."""
BACKWARD = "        scaler.scale(loss).backward()\n"
STEP = "        scaler.step(optimizer)\n        scaler.update()\n"

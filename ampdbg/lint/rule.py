"""What a rule is, what it finds, and what a fix replaces: plain data."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ampdbg.record.findings import Severity

if TYPE_CHECKING:
    from ampdbg.lint.facts import Facts


@dataclass(frozen=True)
class Edit:
    """Characters of the text that are replaced; where ``start`` is ``end``, new ones are put there."""

    start: int
    end: int
    new: str


@dataclass(frozen=True)
class Fix:
    """Edits that belong together: all or none of them are made. ``imports`` are modules that they need by name."""

    edits: tuple[Edit, ...]
    imports: tuple[str, ...] = ()


@dataclass(frozen=True)
class RuleHit:
    """What a rule finds at a node.

    ``step`` is what to do about it there, where the code's own remedy does not say it. Hits that share a ``fix`` are
    cured by it together. ``in_half_only`` says that it is one where some file of the project trains in half.
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
    """What is looked for: in files in which each of ``mentions`` is found.

    Those are words, several with a bar between them where one is enough; ``pattern`` is a regular expression, which is
    far slower to look for, and is found in them too.

    ``since`` is the torch from which on it is wrong: a project that allows an older one gets no finding.

    In an example of ``invalid`` the lines that are found end with ``# <-`` and their code; nothing is found in those of
    ``valid``.
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
        """A file's bytes hold one of the rule's words."""
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
"""A training loop up to its loss; with BACKWARD and STEP it is as it should be. The examples begin so."""
BACKWARD = "        scaler.scale(loss).backward()\n"
STEP = "        scaler.step(optimizer)\n        scaler.update()\n"

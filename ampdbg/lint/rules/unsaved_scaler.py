"""A checkpoint that holds the optimizer's state and not the scaler's, in a function that has both."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampdbg.lint.document import Document
from ampdbg.lint.expressions import argument, method
from ampdbg.lint.facts import Facts
from ampdbg.lint.rule import Rule, RuleHit

CODE = "misuse-unsaved-scaler"


def check(facts: Facts) -> Iterator[RuleHit]:
    """Every ``torch.save`` of a dict that can be read, where a scaler is at hand."""
    document = facts.document
    for call in document.calls:
        if document.call_origin(call) != "torch.save":
            continue
        saved = _dict(document, argument(call, "obj", 0))
        if saved is None or _mentions_scaler(document, call) or not any(map(_is_optimizers_state, _values(saved))):
            continue
        if _has_scaler(facts, call) and not any(key is None for key in saved.keys):
            yield RuleHit(CODE, call)


def _dict(document: Document, node: ast.AST | None) -> ast.Dict | None:
    if isinstance(node, ast.Name):
        values = document.values(node)
        node = values[0] if len(values) == 1 else None
    return node if isinstance(node, ast.Dict) else None


def _values(saved: ast.Dict) -> list[ast.expr]:
    return saved.values


def _is_optimizers_state(node: ast.expr) -> bool:
    owner = method(node, "state_dict")
    return owner is not None and "optim" in ast.unparse(owner).lower()


def _mentions_scaler(document: Document, call: ast.Call) -> bool:
    """Whether the scaler's state is taken anywhere in the file: it may be saved beside, or put in later."""
    owners = (method(one, "state_dict") for one in document.calls)
    return any("scaler" in ast.unparse(owner).lower() for owner in owners if owner is not None)


def _has_scaler(facts: Facts, call: ast.Call) -> bool:
    """Whether the function that saves also steps by a scaler."""
    document = facts.document
    unit = document.unit(call)
    for other in document.calls:
        owner = method(other, "step", "scale")
        if owner is not None and facts.is_scaler(owner) and other.args and document.unit(other) is unit:
            return True
    made = [scaler for scaler in facts.scalers if document.unit(scaler) is unit]
    return any(facts.is_surely_on(scaler) for scaler in made)


_HEAD = """
import torch

def train(model, optimizer, loader, path):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""

RULE = Rule(
    (CODE,),
    ("torch.save|import save", "GradScaler|.scale(", "optim"),
    check,
    invalid=(
        _HEAD
        + """
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)  # <- misuse-unsaved-scaler
""",
    ),
    valid=(
        _HEAD
        + """
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state["scaler"] = scaler.state_dict()
    torch.save(state, path)
""",
        _HEAD + '    torch.save({"model": model.state_dict()}, path)\n',
        """
import torch

def save(model, optimizer, path):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
""",
    ),
)

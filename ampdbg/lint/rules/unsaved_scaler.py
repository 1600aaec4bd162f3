"""A checkpoint that has the optimizer's state and not the scaler's, of an optimizer that a scaler steps."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampdbg.lint.facts import Facts
from ampdbg.lint.rule import BACKWARD, LOOP, STEP, Rule, RuleHit
from ampdbg.source.document import Document
from ampdbg.source.expressions import argument, method

CODE = "misuse-unsaved-scaler"


def check(facts: Facts) -> Iterator[RuleHit]:
    """Check every ``torch.save`` of an optimizer's state beside a scaler, in files that never read its state."""
    document = facts.document
    if any(facts.is_scaler(one) or "scaler" in ast.unparse(one).lower() for one in document.owners("state_dict")):
        return
    for call in document.calls:
        if document.call_origin(call) != "torch.save":
            continue
        saved = [node for piece in _pieces(document, argument(call, "obj", 0)) for node in ast.walk(piece)]
        owners = filter(None, (method(node, "state_dict") for node in saved))
        optimizers = list(filter(facts.is_optimizer, owners))
        made = any(facts.is_surely_on(one) for one in facts.scalers if document.unit(one) is document.unit(call))
        if any(made or facts.is_scaled(one) for one in optimizers) and not any(_may_hold(facts, one) for one in saved):
            yield RuleHit(CODE, call)


def _pieces(document: Document, node: ast.expr | None) -> list[ast.AST]:
    """Return the saved value, and the items added to a saved name: ``state["optimizer"] = optimizer.state_dict()``."""
    if not isinstance(node, ast.Name):
        return [node] if node is not None else []
    items = [(target.value, value) for target, value in document.assigned() if isinstance(target, ast.Subscript)]
    put = [value for target, value in items if document.key(target) == document.key(node)]
    made = document.values(node)
    return [*made, *put] if len(made) == 1 else []


def _may_hold(facts: Facts, node: ast.AST) -> bool:
    """True for the scaler, or a dict of unknown keys."""
    match node:
        case ast.Dict(keys=keys):
            return None in keys
        case ast.keyword(arg=name):
            return name is None
    return isinstance(node, (ast.Name, ast.Attribute)) and facts.is_scaler(node)


_HEAD = LOOP + BACKWARD + STEP
_SAVE = 'torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)'
_FOUND = f"    {_SAVE}  # <- misuse-unsaved-scaler\n"

RULE = Rule(
    (CODE,),
    ("torch.save|import save", "GradScaler|.scale("),
    check,
    invalid=(
        _HEAD + _FOUND,
        (_HEAD + _FOUND).replace("optimizer", "opt"),
        (_HEAD + _FOUND).replace("optimizer.", "optims[0].").replace("(optimizer)", "(optims[0])"),
        """
import torch

def main(model, path):
    optims = {"all": torch.optim.SGD(model.parameters(), 0.1)}
    train(model, optims, scaler := torch.amp.GradScaler("cuda"))
    state = dict(model=model.state_dict())
    state["rate"] = optims["all"].state_dict()
    torch.save(state, path)  # <- misuse-unsaved-scaler
""",
        """
import torch

class Trainer:
    def step(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optim)
        self.scaler.update()

    def save(self, path):
        torch.save((self.model.state_dict(), self.optim.state_dict()), path)  # <- misuse-unsaved-scaler
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
        _HEAD + '    torch.save({"optimizer": optimizer.state_dict(), "amp": scaler}, path)\n',
        _HEAD + '    torch.save({"optimizer": optimizer.state_dict(), **rest}, path)\n',
        f"import torch\n\ndef save(model, optimizer, path):\n    {_SAVE}\n",
        f"{_HEAD}\ndef save(model, optimizer, path):\n    {_SAVE}\n",
    ),
)

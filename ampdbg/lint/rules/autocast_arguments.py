"""Autocast with arguments that do not work: FP32 as its dtype, another device than the tensors', a wrong decorator."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampdbg.lint.facts import AUTOCASTS, AutocastUse, Facts
from ampdbg.lint.rule import Rule, RuleHit
from ampdbg.source.edits import Fix, replaced
from ampdbg.source.expressions import constant, method

DTYPE, DEVICE, DECORATOR = "misuse-autocast-float32", "misuse-autocast-device", "misuse-autocast-decorator"
OWN_DEVICE = "torch.cuda.amp.autocast"


def check(facts: Facts) -> Iterator[RuleHit]:
    """Check every autocast of the file, and every decorator."""
    for made in facts.autocasts:
        if made.dtype == "float32" and made.enabled is not False:
            yield RuleHit(DTYPE, made.call)
        elif made.enabled is not False and made.device is not None:
            yield from _other_device(facts, made)
    for owner in facts.document.definitions:
        for decorator in owner.decorator_list:
            yield from _decorator(facts, owner, decorator)


def _other_device(facts: Facts, made: AutocastUse) -> Iterator[RuleHit]:
    """Yield a hit for a region in a function that moves tensors only to another device."""
    document = facts.document
    region = document.nearest(made.call, ast.With)
    function = document.function(made.call)
    other = {"cpu": "cuda", "cuda": "cpu"}.get(made.device or "")
    if region is None or function is None or other is None:
        return
    moved = {_device(facts, node) for node in ast.walk(function)}
    if moved - {None} == {other} and _moves_inputs(facts, function, region):
        message = f"autocast is for {made.device}, and the tensors of this function are on {other}"
        yield RuleHit(DEVICE, made.call, message)


def _device(facts: Facts, node: ast.AST) -> str | None:
    """Return the device of ``x.cuda()`` or ``x.to("cuda:0")``; "?" if it cannot be read, None for any other node."""
    if not isinstance(node, ast.Call) or facts.autocast(node) is not None:
        return None
    if method(node, "cuda") is not None:
        return None if facts.document.origin(node.func) else "cuda"
    if method(node, "to") is None:
        return None  # cpu() brings results back
    given = [*node.args[:1], *(word.value for word in node.keywords if word.arg == "device")]
    texts = [text.partition(":")[0] for text in map(constant, given) if isinstance(text, str)]
    unread = ["?" for one in node.args[:1] if not facts.dtype(one)]
    return next(iter((*texts, *unread)), None)


def _moves_inputs(facts: Facts, function: ast.AST, region: ast.With) -> bool:
    """True if the region reads a value that the function moves to a device."""
    moved = {
        ast.unparse(target)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and any(_device(facts, one) for one in ast.walk(node.value))
        for target in node.targets
    }
    read = {node.id for node in ast.walk(region) if isinstance(node, ast.Name)}
    return bool(moved & read)


def _decorator(facts: Facts, owner: ast.AST, decorator: ast.expr) -> Iterator[RuleHit]:
    origin = facts.document.origin(decorator)
    if origin in AUTOCASTS:
        fix = Fix((replaced(facts.document, decorator, f"{facts.document.source(decorator)}()"),))
        message = "autocast without parentheses takes the function as its first argument, so nothing runs in half"
        is_own = origin == OWN_DEVICE and not isinstance(owner, ast.ClassDef)
        yield RuleHit(DECORATOR, decorator, message, fix=fix if is_own else None)
    elif facts.autocast(decorator) is not None and isinstance(owner, ast.ClassDef):
        message = f"autocast turns the class {owner.name} into a function: it applies only while an instance is created"
        yield RuleHit(DECORATOR, decorator, message, "decorate its forward")


RULE = Rule(
    (DTYPE, DEVICE, DECORATOR),
    ("autocast",),
    check,
    invalid=(
        """
import torch
from torch import nn

def norm(x):
    with torch.autocast("cuda", dtype=torch.float32):  # <- misuse-autocast-float32
        return x / x.norm()

def train(model, loader):
    for x in loader:
        x = x.cuda()
        with torch.autocast("cpu"):  # <- misuse-autocast-device
            model(x).sum()

class Net(nn.Module):
    @torch.autocast  # <- misuse-autocast-decorator
    def forward(self, x):
        return x

@torch.autocast("cuda")  # <- misuse-autocast-decorator
class Other(nn.Module):
    pass
""",
    ),
    valid=(
        """
import torch

def norm(x):
    with torch.autocast("cuda", enabled=False):
        x = x.float()
        return x / x.norm()

def train(model, loader, device):
    for x in loader:
        x = x.to(device)
        with torch.autocast("cpu"):
            model(x).sum()

@torch.no_grad()
@torch.autocast("cuda")
def predict(model, x):
    return model(x.cuda()).cpu()
""",
    ),
    pattern=r"float32|@[\w.]*autocast|[\"']c(?:pu|uda)",
)

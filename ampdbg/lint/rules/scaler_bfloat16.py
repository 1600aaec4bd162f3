"""A scaler that is on, in a file whose every autocast lowers to bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

from ampdbg.lint.facts import Facts
from ampdbg.lint.rule import Rule, RuleHit

CODE = "misuse-scaler-bfloat16"


def check(facts: Facts) -> Iterator[RuleHit]:
    """Each such scaler, where nothing of the file can be in float16."""
    dtypes = {one.dtype for one in facts.autocasts if one.enabled is not False}
    text = facts.document.text
    others = ("torch.float16", "fp16", "torch.half", ".half()", '"float16')
    if dtypes == {"bfloat16"} and not any(word in text for word in others):
        for scaler in facts.scalers:
            if facts.is_surely_on(scaler):
                yield RuleHit(CODE, scaler)


_BODY = """
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""

RULE = Rule(
    (CODE,),
    ("GradScaler", "bfloat16"),
    check,
    invalid=(
        """
import torch

def train(model, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda")  # <- misuse-scaler-bfloat16
"""
        + _BODY,
    ),
    valid=(
        """
import torch

def train(model, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda", enabled=False)
"""
        + _BODY,
        """
import torch

def train(model, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda")
"""
        + _BODY.replace("torch.bfloat16", "torch.float16"),
    ),
)

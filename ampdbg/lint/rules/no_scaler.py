"""Float16's autocast around a loss with an unscaled backward pass, in a file without any scaler."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampdbg.lint.facts import Facts
from ampdbg.lint.rule import Rule, RuleHit
from ampdbg.source.expressions import method

CODE = "misuse-no-scaler"


def check(facts: Facts) -> Iterator[RuleHit]:
    """Check losses that a float16 region assigns, in the function that steps the optimizer."""
    if facts.mentions_scaler:
        return
    document = facts.document
    for call in document.calls:
        loss = method(call, "backward")
        if not isinstance(loss, ast.Name) or call.args:
            continue
        stepped = [method(one, "step") for one in document.calls if document.unit(one) is document.unit(call)]
        regions = [facts.region(value) for value in document.values(loss)]
        lowers = [one is not None and one.is_half and one.enabled for one in regions]
        if lowers and all(lowers) and any(map(facts.is_optimizer, stepped)):
            yield RuleHit(CODE, call)


_LOOP = """
import torch

def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        loss.backward()  # <- misuse-no-scaler
        optimizer.step()
"""
_VALID = _LOOP.replace("  # <- misuse-no-scaler", "")

RULE = Rule(
    (CODE,),
    ("autocast", ".backward("),
    check,
    invalid=(_LOOP, _LOOP.replace('autocast("cuda", dtype=torch.float16)', 'amp.autocast("cuda")')),
    valid=(
        _VALID.replace("float16", "bfloat16"),
        _VALID.replace("float16", "float16, enabled=False"),
        _VALID.replace("torch.float16", "DTYPE"),
    ),
)

"""Scaler and optimizer called in the wrong order: :mod:`ampdbg.call_order` checks every path through a loop."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from textwrap import indent

from ampdbg.lint.facts import Facts
from ampdbg.lint.rule import BACKWARD, LOOP, STEP, Rule, RuleHit
from ampdbg.lint.training_loops import LoopHit, TrainingLoop, training_loops
from ampdbg.source.edits import Fix, above, below, removed, replaced

CLIP, TWICE, WINDOW, BARE = "misuse-clip-scaled", "misuse-unscale-twice", "misuse-accumulate", "misuse-bare-step"
CODES = (CLIP, TWICE, WINDOW, BARE, "misuse-many-updates")


def check(facts: Facts) -> Iterator[RuleHit]:
    """Check every training loop."""
    for loop in training_loops(facts):
        for hit in loop.hits(WINDOW):
            if hit.code in CODES:
                yield RuleHit(hit.code, hit.call.node, fix=_fix(loop, hit))


def _fix(loop: TrainingLoop, hit: LoopHit) -> Fix | None:
    document = loop.facts.document
    statement = document.statement(hit.call.node)
    scalers = {call.scaler for call in loop.calls if call.scaler}
    # The statement is only the call, or keeps its result.
    is_simple = isinstance(statement, (ast.Expr, ast.Assign)) and statement.value is hit.call.node
    if not (is_simple and document.has_own_lines(statement) and len(scalers) == len(loop.optimizers) == 1):
        return None
    scaler, optimizer = scalers.pop(), loop.optimizers[0]
    kinds = [call.kind for call in loop.calls]
    block = document.block(statement)
    unscaled = [one for one in loop.calls if one.kind == "unscale" and document.statement(one.node) in block]
    if hit.code == CLIP and "unscale" not in kinds and kinds.count("clip") == 1:
        return Fix((above(document, statement, f"{scaler}.unscale_({optimizer})"),))
    if hit.code == TWICE and unscaled != [hit.call]:
        return Fix((removed(document, statement),))
    if hit.code == BARE and "step" not in kinds:
        step = replaced(document, hit.call.node, f"{scaler}.step({optimizer})")
        return Fix((step,) if "update" in kinds else (step, below(document, statement, f"{scaler}.update()")))
    return None


_LOOP = LOOP + BACKWARD
_CLIP = "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
_UNSCALE = "        scaler.unscale_(optimizer)"
_WINDOWS = f"""
import torch

def train(model, loader, every):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda")
    for number, x in enumerate(loader):
        loss = model(x) / every
{BACKWARD}"""
_TAKEN = f"{STEP}        optimizer.zero_grad()\n"
_WITH_AMP = """
import torch

def train_one_epoch(model, loader, optimizer, scaler, use_amp, clip):
    for x in loader:
        with torch.autocast("cuda", enabled=use_amp):
            loss = model(x)
        optimizer.zero_grad()
        if use_amp:
            scaler.scale(loss).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
        else:
            loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if use_amp:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
"""
_TWO = """
import torch

def train(critic, actor, loader):
    first = torch.optim.SGD(critic.parameters(), 0.1)
    second = torch.optim.SGD(actor.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        first.zero_grad()
        second.zero_grad()
        scaler.scale(critic(x) + actor(x)).backward()
        scaler.step(first)
        scaler.update()  # <- misuse-many-updates
        scaler.step(second)
        scaler.update()
"""

RULE = Rule(
    CODES,
    ("GradScaler|.scale(", "backward"),
    check,
    invalid=(
        f"{_LOOP}{_CLIP}  # <- misuse-clip-scaled\n{STEP}",
        _WITH_AMP.replace("            if clip is not None:\n                scaler.unscale_(optimizer)\n", "").replace(
            "(), clip)", "(), clip)  # <- misuse-clip-scaled"
        ),
        f"{_LOOP}{_UNSCALE}\n{_CLIP}\n{_UNSCALE}  # <- misuse-unscale-twice\n{STEP}",
        _LOOP.replace("    scaler", "    model, optimizer = prepare(model, optimizer)\n    scaler", 1)
        + "        optimizer.step()  # <- misuse-bare-step\n",
        """
import torch

def train_one_epoch(model, loader, optimizer, scaler, use_amp):
    for x in loader:
        optimizer.zero_grad()
        if use_amp:
            with torch.autocast("cuda"):
                loss = model(x)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            model(x).backward()
        optimizer.step()  # <- misuse-bare-step
""",
        f"{_WINDOWS}{_UNSCALE}  # <- misuse-accumulate\n        if (number + 1) % every == 0:\n"
        + indent(_TAKEN, "    "),
        _TWO,
    ),
    valid=(
        f"{_LOOP}{_UNSCALE}\n{_CLIP}\n{STEP}",
        _WITH_AMP,
        f"{_WINDOWS}        if (number + 1) % every != 0:\n            continue\n{_UNSCALE}\n{_CLIP}\n{_TAKEN}",
        _TWO.replace("        scaler.update()  # <- misuse-many-updates\n", ""),
        # The second step belongs to another backward pass, as in sharpness-aware training.
        f"{_LOOP}{STEP}        optimizer.zero_grad()\n        model(x).backward()\n        optimizer.step()\n",
        # The function that lists the clipped parameters may unscale them with the scaler that it takes.
        f"{_LOOP}{_CLIP.replace('model.parameters()', 'unscaled(scaler, optimizer)')}\n{STEP}",
        # The code divides by the scale by hand.
        f"{_LOOP}        for p in model.parameters():\n            p.grad.div_(scaler.get_scale())\n{_CLIP}\n{STEP}",
    ),
)

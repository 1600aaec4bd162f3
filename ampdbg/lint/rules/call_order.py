"""Scaler and optimizer called in the wrong order: :mod:`ampdbg.call_order` checks every path through a loop.

Accelerate hides its scaler. Gradients that torch clips are still scaled, since only an Accelerator's own methods
unscale them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from textwrap import indent

from ampdbg.lint.facts import Facts
from ampdbg.lint.rule import BACKWARD, LOOP, STEP, Rule, RuleHit
from ampdbg.lint.training_loops import LoopHit, TrainingLoop, training_loops
from ampdbg.source.edits import Fix, above, below, removed, replaced
from ampdbg.source.expressions import argument, constant

CLIP, TWICE, WINDOW, BARE = "misuse-clip-scaled", "misuse-unscale-twice", "misuse-accumulate", "misuse-bare-step"
CODES = (CLIP, TWICE, WINDOW, BARE, "misuse-many-updates")

ACCELERATORS = ("accelerate.Accelerator", "accelerate.accelerator.Accelerator")
UNSCALING = {"clip_grad_norm_", "clip_grad_value_", "unscale_gradients"}
"""The methods of an Accelerator that unscale the gradients."""

OF_ITS_CLIPPING = {"parameters", "max_norm", "norm_type", "clip_value"}
"""The keywords that its clipping takes."""

IN_FP16 = ("fp16", ...)
"""The precisions of an Accelerator that may be FP16, in a file that names FP16: this constant, or no constant."""


def check(facts: Facts) -> Iterator[RuleHit]:
    """Check every training loop, and every clip behind an Accelerator's backward pass."""
    yield from _behind_accelerators(facts)
    for loop in training_loops(facts):
        for hit in loop.hits(WINDOW):
            if hit.code in CODES:
                yield RuleHit(hit.code, hit.call.node, fix=_fix(loop, hit))


def _behind_accelerators(facts: Facts) -> Iterator[RuleHit]:
    """Yield torch's clips in functions with the backward pass of one Accelerator, in which nothing unscales."""
    document = facts.document
    created: dict[object, ast.Call] = {
        document.key(document.target(call) or call): call
        for call in document.calls
        if document.call_origin(call) in ACCELERATORS
    }
    used: dict[tuple[ast.AST, object], dict[str, ast.Attribute]] = {}
    for called in (one.func for one in document.calls if isinstance(one.func, ast.Attribute)):
        if isinstance(called.value, (ast.Name, ast.Attribute)) and document.key(called.value) in created:
            used.setdefault((document.unit(called), document.key(called.value)), {})[called.attr] = called
    for (unit, key), methods in used.items():
        precision = constant(argument(created[key], "mixed_precision", 2))
        clips = [call for call in document.calls if facts.is_clip(call) and document.unit(call) is unit]
        is_scaled = "backward" in methods and precision in IN_FP16 and UNSCALING.isdisjoint(methods)
        for clip in clips * is_scaled:
            name = document.call_origin(clip).rpartition(".")[2].rstrip("_")
            own = f"{ast.unparse(methods['backward'].value)}.{name}_"
            fits = {keyword.arg for keyword in clip.keywords} <= OF_ITS_CLIPPING
            yield RuleHit(
                CLIP,
                clip,
                step=f"clip with {own}, which unscales the gradients first",
                severity="error" if precision == "fp16" else "warning",
                fix=Fix((replaced(document, clip.func, own),)) if fits else None,
            )


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


_ACCELERATE = """
import torch
from accelerate import Accelerator

def train(model, optimizer, loader, args):
    accelerator = Accelerator(mixed_precision="fp16")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x in loader:
        optimizer.zero_grad()
        accelerator.backward(model(x).mean())
"""
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
    ("GradScaler|.scale(|fp16", "backward"),
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
        f"{_ACCELERATE}{_CLIP}  # <- misuse-clip-scaled\n        optimizer.step()\n",
        _ACCELERATE.replace('"fp16"', "args.precision  # no, fp16 or bf16\n    ")
        + "        if accelerator.sync_gradients:\n"
        + "            torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)  # <- misuse-clip-scaled\n",
    ),
    valid=(
        f"{_LOOP}{_UNSCALE}\n{_CLIP}\n{STEP}",
        _WITH_AMP,
        f"{_WINDOWS}        if (number + 1) % every != 0:\n            continue\n{_UNSCALE}\n{_CLIP}\n{_TAKEN}",
        _TWO.replace("        scaler.update()  # <- misuse-many-updates\n", ""),
        f"{_ACCELERATE}        accelerator.clip_grad_norm_(model.parameters(), 1.0)\n",
        f"{_ACCELERATE}        accelerator.unscale_gradients()\n{_CLIP}\n",
        f"{_ACCELERATE}{_CLIP}  # not in fp16\n".replace('"fp16"', '"bf16"'),
        # The second step belongs to another backward pass, as in sharpness-aware training.
        f"{_LOOP}{STEP}        optimizer.zero_grad()\n        model(x).backward()\n        optimizer.step()\n",
        # The function that lists the clipped parameters may unscale them with the scaler that it takes.
        f"{_LOOP}{_CLIP.replace('model.parameters()', 'unscaled(scaler, optimizer)')}\n{STEP}",
        # The code divides by the scale by hand.
        f"{_LOOP}        for p in model.parameters():\n            p.grad.div_(scaler.get_scale())\n{_CLIP}\n{STEP}",
    ),
)

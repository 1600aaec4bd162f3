"""apex: its amp, and its classes that torch has too."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from ampdbg.lint.apex_amp import AMP, NotCertain, Reference, class_fix, is_optional, migration, references
from ampdbg.lint.apex_classes import NO_COUNTERPART, REWRITES
from ampdbg.lint.expressions import argument, constant
from ampdbg.lint.facts import Facts
from ampdbg.lint.rule import Fix, Rule, RuleHit

AMP_CODE, CLASS_CODE = "apex-amp", "apex-class"

_LOWERED = "call it in a block of torch.autocast, and cast its inputs with .half() where no op does it"
_WIDENED = 'call it under torch.autocast("cuda", enabled=False), with its inputs cast by .float()'
_PROMOTED = "none is needed, as torch.autocast casts to the widest type where an op needs one type"

STEPS: Mapping[str, str] = {
    "initialize": 'scaler = torch.amp.GradScaler("cuda"), and the model stays in float32',
    "scale_loss": "scaler.scale(loss).backward(), with the forward pass and the loss under torch.autocast; then "
    "scaler.step(optimizer) and scaler.update() in the place of optimizer.step()",
    "master_params": "scaler.unscale_(optimizer), then clip model.parameters()",
    "state_dict": "scaler.state_dict()",
    "load_state_dict": "scaler.load_state_dict(state)",
    "half_function": _LOWERED,
    "register_half_function": _LOWERED,
    "float_function": _WIDENED,
    "register_float_function": _WIDENED,
    "promote_function": _PROMOTED,
    "register_promote_function": _PROMOTED,
    "disable_casts": 'torch.autocast("cuda", enabled=False)',
}
"""What to do about each of amp's functions."""

LEVELS: Mapping[object, str] = {
    "O0": "O0 is FP32: leave autocast and the scaler out, or make them with enabled=False",
    "O1": "O1 is torch.autocast",
    "O2": "O2 has no twin: torch.autocast keeps float32 weights, and needs neither .half() nor master weights",
    "O3": "O3 has no twin: torch.autocast is as fast nearly everywhere, and trains",
}


def check(facts: Facts) -> Iterator[RuleHit]:
    """Every use of apex's, in files that need it."""
    document = facts.document
    used = references(document)
    if not used or is_optional(document):
        return
    has_amp = any(one.origin.startswith(AMP) for one in used)
    fix, why = migration(document, used) if has_amp else (_class_fix(facts, used), "")
    for one in used:
        name = one.origin.removeprefix(AMP)
        if one.origin.startswith(AMP) and name in STEPS:
            yield RuleHit(AMP_CODE, one.node, _message(facts, one, name, why), _step(name), fix=fix)
        elif one.origin in REWRITES:
            message = f"{one.origin} is not needed: torch has it too"
            yield RuleHit(CLASS_CODE, one.node, message, f"use {REWRITES[one.origin][0]}", fix=fix)
        elif one.origin in NO_COUNTERPART:
            yield RuleHit(
                CLASS_CODE, one.node, f"{one.origin} ties the file to apex", NO_COUNTERPART[one.origin], "info"
            )


def _class_fix(facts: Facts, used: list[Reference]) -> Fix | None:
    try:
        return class_fix(facts.document, used)
    except NotCertain:
        return None


def _message(facts: Facts, one: Reference, name: str, why: str) -> str:
    message = f"apex.amp.{name} is no longer maintained; torch.amp has taken its place"
    call = facts.document.parents[one.node]
    if name != "initialize" or not isinstance(call, ast.Call):
        return message
    level = LEVELS.get(constant(argument(call, "opt_level", 3)), "")
    left = f"no fix is made: {why}" if why else ""
    return "; ".join(filter(None, (message, level, left)))


def _step(name: str) -> str:
    return STEPS[name] if STEPS[name].startswith("none") else f"write {STEPS[name]}"


RULE = Rule(
    (AMP_CODE, CLASS_CODE),
    ("apex",),
    check,
    invalid=(
        """
import torch
from apex import amp

def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")  # <- apex-amp
    for x in loader:
        optimizer.zero_grad()
        loss = model(x).mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:  # <- apex-amp
            scaled_loss.backward()
        optimizer.step()
""",
        """
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedAdam
from torch import nn

def build(width):
    model = nn.Sequential(nn.Linear(width, width), FusedLayerNorm(width))  # <- apex-class
    return model, FusedAdam(model.parameters(), lr=1e-3)  # <- apex-class
""",
        """
from apex import amp
from apex.optimizers import FusedLAMB
import torch

amp.register_half_function(torch, "einsum")  # <- apex-amp

def build(model):
    return FusedLAMB(model.parameters())  # <- apex-class
""",
    ),
    valid=(
        """
try:
    from apex import amp
    has_apex = True
except ImportError:
    amp = None
    has_apex = False

def scale(loss, optimizer):
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
""",
        """
import torch

def build(width):
    return torch.nn.LayerNorm(width)
""",
    ),
)

"""Uses of apex: its amp, and its classes that torch has too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from ampdbg.lint.facts import Facts
from ampdbg.lint.rule import Rule, RuleHit
from ampdbg.source.document import Document
from ampdbg.source.edits import Fix, removed, replaced
from ampdbg.source.expressions import argument, constant, takes_stars

AMP_CODE, CLASS_CODE = "apex-amp", "apex-class"

_LOWERED = "call it under torch.autocast, and cast its inputs with .half() if no op does"
_WIDENED = 'call it under torch.autocast("cuda", enabled=False), with its inputs cast by .float()'
_PROMOTED = "write nothing: torch.autocast casts to the widest type where an op needs one type"
STEPS: Mapping[str, str] = {
    "amp.initialize": 'write scaler = torch.amp.GradScaler("cuda"), and the model stays in float32',
    "amp.scale_loss": "write scaler.scale(loss).backward(), with the forward pass and the loss under torch.autocast; "
    "then scaler.step(optimizer) and scaler.update() instead of optimizer.step()",
    "amp.master_params": "write scaler.unscale_(optimizer), then clip model.parameters()",
    "amp.state_dict": "write scaler.state_dict()",
    "amp.load_state_dict": "write scaler.load_state_dict(state)",
    "amp.disable_casts": 'write torch.autocast("cuda", enabled=False)',
    **dict.fromkeys(("amp.half_function", "amp.register_half_function"), _LOWERED),
    **dict.fromkeys(("amp.float_function", "amp.register_float_function"), _WIDENED),
    **dict.fromkeys(("amp.promote_function", "amp.register_promote_function"), _PROMOTED),
}
"""The remedy for each function of amp."""
LEVELS: Mapping[object, str] = {
    "O0": "; O0 is FP32: leave autocast and the scaler out, or make them with enabled=False",
    "O1": "; O1 is torch.autocast",
    "O2": "; O2 has no equivalent: torch.autocast keeps float32 weights, and needs neither .half() nor master weights",
    "O3": "; O3 has no equivalent: torch.autocast is nearly as fast everywhere, and trains",
}
EQUIVALENTS: Mapping[str, str] = {
    "optimizers.FusedAdam": "torch.optim.AdamW (weight_decay=0.0 unless the call sets one), or Adam if "
    "adam_w_mode=False",
    "optimizers.FusedSGD": "torch.optim.SGD",
    "normalization.FusedLayerNorm": "torch.nn.LayerNorm",
    "normalization.MixedFusedLayerNorm": "torch.nn.LayerNorm",
    "normalization.FusedRMSNorm": "torch.nn.RMSNorm (eps=1e-5 unless the call sets one)",
    "parallel.DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "parallel.SyncBatchNorm": "torch.nn.SyncBatchNorm",
    "parallel.convert_syncbn_model": "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
    "fp16_utils.to_python_float": "loss.item()",
}
"""The equivalents in torch."""
_AUTOCAST = "torch.autocast, torch.amp.GradScaler and a float32 model replace it"
NO_EQUIVALENT: Mapping[str, str] = {
    "optimizers.FusedLAMB": "torch has no LAMB: keep apex for it alone, or use AdamW",
    "optimizers.FusedNovoGrad": "torch has no NovoGrad: keep apex for it alone, or use AdamW",
    "fp16_utils.FP16_Optimizer": _AUTOCAST,
    "fp16_utils.network_to_half": _AUTOCAST,
}
"""Classes and functions without an equivalent in torch, and the remedy."""
SAME_CALL: Mapping[str, str] = {
    "optimizers.FusedSGD": "params lr momentum dampening weight_decay nesterov",
    "normalization.FusedLayerNorm": "normalized_shape eps elementwise_affine",
    "parallel.SyncBatchNorm": "num_features eps momentum affine track_running_stats process_group",
}
"""Classes with an equivalent that takes the same call: these arguments have the same places and defaults."""


def check(facts: Facts) -> Iterator[RuleHit]:
    """Yield a hit for every use, by its longest name, in files that need apex."""
    document = facts.document
    origins = {node: re.sub(r"\.fused_\w+\.", ".", document.origin(node)) for node in document.loads()}
    apex = {node: origin.removeprefix("apex.") for node, origin in origins.items() if origin.startswith("apex.")}
    uses = {node: name for node, name in apex.items() if document.parents[node] not in apex}
    fixes = {name: _renamed(document, [node for node in uses if uses[node] == name], name) for name in SAME_CALL}
    for node, name in () if _is_optional(document) else uses.items():
        if name in STEPS:
            call = document.parents[node]
            level = LEVELS.get(constant(argument(call, "opt_level", 3)), "") if isinstance(call, ast.Call) else ""
            message = f"apex.{name} is no longer maintained; torch.amp replaces it{level}"
            yield RuleHit(AMP_CODE, node, message, f"{STEPS[name]} (before and after: docs/apex.md)")
        elif name in EQUIVALENTS:
            message = f"apex.{name} is not needed: torch has it too"
            yield RuleHit(CLASS_CODE, node, message, f"use {EQUIVALENTS[name]}", fix=fixes.get(name))
        elif name in NO_EQUIVALENT:
            yield RuleHit(CLASS_CODE, node, f"apex.{name} ties the file to apex", NO_EQUIVALENT[name], "info")


def _is_optional(document: Document) -> bool:
    """True if the file also runs without apex: it imports apex in a ``try`` that continues."""
    lines = [one for one in document.imports if re.match(r"from apex\b|import (.*, )?apex\b", ast.unparse(one))]
    tries = [one for line in lines for one in document.around(line) if isinstance(one, ast.Try)]
    ends = [handler.body[-1] for one in tries for handler in one.handlers]
    return any(not isinstance(end, ast.Raise) and "exit" not in ast.unparse(end) for end in ends)


def _renamed(document: Document, uses: list[ast.expr], name: str) -> Fix | None:
    """Return a fix to torch's name, dropping the import, if one import binds it and torch accepts every use."""
    names = [use for use in uses if isinstance(use, ast.Name) and _is_taken(document.parents[use], use, name)]
    lines = {document.statement(binder) for use in names for binder in document.binders(use)}
    line = lines.pop() if len(lines) == 1 and len(names) == len(uses) else None
    if not isinstance(line, ast.ImportFrom) or document.parents[line] is not document.tree:
        return None
    if not document.has_own_lines(line):
        return None
    others = [document.source(alias) for alias in line.names if alias.name != name.partition(".")[2]]
    left = replaced(document, line, f"from {line.module} import {', '.join(others)}") if others else None
    edits = [replaced(document, use, EQUIVALENTS[name]) for use in uses]
    return Fix((*edits, left or removed(document, line)), ("torch",))


def _is_taken(call: ast.AST, use: ast.Name, name: str) -> bool:
    known = SAME_CALL[name].split()
    if not isinstance(call, ast.Call) or call.func is not use or takes_stars(call):
        return False
    return len(call.args) <= len(known) and {word.arg for word in call.keywords} <= {*known}


RULE = Rule(
    (AMP_CODE, CLASS_CODE),
    ("apex",),
    check,
    invalid=(
        """
import torch
from apex import amp
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD

model = torch.nn.Sequential(torch.nn.Linear(8, 8), FusedLayerNorm(8, memory_efficient=True))  # <- apex-class
others = FusedAdam(model.parameters()), FusedLAMB(model.parameters())  # <- apex-class apex-class
optimizer = FusedSGD(model.parameters(), 0.1)  # <- apex-class
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")  # <- apex-amp
with amp.scale_loss(model(torch.ones(8)).mean(), optimizer) as scaled_loss:  # <- apex-amp
    scaled_loss.backward()
""",
    ),
    valid=("try:\n    from apex import amp\nexcept ImportError:\n    amp = None\n\namp.initialize(1, 2)\n",),
)

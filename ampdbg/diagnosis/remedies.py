"""What to do about a finding besides a pin: its remedy at the line of source, and a line for each finding.

A line of source tells whether a product is scaled only after it is made, and whether it takes a sum.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping

from ampdbg.diagnosis.skips import sort_skips
from ampdbg.ops import MATRIX_PRODUCTS, SCALINGS, SUMS, base_name
from ampdbg.record.codes import CODES, SAME, catalogued
from ampdbg.record.findings import Finding
from ampdbg.record.replays import Producer
from ampdbg.record.run import Record

TORCH_SCALE, TORCH_INTERVAL = 65536.0, 2000
"""GradScaler's defaults for ``init_scale`` and ``growth_interval``."""

RELAPSES = 2
"""So many skips right after the scale has grown are worth a longer interval."""


def remedy_of(code: str, at: Producer | None) -> str:
    """What cures the code, with what the op and the line of source make possible besides."""
    known = CODES[code]
    if at is None:
        return known.remedy
    for op, remedy in known.remedy_at:
        if op in at.op:
            return remedy
    line = at.source.text if at.source else ""
    product = known.remedy_at_product if scales_after_its_product(line) else ""
    return known.remedy + product + (known.remedy_at_sum if takes_a_sum(line) else "")


def other_remedies(record: Record) -> tuple[str, ...]:
    """One line each, with its place where there is one, labelled where it changes what the model computes.

    Findings that another one explains have none of their own.
    """
    lines: dict[str, None] = {}
    for finding in record.findings:
        if finding.root is None:
            for text in _remedies_of(finding, record):
                lines[_place(finding) + text] = None
    return tuple(lines)


def _remedies_of(finding: Finding, record: Record) -> Iterator[str]:
    code = catalogued(finding.code)
    if finding.severity == "info" and code.loss_scale != "settled":
        return
    if code.instead:
        yield code.instead
    elif code.loss_scale == "larger":
        yield _larger_scale(finding, record)
    elif code.loss_scale == "settled" and finding.severity == "info":
        yield from _settled_scale(record)
    elif code.verdict == "other":
        yield finding.remedy
    elif code.verdict == "precision":
        yield from _at_its_op(finding)


def _place(finding: Finding) -> str:
    return f"{finding.source.file}:{finding.source.line}: " if finding.source else ""


def _at_its_op(finding: Finding) -> Iterator[str]:
    text = finding.source.text if finding.source else ""
    name = base_name(finding.op) if finding.op else ""
    if name in MATRIX_PRODUCTS and scales_after_its_product(text):
        yield f"scale before the product: (q * s) @ k in place of (q @ k) * s ({SAME})"
    if name in SUMS:
        yield f"add up in FP32: sum(..., dtype=torch.float32) ({SAME})"
    if finding.phase == "backward" and takes_a_sum(text):
        yield "take a mean in place of the sum (changes the loss by a factor, and so the learning rate that fits)"


def _larger_scale(finding: Finding, record: Record) -> str:
    given, scale = _loss_scale(record), _number(finding.evidence.get("loss_scale"))
    if not isinstance(given, Mapping):
        dynamic = f"GradScaler(init_scale={TORCH_SCALE:g}, growth_interval={TORCH_INTERVAL})"
        return f"a dynamic loss scale, {dynamic}, in place of the static {_shown(scale)} ({SAME})"
    if scale < TORCH_SCALE:
        return f"a larger loss scale to begin with: init_scale={TORCH_SCALE:g} in place of {_shown(scale)} ({SAME})"
    interval = _number(given.get("growth_interval"))
    shorter = f"growth_interval={max(1, int(interval) // 10)} in place of {interval:g}"
    return f"a loss scale that grows sooner beyond {_shown(scale)}: {shorter} ({SAME})"


def _settled_scale(record: Record) -> Iterator[str]:
    given, skips = _loss_scale(record), sort_skips(record.steps)
    if not isinstance(given, Mapping):
        return
    worked = [step.scale for step in record.steps if not step.skipped]
    start = _number(given.get("init"))
    if skips.settling and worked and worked[0] < start:
        count = len(skips.settling)
        lost = "the step" if count == 1 else f"the {count} steps"
        yield f"init_scale={worked[0]:g} in place of {start:g} saves {lost} skipped at the start ({SAME})"
    interval = _number(given.get("growth_interval"))
    if len(skips.after_growth) >= RELAPSES and interval < TORCH_INTERVAL:
        count = len(skips.after_growth)
        skipped = f"the scaler skipped {count} steps after growing"
        yield f"growth_interval={TORCH_INTERVAL} in place of {interval:g}: {skipped} ({SAME})"


def _loss_scale(record: Record) -> object:
    precision = record.config.get("precision", {})
    return precision.get("loss_scale") if isinstance(precision, Mapping) else None


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _shown(scale: float) -> str:
    return "one" if math.isnan(scale) else f"{scale:g}"


def scales_after_its_product(line: str) -> bool:
    """Whether the line multiplies or divides what a product has made: ``(q @ k) * s``, ``torch.bmm(q, k).div(d)``.

    A line that is no whole statement tells nothing, and neither does a scaling that stands on another line.
    """
    return any(_has_product(scaled) for node in _nodes(line) for scaled in _scaled(node))


def takes_a_sum(line: str) -> bool:
    """Whether the line calls a ``sum``, or asks a loss to sum."""
    return any(
        isinstance(node, ast.Call) and (_called(node) == "sum" or any(map(_asks_for_sum, node.keywords)))
        for node in _nodes(line)
    )


def _nodes(line: str) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse(line.strip())))
    except (SyntaxError, ValueError):
        return []


def _scaled(node: ast.AST) -> list[ast.AST]:
    """What the node scales, where it is a scaling."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return [node.left]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [node.left, node.right]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.rstrip("_") in SCALINGS:
        return [node.func.value]
    return []


def _has_product(node: ast.AST) -> bool:
    return any(
        (isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.MatMult))
        or (isinstance(inner, ast.Call) and _called(inner) in MATRIX_PRODUCTS)
        for inner in ast.walk(node)
    )


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _asks_for_sum(keyword: ast.keyword) -> bool:
    return keyword.arg == "reduction" and isinstance(keyword.value, ast.Constant) and keyword.value.value == "sum"

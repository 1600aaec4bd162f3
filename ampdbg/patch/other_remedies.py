"""Remedies other than a pin, one line for each finding that has one: what to change, and where."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping

from ampdbg.diagnosis.scale import sort_skips
from ampdbg.diagnosis.source_text import scales_after_its_product, takes_a_sum
from ampdbg.formats import FLOAT16
from ampdbg.record.findings import Finding
from ampdbg.record.run import Record

SAME = "the same function"
CHANGED = "changes the model's function"

PRODUCTS = re.compile(r"aten\.(bmm|mm|matmul|baddbmm|einsum)\b")
SUMS = re.compile(r"aten\.(sum|nansum|mean|cumsum|prod|var|std|linalg_vector_norm|norm)\b")

TORCH_SCALE, TORCH_INTERVAL = 65536.0, 2000
"""GradScaler's defaults for ``init_scale`` and ``growth_interval``."""

RELAPSES = 2
"""So many skips right after the scale has grown are worth a longer interval."""

Remedy = Callable[[Finding, Record], Iterator[str]]


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
    if finding.code.startswith("misuse-"):
        yield finding.remedy
    elif finding.code in REMEDIES:
        yield from REMEDIES[finding.code](finding, record)


def _place(finding: Finding) -> str:
    return f"{finding.source.file}:{finding.source.line}: " if finding.source else ""


def _overflow(finding: Finding, record: Record) -> Iterator[str]:
    text = finding.source.text if finding.source else ""
    if PRODUCTS.search(finding.op) and scales_after_its_product(text):
        value = _number(finding.evidence.get("value"))
        where = "" if math.isnan(value) else f" where {value:.3g} * s is below {FLOAT16.largest:g}"
        yield f"scale before the product{where}: (q * s) @ k in place of (q @ k) * s ({SAME})"
    if SUMS.search(finding.op):
        yield f"add up in FP32: sum(..., dtype=torch.float32) ({SAME})"
    if finding.phase == "backward" and takes_a_sum(text):
        yield "take a mean in place of the sum (changes the loss by a factor, and so the learning rate that fits)"


def _statistic(finding: Finding, record: Record) -> Iterator[str]:
    yield f"compute this statistic in FP32: x.float() before it, or sum(..., dtype=torch.float32) ({SAME})"


def _eps(finding: Finding, record: Record) -> Iterator[str]:
    yield f"an eps of at least 1e-6, which FP16 does not round to zero ({CHANGED} slightly)"


def _mask(finding: Finding, record: Record) -> Iterator[str]:
    yield f"masked_fill(mask, torch.finfo(x.dtype).min), or a boolean mask, in place of the constant ({SAME})"


def _larger_scale(finding: Finding, record: Record) -> Iterator[str]:
    given, scale = _loss_scale(record), _number(finding.evidence.get("loss_scale"))
    dynamic = f"GradScaler(init_scale={TORCH_SCALE:g}, growth_interval={TORCH_INTERVAL})"
    if not isinstance(given, Mapping):
        yield f"a dynamic loss scale, {dynamic}, in place of the static {_shown(scale)} ({SAME})"
    elif scale < TORCH_SCALE:
        yield f"a larger loss scale to begin with: init_scale={TORCH_SCALE:g} in place of {_shown(scale)} ({SAME})"
    else:
        interval = _number(given.get("growth_interval"))
        shorter = f"growth_interval={max(1, int(interval) // 10)} in place of {interval:g}"
        yield f"a loss scale that grows sooner beyond {_shown(scale)}: {shorter} ({SAME})"


def _settled_scale(finding: Finding, record: Record) -> Iterator[str]:
    given, skips = _loss_scale(record), sort_skips(record.steps)
    if not isinstance(given, Mapping):
        return
    worked = [step.scale for step in record.steps if not step.skipped]
    start = _number(given.get("init"))
    if skips.settling and worked and worked[0] < start:
        count = len(skips.settling)
        lost = "the step that is" if count == 1 else f"the {count} steps that are"
        yield f"init_scale={worked[0]:g} in place of {start:g} saves {lost} skipped at the start ({SAME})"
    interval = _number(given.get("growth_interval"))
    if len(skips.after_growth) >= RELAPSES and interval < TORCH_INTERVAL:
        count = len(skips.after_growth)
        yield f"growth_interval={TORCH_INTERVAL} in place of {interval:g}: {count} steps are skipped after it ({SAME})"


def _losses_apart(finding: Finding, record: Record) -> Iterator[str]:
    yield f"scale the losses of the two parts apart: a backward pass and a GradScaler for each ({SAME})"


def _optimizer(finding: Finding, record: Record) -> Iterator[str]:
    yield finding.remedy
    if finding.evidence.get("eps"):
        yield "an eps of the optimizer that half holds: eps=1e-6 (changes the updates slightly)"


def _normalise(finding: Finding, record: Record) -> Iterator[str]:
    yield f"{finding.remedy} ({CHANGED}: it sees other numbers)"


def _own(finding: Finding, record: Record) -> Iterator[str]:
    yield finding.remedy


REMEDIES: Mapping[str, Remedy] = {
    "forward-overflow": _overflow,
    "gradient-overflow": _overflow,
    "silent-overflow": _statistic,
    "precision-loss": _overflow,
    "eps-underflow": _eps,
    "mask-constant": _mask,
    "gradient-underflow": _larger_scale,
    "no-usable-scale": _losses_apart,
    "scale-calibration": _settled_scale,
    "scale-runaway": _own,
    "optimizer-underflow": _optimizer,
    "data-range": _normalise,
    "data-nonfinite": _own,
    "weights-nonfinite": _own,
    "infinite-loss": _own,
    "true-nan": _own,
    "divergence": _own,
}


def _loss_scale(record: Record) -> object:
    precision = record.config.get("precision", {})
    return precision.get("loss_scale") if isinstance(precision, Mapping) else None


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _shown(scale: float) -> str:
    return "one" if math.isnan(scale) else f"{scale:g}"

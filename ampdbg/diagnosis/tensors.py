"""Findings about what was bad before or after a step: the batch, the weights, the buffers."""

from __future__ import annotations

from collections.abc import Iterator

from ampdbg.findings import Finding
from ampdbg.record import Record, Step, TensorCounts


def data_nonfinite(record: Record) -> Iterator[Finding]:
    """``data-nonfinite``: the first batch that holds inf or NaN before the model sees it."""
    for step in record.steps:
        bad = [counts for counts in step.nonfinite if counts.kind == "batch"]
        if bad:
            sample = f", first in sample {bad[0].first_index[0]}" if bad[0].first_index else ""
            where = f"{bad[0].name or 'its tensor'}{sample}"
            yield Finding(
                code="data-nonfinite",
                severity="error",
                step=step.step,
                phase="data",
                message=f"the batch of step {step.step} holds {_counted(bad[0])} in {where}",
                remedy="filter or repair these samples; no precision setting helps",
                evidence=_evidence(bad[0]),
            )
            return


def weights_nonfinite(record: Record) -> Iterator[Finding]:
    """``weights-nonfinite``: parameters or buffers that were bad before a forward pass."""
    for step in record.steps:
        bad = [counts for counts in step.nonfinite if _was_bad_before(counts, step)]
        if bad:
            yield Finding(
                code="weights-nonfinite",
                severity="error",
                step=step.step,
                phase="forward",
                parameter=bad[0].name,
                message=f"{bad[0].kind} {bad[0].name} holds {_counted(bad[0])} before the forward pass of step "
                f"{step.step}" + (f", and {len(bad) - 1} more do" if len(bad) > 1 else ""),
                remedy="start from weights that are finite"
                if step.step == 0
                else f"look at step {step.step - 1}, whose update wrote them",
                evidence=_evidence(bad[0]),
            )
            return


def buffer_poisoned(record: Record) -> Iterator[Finding]:
    """``buffer-poisoned``: a buffer that was finite before a step and is not after it."""
    for step in record.steps:
        bad = [counts for counts in step.nonfinite if counts.kind == "buffer" and counts.when == "after"]
        if bad:
            yield Finding(
                code="buffer-poisoned",
                severity="error",
                step=step.step,
                phase="forward",
                parameter=bad[0].name,
                module=bad[0].name.rpartition(".")[0],
                message=f"buffer {bad[0].name} holds {_counted(bad[0])} after step {step.step} and stays so: "
                "a skipped step undoes no buffer, and evaluation will use it",
                remedy="cure what overflowed in this step, then reset the buffer",
                evidence=_evidence(bad[0]),
            )
            return


def _was_bad_before(counts: TensorCounts, step: Step) -> bool:
    """A skipped step writes no parameter: one that is bad after it was bad before it."""
    if counts.kind == "batch":
        return False
    return counts.when == "before" or (counts.kind == "parameter" and step.skipped)


def _counted(counts: TensorCounts) -> str:
    parts = [f"{number} {name}" for number, name in ((counts.inf, "inf"), (counts.nan, "NaN")) if number]
    return f"{' and '.join(parts)} among {counts.size} values"


def _evidence(counts: TensorCounts) -> dict[str, object]:
    return {
        "name": counts.name,
        "inf": counts.inf,
        "nan": counts.nan,
        "size": counts.size,
        "first_index": list(counts.first_index),
    }

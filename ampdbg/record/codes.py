"""The catalogue of finding codes: all that is known of a finding by its code stands here (no torch).

A new code is an entry in ``CODES``, or in ``misuse_codes.py``; the family in ``ampdbg/diagnosis/`` or the rule in
``ampdbg/lint/rules/`` that decides it; and a Markdown file of its name in ``ampdbg/record/explanations/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampdbg.record.code import FACTS, Code
from ampdbg.record.findings import Finding, Phase
from ampdbg.record.misuse_codes import MISUSES

__all__ = ["CODES", "FACTS", "Code", "catalogued", "finding_of"]

FORWARD = "Forward pass"
GRADIENTS = "Gradients and loss scale"
DATA = "Data and weights"
OTHER = "Other causes"

_ALL = (
    Code(
        "forward-overflow",
        FORWARD,
        "precision",
        "run this op in FP32 with its inputs cast up",
        "The forward pass overflows{where} at step {step}{losses}.",
        pin_helps=True,
        in_range_table=True,
    ),
    Code(
        "silent-overflow",
        FORWARD,
        "precision",
        "compute this statistic in FP32: x.float() before it",
        "An op overflows{where}, although the loss and every gradient are finite.",
        information="Healthy: {skips}; an op overflows{where} without changing the result.",
        pin_helps=True,
        erases_itself=True,
    ),
    Code(
        "buffer-poisoned",
        FORWARD,
        "inconclusive",
        "cure what overflowed in this step, then reset the buffer",
        "A buffer is non-finite{where} after step {step} and stays so, although the weights are finite.",
        information="{verdict}: {skips}; a buffer{where} holds inf or NaN, which no loss shows.",
        pin_helps=True,
    ),
    Code(
        "eps-underflow",
        FORWARD,
        "precision",
        "compute this statistic in FP32, or use an eps of at least 1e-6, which FP16 does not round to zero",
        "A divisor or a logarithm's argument rounds to zero{where} at step {step}{losses}.",
        pin_helps=True,
        changes_function=True,
        is_a_constant=True,
        remedy_behind_half="run with autocast(enabled=False) what makes this value, for it is zero in half before this "
        "line makes FP32 of it, or add an eps of at least 1e-6 to it, under the root",
        remedy_near_one="run what makes p in FP32 too: x.float() before the sigmoid, or clamp p to at most 0.9990: "
        "FP16 has no number between 0.9995 and 1, so that 1 - p is 0 there, and no smaller eps helps",
    ),
    Code(
        "mask-constant",
        FORWARD,
        "other",
        "use masked_fill(mask, torch.finfo(x.dtype).min), or a boolean mask, in place of the constant",
        "The code writes a constant{where} that half precision cannot hold, at step {step}{losses}.",
        pin_helps=True,
        is_a_constant=True,
    ),
    Code(
        "precision-loss",
        FORWARD,
        "precision",
        "run this op in FP32 with its inputs cast up",
        "Nothing overflows before it, but step {step} comes to a different result than FP32.",
        pin_helps=True,
        remedy_at=(
            (
                "binary_cross_entropy_backward",
                "give the loss logits (BCEWithLogitsLoss), or run the sigmoid in FP32: half rounds it to 0 or 1",
            ),
        ),
    ),
    Code(
        "gradient-overflow",
        GRADIENTS,
        "precision",
        "run this op in FP32 with its inputs cast up",
        "Gradients overflow{where} although the loss is finite: {skips}{falling}.",
        pin_helps=True,
        keeps_scale=True,
        in_range_table=True,
        remedy_at=(("_to_copy", "run the op that made this tensor in FP32 too: its gradient becomes half here"),),
        passes=True,
    ),
    Code(
        "gradient-underflow",
        GRADIENTS,
        "precision",
        "use a larger loss scale, or a dynamic one: torch.amp.GradScaler starts at 65536",
        "The loss scale is too low: part of the gradient is zero that FP32 has values for.",
        counts_against_a_patch=False,
        why_no_pin="No pin helps: the loss scale is too low for the gradients of {step}.",
    ),
    Code(
        "no-usable-scale",
        GRADIENTS,
        "precision",
        "run this op in FP32, or scale the losses apart: a backward pass and a GradScaler for each",
        "No loss scale suits every part of the model: {skips}{falling}.",
        pin_helps=True,
        keeps_scale=True,
        passes=True,
    ),
    Code(
        "scale-calibration",
        GRADIENTS,
        "other",
        "use a dynamic loss scale, which finds the right one by itself",
        "The static loss scale {last} is too large: {skips}.",
        information="{verdict}: {skips} while the loss scale {settles}.",
        why_no_pin="Nothing to pin: the static loss scale is too large for the gradients of {step}.",
        passes=True,
    ),
    Code(
        "gradient-growth",
        GRADIENTS,
        "other",
        "none is needed while the loss falls; where it does not, look for what makes the gradients grow",
        "Gradients grow from step {step} on, and the loss scale follows them: {skips}{falling}.",
        information="Healthy: {skips}; gradients grow, and the loss scale follows them{falling}.",
        counts_against_a_patch=False,
        severity="info",
    ),
    Code(
        "scale-oscillation",
        GRADIENTS,
        "other",
        "leave growth_interval at GradScaler's 2000, or a few hundred where the run is short",
        "The loss scale grows too often: {skips}.",
        counts_against_a_patch=False,
        harms_forward=False,
        severity="warning",
    ),
    Code(
        "scale-restart",
        GRADIENTS,
        "other",
        "make the GradScaler once, in front of the loop",
        "The loss scale begins anew too often: {skips}.",
        counts_against_a_patch=False,
        harms_forward=False,
        severity="warning",
    ),
    Code(
        "scale-collapse",
        GRADIENTS,
        "other",
        "cure the root: a smaller initial scale only delays it",
        "The loss scale keeps falling: {first} at first, {last} at the end, {skips}.",
        passes=True,
    ),
    Code(
        "scale-runaway",
        GRADIENTS,
        "other",
        "check the loss's magnitude: a mean instead of a sum; check gradients after unscaling",
        "The loss scale goes from {first} to {last}, beyond what training needs.",
        passes=True,
    ),
    Code(
        "limit-ahead",
        GRADIENTS,
        "inconclusive",
        "go on from here, and run it again at that step: ampdbg scan, with checkpoint: {model: FILE, optimizer: FILE}",
        "What grows steadily{where} would reach FP16's limit.",
        information="Healthy so far; what grows steadily{where} would reach FP16's limit.",
        why_no_pin="Nothing to pin so far: what grows has not reached the limit at {step}.",
        counts_against_a_patch=False,
    ),
    Code(
        "optimizer-underflow",
        GRADIENTS,
        "other",
        "keep the parameters in float32 (no .half()) and let autocast lower the ops",
        "Half-precision weights lose the optimizer's updates.",
        counts_against_a_patch=False,
    ),
    Code(
        "frozen-weights",
        GRADIENTS,
        "other",
        "keep the parameters in float32 and let autocast lower the ops (from_pretrained(..., dtype=torch.float32)), or "
        "use an optimizer that rounds stochastically or keeps float32 copies",
        "Weights in bfloat16 hardly move: the optimizer's updates are too small to change their rounded values.",
        counts_against_a_patch=False,
    ),
    Code(
        "data-nonfinite",
        DATA,
        "other",
        "filter or repair these samples; no precision setting helps",
        "Bad data: the batch of step {step} holds inf or NaN.",
        counts_against_a_patch=False,
        fails_in_fp32=True,
    ),
    Code(
        "data-range",
        DATA,
        "other",
        "normalise the data: half precision cannot hold it",
        "Bad data: the batch of step {step} holds values that half precision cannot hold.",
        counts_against_a_patch=False,
        why_no_pin="Nothing to pin: half precision cannot hold the data of {step}, and a pin would only hide that.",
        changes_function=True,
        phase="data",
    ),
    Code(
        "weights-nonfinite",
        DATA,
        "other",
        "start from weights that are finite",
        "Bad weights: parameters or buffers are non-finite before the forward pass of step {step}.",
        fails_in_fp32=True,
    ),
    Code(
        "infinite-loss",
        OTHER,
        "other",
        "leave out what has an infinite loss, or change its formula; no precision helps",
        "The loss of step {step} is infinite in every precision, in FP32 and FP64 too.",
        counts_against_a_patch=False,
        fails_in_fp32=True,
        remedy_at=(("ctc_loss", "filter these samples, or let the loss zero them (zero_infinity)"),),
        is_of_a_formula=True,
    ),
    Code(
        "true-nan",
        OTHER,
        "other",
        "change the formula where it has no value, or no derivative; no precision helps",
        "Step {step} fails in every precision: the mathematics is wrong, not FP16.",
        counts_against_a_patch=False,
        fails_in_fp32=True,
        remedy_at=(
            ("nll_loss", "leave out batches whose every target is ignored (ignore_index): a mean over none is 0/0"),
        ),
        is_of_a_formula=True,
    ),
    Code(
        "divergence",
        OTHER,
        "other",
        "lower the learning rate, warm up, or clip gradients; no precision helps",
        "Training diverges at step {step}, in FP32 too.",
        counts_against_a_patch=False,
        fails_in_fp32=True,
    ),
    Code(
        "hardware",
        OTHER,
        "inconclusive",
        "run the step on another device or with other kernels",
        "The device computes step {step} wrongly, far below every limit.",
        why_no_pin="No pin helps: the device computes {step} wrongly.",
    ),
    Code(
        "unknown",
        OTHER,
        "inconclusive",
        "compare with a run in FP32: --set precision.level=O0",
        "The {phase} pass of step {step} is not finite, and the cause is unknown: {skips}{falling}{losses}.",
        pin_helps=True,
        why_no_pin="No pin is suggested: what fails at {step} may have another cause than precision.",
        keeps_scale=True,
    ),
    *MISUSES,
)

CODES: Mapping[str, Code] = {code.name: code for code in _ALL}
"""The catalogue: every code by its name, in the order in which they are listed."""


def catalogued(name: str) -> Code:
    """The entry of a code; of one that another version has added, that of a cause that is not known."""
    return CODES.get(name, CODES["unknown"])


def finding_of(name: str, step: int, phase: Phase, message: str, **fields: Any) -> Finding:
    """A finding with its code's severity and remedy, where ``fields`` does not give others."""
    code = CODES[name]
    given = {"severity": code.severity, "remedy": code.remedy} | fields
    return Finding(code=name, step=step, phase=code.phase or phase, message=message, **given)

"""The catalogue of finding codes: all that is known of a finding by its code stands here (no torch).

A new code is an entry in ``CODES``; the family in ``ampdbg/diagnosis/`` or the rule in ``ampdbg/lint/rules/`` that
decides it; and a Markdown file of its name in ``ampdbg/record/explanations/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ampdbg.record.findings import Finding, Phase, Severity


@dataclass(frozen=True)
class Code:
    """What is known of a finding by its code alone.

    Attributes:
        name: the public name, as in records and ``ampdbg explain``.
        family: the heading that it is listed under.
        verdict: the record's verdict where this is the root finding.
        remedy: what cures it.
        headline: the report's first sentence, a template of :data:`FACTS`; empty where the explanation's title says it.
        information: the same where the finding is no more than information.
        pin_helps: running modules in FP32 may cure its step.
        counts_against_a_patch: a run with the patch that shows it disproves the patch; what no pin could cure does not.
        passes: nor does it where the run goes on: its last steps are finite and taken.
        fails_in_fp32: its step fails in FP32 as well.
        keeps_scale: its step has to be cured at its own loss scale, since a lower one would cure it too.
        erases_itself: the step's loss and gradients are finite.
        in_range_table: the table of ``ampdbg ranges`` shows it.
        why_no_pin: what a search for pins answers where no pin helps; ``{step}`` names the step.
        harms_forward: it may be why a forward pass of its step, or of a later one, fails.
        changes_function: the remedy changes what the model computes.
        is_a_constant: it is a constant of the code that half cannot hold: an edit of its line may be all that it takes.
        remedy_at: by a part of the op's name, a remedy that fits that op better.
        is_of_a_formula: what is to be changed is a formula: its remedy is that of the kind of op that it fails in.
        remedy_near_one: what cures it where the op takes what is taken from 1, and near it.
        remedy_behind_half: what cures it where the op's line computes in FP32 what came to it from half.
        severity, phase, message: those of a misuse, or of an error that autocast causes, which is known by its code.
        is_counted: how often a misuse happens is known: not, where only some passes are looked into.
        harmless_share: a misuse in a smaller share of the steps is no more than information; where this is not 0, so is
            one in a few skipped steps that settle the loss scale.
        is_of_a_region: no more than information where its line is a library's, which opens the region of autocast.
        remedy_in_library: the remedy of a misuse whose line is a library's, and not the user's to edit.
    """

    name: str
    family: str
    verdict: Literal["precision", "other", "inconclusive"]
    remedy: str
    headline: str
    information: str = ""
    pin_helps: bool = False
    counts_against_a_patch: bool = True
    passes: bool = False
    fails_in_fp32: bool = False
    keeps_scale: bool = False
    erases_itself: bool = False
    in_range_table: bool = False
    why_no_pin: str = "No pin helps: precision is not the cause of what fails at {step}."
    harms_forward: bool = True
    changes_function: bool = False
    is_a_constant: bool = False
    remedy_at: tuple[tuple[str, str], ...] = ()
    is_of_a_formula: bool = False
    remedy_near_one: str = ""
    remedy_behind_half: str = ""
    severity: Severity = "error"
    phase: Phase | None = None
    message: str = ""
    is_counted: bool = True
    harmless_share: float = 0.0
    is_of_a_region: bool = False
    remedy_in_library: str = ""


FACTS = ("step", "phase", "where", "skips", "losses", "falling", "first", "last", "settles", "verdict")
"""What a headline may name: the finding's step, phase and module; how many steps were skipped; what losses are not
finite; how far the loss scale fell; the first and the last scale; whether it has settled; and, where nothing is wrong,
the verdict."""

FORWARD = "Forward pass"
GRADIENTS = "Gradients and loss scale"
DATA = "Data and weights"
OTHER = "Other causes"
CALLS = "Misuse: calls in the wrong order"
SETUP = "Misuse: autocast and scaler set up wrongly"
OLD = "Old spellings of mixed precision, found by ampdbg lint"

WHY_NO_PIN = "No pin is looked for: until the code is repaired, what fails beside it says little of precision."


KEEP_WEIGHTS = (
    "No pin helps: the weights themselves are stored in half precision. "
    "Keep them in float32, and let autocast lower the ops."
)


def _misuse(
    name: str, family: str, phase: Phase, message: str, remedy: str, severity: Severity = "error", **more: Any
) -> Code:
    """A misuse of autocast or of the scaler: nothing that it causes says anything about precision."""
    other = {"verdict": "other", "headline": "", "why_no_pin": WHY_NO_PIN, "counts_against_a_patch": False}
    known: dict[str, Any] = other | more
    return Code(name, family, remedy=remedy, severity=severity, phase=phase, message=message, **known)


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
        "FP16 rounds a value so that a divisor or a logarithm's argument becomes zero{where} at step {step}{losses}.",
        pin_helps=True,
        changes_function=True,
        is_a_constant=True,
        remedy_behind_half="run with autocast(enabled=False) what makes this value, for it is zero in half before this "
        "line makes FP32 of it, or add an eps of at least 1e-6 to it, under the root",
        remedy_near_one="compute what makes p in FP32 too, as x.float() before a sigmoid, or clamp p to at most "
        "0.9990: FP16 has no number between 0.9995 and 1, so that 1 - p is 0 there, and no smaller eps helps",
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
        "run this op in FP32; where it is already, what makes its inputs",
        "Nothing overflows before it, but step {step} comes to a different result than FP32.",
        pin_helps=True,
        remedy_at=tuple(
            (op, "give the loss logits (BCEWithLogitsLoss), or run the sigmoid in FP32: half rounds it to 0 or 1")
            for op in ("binary_cross_entropy.", "binary_cross_entropy_backward")
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
        "The loss scale {last} is too large, and nothing lowers it: {skips}.",
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
        "What grows{where} comes near FP16's limit.",
        information="Healthy so far; what grows steadily{where} would reach FP16's limit.",
        why_no_pin="Nothing to pin so far: what grows has not reached the limit at {step}.",
        counts_against_a_patch=False,
    ),
    Code(
        "optimizer-underflow",
        GRADIENTS,
        "precision",
        "keep the parameters in float32 (no .half()) and let autocast lower the ops",
        "Half-precision weights lose the optimizer's updates.",
        why_no_pin=KEEP_WEIGHTS,
        counts_against_a_patch=False,
    ),
    Code(
        "frozen-weights",
        GRADIENTS,
        "precision",
        "keep the parameters in float32 and let autocast lower the ops (from_pretrained(..., dtype=torch.float32)), or "
        "those that are named; or use an optimizer that rounds stochastically (torchao's AdamW8bit with "
        "bf16_stochastic_round=True) or compensates (torch-optimi's AdamW); neither a fused optimizer nor a larger "
        "learning rate helps",
        "Half-precision weights stand still: the optimizer's updates are too small to change their rounded values.",
        why_no_pin=KEEP_WEIGHTS,
        counts_against_a_patch=False,
    ),
    Code(
        "frozen-average",
        GRADIENTS,
        "precision",
        "keep the average in float32, also of half weights: copy.deepcopy(model).float(), or .float() on each of its "
        "tensors before the first step; and cast it to half where it is used",
        "An average of the weights (EMA, SWA) is kept in half precision and stands still.",
        why_no_pin=KEEP_WEIGHTS,
        counts_against_a_patch=False,
    ),
    Code(
        "lost-accumulation",
        GRADIENTS,
        "precision",
        "keep the parameters in float32 and let autocast lower the ops, so that gradients are added up in float32; "
        "or take fewer and larger micro-batches a step (a loss divided by their number loses as much)",
        "The gradients of many micro-batches are added up in half precision, which loses part of their sum.",
        why_no_pin=KEEP_WEIGHTS,
        counts_against_a_patch=False,
    ),
    Code(
        "stuck-moment",
        GRADIENTS,
        "precision",
        "keep the parameters in float32 and let autocast lower the ops, or use beta2 = 0.95",
        "Adam's second moment sticks in half precision: what decays by beta2 rounds back to what it was.",
        why_no_pin=KEEP_WEIGHTS,
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
    _misuse(
        "misuse-clip-scaled",
        CALLS,
        "optimizer",
        "the code clips gradients that still carry the loss scale, and so to far less than the limit it sets",
        "clip after unscaling: scaler.unscale_(optimizer), then clip_grad_norm_, then scaler.step(optimizer)",
        harms_forward=False,
    ),
    _misuse(
        "misuse-unscale-twice",
        CALLS,
        "optimizer",
        "the code calls unscale_ on gradients that it has unscaled already",
        "call scaler.unscale_(optimizer) once between backward() and scaler.step(optimizer), which unscales by itself",
    ),
    _misuse(
        "misuse-accumulate",
        CALLS,
        "optimizer",
        "the code lets gradients add up across unscale_, step or update: their sum mixes scales",
        "call unscale_, clipping, step and update only after the last micro-batch of each step, and then zero_grad()",
    ),
    _misuse(
        "misuse-bare-step",
        CALLS,
        "optimizer",
        "the code calls optimizer.step() beside the scaler: nothing withholds bad gradients, or unscales those that "
        "unscale_ has not",
        "replace it by scaler.step(optimizer), followed by scaler.update()",
    ),
    _misuse(
        "misuse-unscaled-loss",
        CALLS,
        "optimizer",
        "the scaler steps on gradients of a loss that it has not scaled, and divides them by its scale even so",
        "scale the loss of each optimizer that the scaler steps: scaler.scale(loss).backward()",
        harms_forward=False,
        is_counted=False,
    ),
    _misuse(
        "misuse-unused-optimizer",
        CALLS,
        "optimizer",
        "the code calls scaler.step(optimizer) for an optimizer none of whose parameters has a gradient",
        "step only the optimizers that the backward pass of this iteration has reached",
        harms_forward=False,
    ),
    _misuse(
        "misuse-no-update",
        CALLS,
        "optimizer",
        "no scaler.update() follows scaler.step(optimizer): the scale never adapts, and torch refuses the next step",
        "call scaler.update() once at the end of each iteration, after the steps of all optimizers",
        harms_forward=False,
    ),
    _misuse(
        "misuse-many-updates",
        CALLS,
        "optimizer",
        "scaler.update() comes before the step of an optimizer, which then unscales its gradients by the new scale",
        "call scaler.update() once, after the steps of all optimizers",
        "warning",
    ),
    _misuse(
        "misuse-stale-gradients",
        CALLS,
        "backward",
        "the code does not clear the gradients of a skipped step: they stay inf, and every later step is skipped too",
        "call optimizer.zero_grad() in every iteration, whether the scaler has skipped the step or not",
        harms_forward=False,
    ),
    _misuse(
        "misuse-scheduler-on-skip",
        CALLS,
        "optimizer",
        "the learning-rate scheduler moves on although the scaler has skipped the optimizer's step",
        "compare scaler.get_scale() before and after update(), and call scheduler.step() unless it fell",
        "warning",
        harmless_share=0.05,
        remedy_in_library="a library steps the scheduler, and a few skips may stay as they are; for many, override its "
        "hook (in Lightning lr_scheduler_step) and leave the step out where scaler.get_scale() fell",
    ),
    _misuse(
        "misuse-gradient-penalty",
        CALLS,
        "backward",
        "the code computes a penalty from gradients of the scaled loss without dividing them by the scale",
        "divide what torch.autograd.grad returns by scaler.get_scale() before the penalty, inside autocast",
    ),
    _misuse(
        "misuse-no-scaler",
        SETUP,
        "backward",
        "the loss is computed in float16 and goes backward unscaled: gradients below 3e-8 become zero",
        "scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update() with a torch.amp.GradScaler",
        "warning",
        is_counted=False,
    ),
    _misuse(
        "misuse-scaler-bfloat16",
        SETUP,
        "backward",
        "the code scales a loss that is computed in bfloat16, whose range is float32's and needs no loss scale",
        "leave the scaler out, or make it with enabled=False",
        "warning",
        is_counted=False,
    ),
    _misuse(
        "misuse-lost-upcast",
        SETUP,
        "optimizer",
        "the upcast did nothing: it makes a new tensor of a parameter, which the loop throws away; they stay in half",
        "write p.data = p.data.float(), before the optimizer is made, or model.float() for all of them",
        is_counted=False,
    ),
    _misuse(
        "misuse-half-parameters",
        SETUP,
        "optimizer",
        "the parameters are float16, and so are their gradients, which a scaler does not unscale",
        "keep the parameters in float32 (no model.half()) and let autocast lower the ops",
    ),
    _misuse(
        "misuse-custom-function",
        SETUP,
        "backward",
        "an autograd.Function without custom_fwd and custom_bwd meets mixed dtypes under autocast",
        "decorate forward with torch.amp.custom_fwd(device_type=..., cast_inputs=torch.float32) and backward with "
        "torch.amp.custom_bwd(device_type=...)",
    ),
    _misuse(
        "misuse-backward-in-autocast",
        SETUP,
        "backward",
        "the code calls backward() inside autocast, which belongs around the forward pass and the loss alone",
        "end the autocast block before backward(): each backward op runs in the dtype of its forward op",
        "warning",
        is_of_a_region=True,
    ),
    Code(
        "not-half",
        SETUP,
        "inconclusive",
        "run it on a GPU, weights and all, or with ampdbg run --emulate on this machine: these steps say nothing "
        "about FP16; where it was run so, the script has switched autocast off itself, as one that asks tensors for"
        " their device",
        "Half precision was asked for, and every step ran in FP32.",
        why_no_pin=WHY_NO_PIN,
        counts_against_a_patch=False,
        severity="warning",
    ),
    Code(
        "half-weights",
        SETUP,
        "precision",
        "load and keep the weights in float32, as by from_pretrained(..., dtype=torch.float32), and let autocast lower "
        "the ops",
        "Mixed precision was asked for, and the weights that train are in half themselves.",
        information="{verdict}: {skips}; the weights that train are in half, and nothing was said of mixed precision.",
        why_no_pin=KEEP_WEIGHTS,
        counts_against_a_patch=False,
        harms_forward=False,
        severity="warning",
    ),
    Code(
        "rounded-buffer",
        SETUP,
        "precision",
        "compute the buffer anew in float32 behind the cast, or cast the parameters alone",
        "A buffer that the model makes in float32 was cast with it, and half rounds away what it is for.",
        why_no_pin="No pin helps: the buffer itself is stored in half precision.",
        counts_against_a_patch=False,
        harms_forward=False,
        severity="warning",
    ),
    _misuse(
        "misuse-bce",
        SETUP,
        "forward",
        "binary_cross_entropy on probabilities is unsafe in float16, and autocast refuses it",
        "return logits and use torch.nn.BCEWithLogitsLoss, which is safe under autocast",
    ),
    _misuse(
        "misuse-autocast-float32",
        SETUP,
        "forward",
        "autocast(dtype=torch.float32) is no FP32 region: on CUDA it lets half tensors in as they are",
        "leave autocast with enabled=False, and cast what the block reads with .float()",
        "warning",
    ),
    _misuse(
        "misuse-autocast-device",
        SETUP,
        "forward",
        "autocast is for another device than the tensors', and lowers none of their ops",
        "give autocast the device type of the tensors: torch.autocast(device_type=x.device.type)",
    ),
    _misuse(
        "misuse-autocast-decorator",
        SETUP,
        "forward",
        "autocast decorates in a way that does not run the forward pass under it",
        'decorate the function with a call: @torch.autocast("cuda")',
    ),
    _misuse(
        "misuse-unsaved-scaler",
        SETUP,
        "optimizer",
        "the checkpoint leaves the scaler's state out: a resumed run begins at the first scale again",
        "save scaler.state_dict() beside the optimizer's, and load it with scaler.load_state_dict()",
        "warning",
    ),
    _misuse(
        "deprecated-amp",
        OLD,
        "forward",
        "torch.cuda.amp is deprecated since torch 2.4",
        'use torch.amp, and name the device: torch.amp.autocast("cuda"), torch.amp.GradScaler("cuda")',
        "warning",
    ),
    _misuse(
        "apex-amp",
        OLD,
        "forward",
        "apex.amp is no longer maintained, and patches torch's functions; torch.amp has taken its place",
        "torch.autocast around the forward pass and the loss, torch.amp.GradScaler around backward and step",
        "warning",
    ),
    _misuse(
        "apex-class",
        OLD,
        "forward",
        "torch has a class of its own that does the same",
        "use torch's class",
        "warning",
    ),
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

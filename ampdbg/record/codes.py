"""The catalogue of finding codes: everything that depends only on a finding's code (no torch).

A new code needs an entry in ``CODES``, and a Markdown file of its name in ``ampdbg/record/explanations/``. A family in
``ampdbg/diagnosis/`` or a rule in ``ampdbg/lint/rules/`` must decide it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ampdbg.record.findings import Finding, Phase, Severity


@dataclass(frozen=True)
class Code:
    """The properties that all findings with one code share.

    Attributes:
        name: the public name, as in records and ``ampdbg explain``.
        verdict: the record's verdict if this is the root finding.
        remedy: the advice to the user.
        headline: the report's first sentence, a template of :data:`FACTS`. If empty, the title of the explanation is
            used.
        family: the heading of the code in lists.
        information: the headline if the finding is only information.
        pin_helps: running modules in FP32 may cure the step.
        disproves_patch: the code disproves a patch if a run with the patch shows it, although no pin cures it.
        passes: the same, unless the last steps of that run are finite and taken.
        fails_in_fp32: the step fails in FP32 too.
        keeps_scale: the step must be cured at its own loss scale, because a lower scale would cure it too.
        erases_itself: the loss and gradients of the step are finite.
        in_range_table: the table of ``ampdbg ranges`` shows the code.
        why_no_pin: the result of a search for pins if no pin helps; ``{step}`` names the step.
        harms_forward: the fault can make a forward pass of its step, or of a later step, fail.
        changes_function: the remedy changes what the model computes.
        is_a_constant: the cause is a constant of the code that half cannot hold. Editing its line may be enough.
        remedy_at: better remedies for certain ops, by a part of the op's name.
        is_of_a_formula: the remedy is to change a formula, and depends on the kind of op that fails.
        remedy_near_one: the remedy if the op takes a difference ``1 - p`` with p near 1.
        remedy_behind_half: the remedy if the op's line computes in FP32 on a value that half has rounded before.
        severity, phase, message: only for a misuse or an error that autocast causes, since the code decides them.
        is_counted: the number of misuses is known. It is not if ampdbg examines only some passes.
        harmless_share: a misuse in a smaller share of the steps is only information. If this is not 0, so is a misuse
            in a few skipped steps while the loss scale settles.
        is_of_a_region: the finding is only information if its line is in a library, which opens the autocast region.
        remedy_in_library: the remedy of a misuse whose line is in a library, which the user cannot edit.
    """

    name: str
    verdict: Literal["precision", "other", "inconclusive"]
    remedy: str
    headline: str
    family: str = ""
    information: str = ""
    pin_helps: bool = False
    disproves_patch: bool = False
    passes: bool = False
    fails_in_fp32: bool = False
    keeps_scale: bool = False
    erases_itself: bool = False
    in_range_table: bool = False
    why_no_pin: str = "No pin helps: precision is not the cause of the failure at {step}."
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

    @property
    def counts_against_a_patch(self) -> bool:
        """True if the code disproves a patch when a run with the patch shows it."""
        return self.pin_helps or self.passes or self.disproves_patch


FACTS = ("step", "phase", "where", "cause", "skips", "losses", "falling", "first", "last", "settles", "verdict")
"""The fields of a headline. ``step``, ``phase`` and ``where`` are the finding's.

``cause`` says whether FP32 or the replays fail. ``skips`` and ``losses`` count skipped steps and non-finite losses.
``falling``, ``first``, ``last`` and ``settles`` describe the loss scale. ``verdict`` is for runs without a fault.
"""

OLD = "Old mixed-precision APIs, found by ampdbg lint"
"""The family of codes that ``ampdbg lint`` alone finds."""

WHY_NO_PIN = "ampdbg looks for no pin: repair this misuse first, since it can cause the other failures."


KEEP_WEIGHTS = (
    "No pin helps: the weights themselves are stored in half precision. "
    "Keep them in float32, and let autocast choose each op's dtype."
)


def _misuse(name: str, phase: Phase, message: str, remedy: str, severity: Severity = "error", **more: Any) -> Code:
    """Return a misuse of autocast or the scaler. Its consequences say nothing about precision."""
    known: dict[str, Any] = {"verdict": "other", "headline": "", "why_no_pin": WHY_NO_PIN} | more
    return Code(name, remedy=remedy, severity=severity, phase=phase, message=message, **known)


def _of_half_weights(name: str, remedy: str, headline: str) -> Code:
    """Return a code for updates that are lost because weights, or values kept for weights, are half."""
    return Code(name, "precision", remedy, headline, why_no_pin=KEEP_WEIGHTS)


_FORWARD = (
    Code(
        "forward-overflow",
        "precision",
        "run this op in FP32 with its inputs cast up",
        "The forward pass overflows{where} at step {step}{losses}.",
        pin_helps=True,
        in_range_table=True,
    ),
    Code(
        "silent-overflow",
        "precision",
        "compute this statistic in FP32: x.float() before it",
        "An op overflows{where}, although the loss and every gradient are finite.",
        information="Healthy: {skips}; an op overflows{where} without changing the result.",
        pin_helps=True,
        erases_itself=True,
    ),
    Code(
        "buffer-poisoned",
        "inconclusive",
        "cure what overflowed in this step, then reset the buffer",
        "A buffer is non-finite{where} after step {step} and stays so, although the weights are finite.",
        information="{verdict}: {skips}; a buffer{where} holds inf or NaN, which no loss shows.",
        pin_helps=True,
    ),
    Code(
        "eps-underflow",
        "precision",
        "compute this statistic in FP32, or use an eps of at least 1e-6, which FP16 can hold",
        "Half precision rounds a divisor or a logarithm's argument to zero{where} at step {step}{losses}.",
        pin_helps=True,
        changes_function=True,
        is_a_constant=True,
        remedy_behind_half="compute this value with autocast disabled, or add an eps of at least 1e-6 to it, inside "
        "the root: it is zero in half before this line casts it to FP32",
        remedy_near_one="compute p itself in FP32, as in torch.sigmoid(x.float()), or clamp p to at most 0.9990: "
        "FP16 has no number between 0.9995 and 1; there 1 - p is 0, and a smaller eps does not help",
    ),
    Code(
        "mask-constant",
        "other",
        "use masked_fill(mask, torch.finfo(x.dtype).min), or a boolean mask, in place of the constant",
        "The code writes a constant{where} that half precision cannot hold, at step {step}{losses}.",
        pin_helps=True,
        is_a_constant=True,
    ),
    Code(
        "precision-loss",
        "precision",
        "run this op in FP32; if it already is, run the ops that compute its inputs in FP32",
        "Half precision changes the result of step {step}.",
        pin_helps=True,
        remedy_at=tuple(
            (op, "give the loss logits (BCEWithLogitsLoss), or run the sigmoid in FP32: half rounds it to 0 or 1")
            for op in ("binary_cross_entropy.", "binary_cross_entropy_backward")
        ),
    ),
)

_GRADIENTS = (
    Code(
        "gradient-overflow",
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
        "precision",
        "use a larger loss scale, or a dynamic one: torch.amp.GradScaler starts at 65536",
        "The loss scale is too low: part of the gradient is zero in half precision and not in FP32.",
        why_no_pin="No pin helps: the loss scale is too low for the gradients of {step}.",
    ),
    Code(
        "no-usable-scale",
        "precision",
        "run this op in FP32, or give each loss its own backward pass and GradScaler",
        "No loss scale suits every part of the model: {skips}{falling}.",
        pin_helps=True,
        keeps_scale=True,
        passes=True,
    ),
    Code(
        "scale-calibration",
        "other",
        "use a dynamic loss scale, which finds the right one by itself",
        "The loss scale {last} is too large, and nothing lowers it: {skips}.",
        information="{verdict}: {skips} while the loss scale {settles}.",
        why_no_pin="Nothing to pin: the static loss scale is too large for the gradients of {step}.",
        passes=True,
    ),
    Code(
        "gradient-growth",
        "other",
        "none is needed while the loss falls; if it does not, find out why the gradients grow",
        "Gradients grow from step {step} on, and the loss scale follows them: {skips}{falling}.",
        information="Healthy: {skips}; gradients grow, and the loss scale follows them{falling}.",
        severity="info",
    ),
    Code(
        "scale-oscillation",
        "other",
        "leave growth_interval at its default of 2000, or use a few hundred for a short run",
        "The loss scale grows too often: {skips}.",
        harms_forward=False,
        severity="warning",
    ),
    Code(
        "scale-restart",
        "other",
        "create the GradScaler once, before the loop",
        "The loss scale starts over too often: {skips}.",
        harms_forward=False,
        severity="warning",
    ),
    Code(
        "scale-collapse",
        "other",
        "cure the root cause: a smaller initial scale only delays the collapse",
        "The loss scale keeps falling: {first} at first, {last} at the end, {skips}.",
        passes=True,
    ),
    Code(
        "scale-runaway",
        "other",
        "bring the loss near 1, as with a mean instead of a sum; check gradients after unscaling",
        "The loss scale goes from {first} to {last}, beyond what training needs.",
        passes=True,
    ),
    Code(
        "limit-ahead",
        "inconclusive",
        "save a checkpoint before that step and scan from it: ampdbg scan, with checkpoint: {model: FILE, "
        "optimizer: FILE}",
        "Values grow{where} and come near FP16's limit.",
        information="Healthy so far; values that grow steadily{where} would reach FP16's limit.",
        why_no_pin="Nothing to pin yet: the growing values have not reached the limit at {step}.",
    ),
    _of_half_weights(
        "optimizer-underflow",
        "keep the parameters in float32 (no .half() or .bfloat16()) and let autocast choose each op's dtype",
        "Half-precision weights do not get the optimizer's updates.",
    ),
    _of_half_weights(
        "frozen-weights",
        "keep the parameters, or only those named here, in float32 and let autocast choose each op's dtype "
        "(from_pretrained(..., dtype=torch.float32)); or use an optimizer with stochastic rounding (torchao's "
        "AdamW8bit with bf16_stochastic_round=True) or with compensation (torch-optimi's AdamW); a fused "
        "optimizer rounds alike, and a learning rate high enough for these is too high for the rest",
        "Some half-precision weights do not move: their updates are too small to change the rounded values.",
    ),
    _of_half_weights(
        "frozen-average",
        "keep the average in float32, even of half weights: copy.deepcopy(model).float(), or .float() on each of "
        "its tensors before the first step; cast it to half where it is used",
        "An average of the weights (EMA, SWA) is kept in half precision, and parts of it do not move.",
    ),
    _of_half_weights(
        "lost-accumulation",
        "keep the parameters in float32 and let autocast choose each op's dtype, so that gradients add up in float32; "
        "or use fewer, larger micro-batches (dividing the loss by their number does not help)",
        "Half precision loses part of the sum when the gradients of many micro-batches add up.",
    ),
    _of_half_weights(
        "stuck-moment",
        "keep the parameters in float32 and let autocast choose each op's dtype, or use beta2 = 0.95",
        "Adam's second moment is stuck in half precision: each decay by beta2 rounds back to the old value.",
    ),
)

_DATA = (
    Code(
        "data-nonfinite",
        "other",
        "filter or repair these samples; no precision setting helps",
        "Bad data: the batch of step {step} holds inf or NaN.",
        fails_in_fp32=True,
    ),
    Code(
        "data-range",
        "other",
        "normalise the data: half precision cannot hold it",
        "Bad data: the batch of step {step} holds values that half precision cannot hold.",
        why_no_pin="Nothing to pin: half precision cannot hold the data of {step}, and a pin would only hide that.",
        changes_function=True,
        phase="data",
    ),
    Code(
        "weights-nonfinite",
        "other",
        "start from finite weights",
        "Bad state: weights, buffers or other values are non-finite or far too large before step {step}.",
        disproves_patch=True,
        fails_in_fp32=True,
    ),
)

_OTHER = (
    Code(
        "infinite-loss",
        "other",
        "leave out the samples with an infinite loss, or change the formula; no precision helps",
        "The loss of step {step} is infinite in every precision, in FP32 and FP64 too.",
        fails_in_fp32=True,
        remedy_at=(("ctc_loss", "filter these samples, or let the loss zero them (zero_infinity)"),),
        is_of_a_formula=True,
    ),
    Code(
        "true-nan",
        "other",
        "change the formula where its value or derivative is undefined; no precision helps",
        "Step {step} fails in every precision: the mathematics is wrong, not the precision.",
        fails_in_fp32=True,
        remedy_at=(
            ("nll_loss", "leave out batches in which every target is ignored (ignore_index): a mean over none is 0/0"),
        ),
        is_of_a_formula=True,
    ),
    Code(
        "divergence",
        "other",
        "lower the learning rate, warm up, or clip gradients; no precision helps",
        "Training diverges at step {step}, in FP32 too.",
        fails_in_fp32=True,
    ),
    Code(
        "hardware",
        "inconclusive",
        "run the step on another device or with other kernels",
        "The device computes step {step} wrongly, far below every limit.",
        disproves_patch=True,
        why_no_pin="No pin helps: the device computes {step} wrongly.",
    ),
    Code(
        "unknown",
        "inconclusive",
        "compare with a run in FP32: --set precision.level=O0",
        "The {phase} pass of step {step} is not finite{losses}. {cause}: {skips}{falling}.",
        pin_helps=True,
        why_no_pin="ampdbg suggests no pin: the failure at {step} may not come from precision.",
        keeps_scale=True,
    ),
)

_CALLS = (
    _misuse(
        "misuse-clip-scaled",
        "optimizer",
        "the code clips gradients that still carry the loss scale, so they end up far below the limit",
        "clip after unscaling: scaler.unscale_(optimizer), then clip_grad_norm_, then scaler.step(optimizer); with "
        "Accelerate, accelerator.clip_grad_norm_ unscales and clips",
        harms_forward=False,
    ),
    _misuse(
        "misuse-unscale-twice",
        "optimizer",
        "the code calls unscale_ on gradients that are already unscaled",
        "call scaler.unscale_(optimizer) at most once, between backward() and scaler.step(optimizer)",
    ),
    _misuse(
        "misuse-accumulate",
        "optimizer",
        "gradients add up across a call of unscale_, step or update, so their sum mixes loss scales",
        "call zero_grad() after each step; unscale_, clipping, step and update only after its last micro-batch",
    ),
    _misuse(
        "misuse-bare-step",
        "optimizer",
        "the code calls optimizer.step() past the scaler: no bad step is skipped, and gradients that nothing has "
        "divided carry the loss scale",
        "replace it with scaler.step(optimizer), followed by scaler.update(); in an optimizer's own method, step only "
        "where the gradients are finite, behind scaler.unscale_(optimizer)",
    ),
    _misuse(
        "misuse-unscaled-loss",
        "optimizer",
        "scaler.step() divides the gradients by the loss scale, but nothing scaled their loss",
        "scale the loss of each optimizer that the scaler steps: scaler.scale(loss).backward()",
        harms_forward=False,
        is_counted=False,
    ),
    _misuse(
        "misuse-unused-optimizer",
        "optimizer",
        "the code calls scaler.step(optimizer), but no parameter of that optimizer has a gradient",
        "step only the optimizers that the backward pass of this iteration has reached",
        harms_forward=False,
    ),
    _misuse(
        "misuse-no-update",
        "optimizer",
        "no scaler.update() follows scaler.step(optimizer): the scale never adapts, and torch refuses the next step",
        "call scaler.update() once at the end of each iteration, after the steps of all optimizers",
        harms_forward=False,
    ),
    _misuse(
        "misuse-many-updates",
        "optimizer",
        "scaler.update() runs before the step of an optimizer, which then unscales its gradients by the new scale",
        "call scaler.update() once, after the steps of all optimizers",
        "warning",
    ),
    _misuse(
        "misuse-stale-gradients",
        "backward",
        "the code does not clear the gradients of a skipped step: they stay inf, and every later step is skipped too",
        "call optimizer.zero_grad() in every iteration, also after a skipped step",
        harms_forward=False,
    ),
    _misuse(
        "misuse-scheduler-on-skip",
        "optimizer",
        "the learning-rate scheduler steps even though the scaler skipped the optimizer's step",
        "compare scaler.get_scale() before and after update(), and call scheduler.step() unless it fell",
        "warning",
        harmless_share=0.05,
        remedy_in_library="a library steps this scheduler: a few skips do little harm; for many, override the "
        "library's hook (lr_scheduler_step in Lightning) and do not step where scaler.get_scale() fell",
    ),
    _misuse(
        "misuse-gradient-penalty",
        "backward",
        "the code computes a penalty from gradients of the scaled loss without dividing them by the scale",
        "divide the gradients from torch.autograd.grad by scaler.get_scale() before the penalty, inside autocast",
    ),
)

_SETUP = (
    _misuse(
        "misuse-no-scaler",
        "backward",
        "ops of the loss run in float16, and backward() runs without a loss scale: gradients below 3e-8 become zero",
        "use a torch.amp.GradScaler: scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update()",
        "warning",
        is_counted=False,
    ),
    _misuse(
        "misuse-scaler-bfloat16",
        "backward",
        "the code scales a loss whose ops run in bfloat16, whose range is float32's and needs no loss scale",
        "leave the scaler out, or create it with enabled=False",
        "warning",
        is_counted=False,
    ),
    _misuse(
        "misuse-lost-upcast",
        "optimizer",
        "the upcast has no effect: it creates a new tensor that the loop discards, and the parameters stay in half",
        "write p.data = p.data.float(), before the optimizer is made, or model.float() for all of them",
        is_counted=False,
    ),
    _misuse(
        "misuse-half-parameters",
        "optimizer",
        "the parameters and their gradients are float16, and a scaler refuses to unscale those",
        "keep the parameters in float32 (no model.half()) and let autocast choose each op's dtype",
    ),
    _misuse(
        "misuse-custom-function",
        "backward",
        "an autograd.Function without custom_fwd and custom_bwd meets mixed dtypes under autocast",
        "decorate forward with torch.amp.custom_fwd(device_type=..., cast_inputs=torch.float32) and backward with "
        "torch.amp.custom_bwd(device_type=...)",
    ),
    _misuse(
        "misuse-backward-in-autocast",
        "backward",
        "the code calls backward() inside autocast, where only the forward pass and the loss belong",
        "end the autocast block before backward(): each backward op runs in the dtype of its forward op",
        "warning",
        is_of_a_region=True,
    ),
    Code(
        "not-half",
        "inconclusive",
        "run it with its weights on a GPU, or with ampdbg run --emulate: these steps say nothing about FP16; if "
        "it ran so already, the script itself disabled autocast, perhaps after asking a tensor for its device",
        "Half precision was asked for, but every step ran in FP32.",
        why_no_pin=WHY_NO_PIN,
        severity="warning",
    ),
    Code(
        "half-weights",
        "precision",
        "load and keep the weights in float32, as with from_pretrained(..., dtype=torch.float32), and let "
        "autocast choose each op's dtype",
        "Mixed precision was asked for, but the trained weights themselves are half.",
        information="{verdict}: {skips}; the trained weights are half, and nothing asked for mixed precision.",
        why_no_pin=KEEP_WEIGHTS,
        harms_forward=False,
        severity="warning",
    ),
    Code(
        "rounded-buffer",
        "precision",
        "compute the buffer again in float32 after the cast, or cast only the parameters",
        "A buffer is stored in half precision, which cannot hold its values.",
        information="{verdict}: {skips}; a count in half precision grows towards its limit.",
        why_no_pin="No pin helps: the buffer itself is stored in half precision.",
        harms_forward=False,
        severity="warning",
    ),
    _misuse(
        "misuse-bce",
        "forward",
        "binary_cross_entropy on probabilities is unsafe in float16, and autocast refuses it",
        "return logits and use torch.nn.BCEWithLogitsLoss, which is safe under autocast",
    ),
    _misuse(
        "misuse-autocast-float32",
        "forward",
        "autocast(dtype=torch.float32) makes no FP32 region: on CUDA, half tensors stay half in it",
        "use enabled=False, and cast the block's inputs with .float()",
        "warning",
    ),
    _misuse(
        "misuse-autocast-device",
        "forward",
        "autocast names another device than the tensors' own, so it lowers none of their ops",
        "give autocast the device type of the tensors: torch.autocast(device_type=x.device.type)",
    ),
    _misuse(
        "misuse-autocast-decorator",
        "forward",
        "this autocast decorator does not run the forward pass under autocast",
        'decorate the function with a call: @torch.autocast("cuda")',
    ),
    _misuse(
        "misuse-unsaved-scaler",
        "optimizer",
        "the checkpoint lacks the scaler's state: a resumed run starts again at the initial scale",
        "save scaler.state_dict() beside the optimizer's, and load it with scaler.load_state_dict()",
        "warning",
    ),
)

_OLD = (
    _misuse(
        "deprecated-amp",
        "forward",
        "torch.cuda.amp is deprecated since torch 2.4",
        'use torch.amp, and name the device: torch.amp.autocast("cuda"), torch.amp.GradScaler("cuda")',
        "warning",
    ),
    _misuse(
        "apex-amp",
        "forward",
        "apex.amp is no longer maintained and patches torch's functions; torch.amp replaces it",
        "use torch.autocast around the forward pass and the loss, and torch.amp.GradScaler around backward and step",
        "warning",
    ),
    _misuse(
        "apex-class",
        "forward",
        "torch has a class that does the same",
        "use torch's class",
        "warning",
    ),
)

CODES: Mapping[str, Code] = {
    code.name: replace(code, family=family)
    for family, codes in {
        "Forward pass": _FORWARD,
        "Gradients and loss scale": _GRADIENTS,
        "Data and weights": _DATA,
        "Other causes": _OTHER,
        "Misuse: calls in the wrong order": _CALLS,
        "Misuse: autocast and scaler set up wrongly": _SETUP,
        OLD: _OLD,
    }.items()
    for code in codes
}
"""The catalogue: every code by name, in the order of lists."""


def catalogued(name: str) -> Code:
    """Return the entry of a code. Unknown codes, as of another version, get the entry ``unknown``."""
    return CODES.get(name, CODES["unknown"])


def finding_of(name: str, step: int, phase: Phase, message: str, **fields: Any) -> Finding:
    """Return a finding with the severity and remedy of its code, unless ``fields`` has them. For the code of an
    autocast error in a record of another version, those of ``unknown``."""
    code = catalogued(name)
    given = {"severity": code.severity, "remedy": code.remedy} | fields
    return Finding(code=name, step=step, phase=code.phase or phase, message=message, **given)

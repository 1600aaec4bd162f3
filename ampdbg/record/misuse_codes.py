"""The catalogue's codes of misuse: calls in the wrong order, autocast and scaler set up wrongly (no torch)."""

from __future__ import annotations

from dataclasses import replace

from ampdbg.record.code import Code
from ampdbg.record.findings import Phase, Severity

CALLS = "Misuse: calls in the wrong order"
SETUP = "Misuse: autocast and scaler set up wrongly"
OLD = "Old spellings of mixed precision, found by ampdbg lint"

WHY_NO_PIN = "No pin is looked for: until the code is repaired, what fails beside it says little of precision."


def _misuse(
    name: str,
    family: str,
    phase: Phase,
    message: str,
    remedy: str,
    severity: Severity = "error",
    harms_forward: bool = True,
) -> Code:
    """A misuse of autocast or of the scaler: nothing that it causes says anything about precision."""
    return Code(
        name,
        family,
        "other",
        remedy,
        "",
        counts_against_a_patch=False,
        why_no_pin=WHY_NO_PIN,
        harms_forward=harms_forward,
        severity=severity,
        phase=phase,
        message=message,
    )


MISUSES = (
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
    replace(
        _misuse(
            "misuse-unscaled-loss",
            CALLS,
            "optimizer",
            "the scaler steps on gradients of a loss that it has not scaled, and divides them by its scale even so",
            "scale the loss of each optimizer that the scaler steps: scaler.scale(loss).backward()",
            harms_forward=False,
        ),
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
    replace(
        _misuse(
            "misuse-scheduler-on-skip",
            CALLS,
            "optimizer",
            "the learning-rate scheduler moves on although the scaler has skipped the optimizer's step",
            "compare scaler.get_scale() before and after update(), and call scheduler.step() unless it fell",
            "warning",
        ),
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
    replace(
        _misuse(
            "misuse-no-scaler",
            SETUP,
            "backward",
            "the loss is computed in float16 and goes backward unscaled: gradients below 3e-8 become zero",
            "scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update() with a torch.amp.GradScaler",
            "warning",
        ),
        is_counted=False,
    ),
    replace(
        _misuse(
            "misuse-scaler-bfloat16",
            SETUP,
            "backward",
            "the code scales a loss that is computed in bfloat16, whose range is float32's and needs no loss scale",
            "leave the scaler out, or make it with enabled=False",
            "warning",
        ),
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
    ),
    replace(
        _misuse(
            "not-half",
            SETUP,
            "forward",
            "no op ran in FP16 or bfloat16: autocast had no effect on the device of the weights, nor GradScaler a use",
            "run it on a GPU, weights and all, or with ampdbg run --emulate on this machine: these steps say nothing "
            "about FP16; where it was run so, the script has switched autocast off itself, as one that asks tensors for"
            " their device",
            "warning",
        ),
        verdict="inconclusive",
        headline="The code has autocast and GradScaler, and every step ran in FP32.",
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

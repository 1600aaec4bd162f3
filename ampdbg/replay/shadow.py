"""The wide shadow: one step under the same policy with bfloat16 for float16, every op of it measured.

It costs two to three plain steps and shows every place that would overflow in FP16 at once. What it shows is
a proposal: code that asks for its dtype may take another path, and only a replay in FP16 disposes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ampdbg.environment import FUSED_ATTENTION_NOTE
from ampdbg.errors import UserCodeError, text_of
from ampdbg.probes.module_calls import compiled_notes, coverage
from ampdbg.probes.op_trace import placed
from ampdbg.probes.shadow_trace import RangeSeen, ShadowTrace, bfloat16_for_float16
from ampdbg.record.run import Unseen
from ampdbg.replay.passes import run_pass
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import Snapshot, rewound


def shadow_step(run: Run, snapshot: Snapshot) -> tuple[tuple[RangeSeen, ...], Unseen]:
    """Runs the step of ``snapshot`` once more as the shadow, at a loss scale of 1, and changes nothing.

    Args:
        run: the workload, with the weights of the step; its pins stay in force.
        snapshot: the step.

    Returns:
        Every op whose output FP16 would hold, forward and backward, in order of execution; and what the step did not
        touch, and how it was analysed.

    Raises:
        UserCodeError: the user's code raised.
    """
    model = run.workload.model
    with rewound(model, snapshot), coverage(model) as covered:
        with bfloat16_for_float16(), placed(model, ShadowTrace) as trace:
            _run_in_bfloat16(run, snapshot)
        unseen = covered.unseen()
    notes = [*compiled_notes(model)]
    if any(seen.op.startswith("aten._scaled_dot_product_") for seen in trace.ranges):
        notes.append(FUSED_ATTENTION_NOTE)
    return tuple(trace.ranges), replace(unseen, notes=(*unseen.notes, *notes))


def _run_in_bfloat16(run: Run, snapshot: Snapshot) -> None:
    try:
        run_pass(run.workload, snapshot.batches, lambda: torch.autocast(run.device.type, dtype=torch.bfloat16))
    except UserCodeError as error:
        if "BFloat16" not in text_of(error.__cause__ or error):
            raise
        # A user who never wrote bfloat16 must learn where it comes from.
        message = f"{error}; ampdbg runs this step in bfloat16, so that overflows do not hide one another"
        raise UserCodeError(message, error.user_traceback) from error.__cause__

"""Which modules are worth pinning first: those where the wide shadow, or the failing step itself, goes beyond FP16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ampdbg.errors import UserCodeError
from ampdbg.formats import FLOAT16
from ampdbg.probes.shadow_trace import RangeSeen
from ampdbg.replay.run import Run
from ampdbg.replay.shadow import shadow_step
from ampdbg.replay.snapshot import Snapshot

LOWEST_USABLE_SCALE = 1.0


def proposed_by_shadow(run: Run, snapshot: Snapshot, scale: float | None) -> tuple[str, ...]:
    """The modules of every op that would overflow in FP16, in order of execution.

    Args:
        run: the workload, with the weights of the step.
        snapshot: the step.
        scale: the loss scale that gradients have to survive; None where any that is left will do.

    Returns:
        Qualified names, each once; none where the step cannot run in bfloat16 (code that asks for its dtype).
    """
    try:
        ranges = shadow_step(run, snapshot)
    except UserCodeError:
        return ()
    return tuple(dict.fromkeys(_overflowing(ranges, LOWEST_USABLE_SCALE if scale is None else scale)))


def _overflowing(ranges: Iterable[RangeSeen], scale: float) -> Iterator[str]:
    for seen in ranges:
        if seen.place.phase == "forward":
            beyond = seen.overflow == "starts"
        else:
            beyond = seen.overflow != "carried" and seen.output.largest * scale >= FLOAT16.overflow_threshold
        if beyond:
            yield seen.place.module

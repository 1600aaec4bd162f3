"""A step that was lost, as it was run again by its modules, and what its replays tell of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ampdbg.agreement import is_finite
from ampdbg.diagnosis.producers import overflow_in
from ampdbg.formats import FORMATS
from ampdbg.record.run import Investigation, Step
from ampdbg.replay.investigation import is_blamed
from ampdbg.replay.pass_end import losses_of
from ampdbg.replay.step_data import BadData
from ampdbg.script.loop_step import LoopStep


@dataclass(frozen=True)
class LostStep:
    """``again`` is the pass that can be run again, ``made`` what its replays show, and ``bad`` has the inputs and
    targets whose NaN or inf explain that FP32 comes to nothing either."""

    again: LoopStep
    made: Investigation
    bad: BadData

    @classmethod
    def of(cls, again: LoopStep, made: Investigation, before: Sequence[Step]) -> LostStep:
        """A step with its replays, and the steps before it.

        Where one of its modules overflows, the step may have made of that what it gives to others. Where it overflows
        as well with sound numbers in their place, and FP32 comes through that, these replays tell.
        """
        if not made.reproduced or made.fp32 is None or math.isfinite(made.fp32.loss):
            return cls(again, made, BadData())
        bad, overflow = again.blamed_data(), overflow_in(made)
        if overflow is not None and overflow.producer.phase == "forward":
            bad = BadData(spoilt=(*bad.spoilt, *(counts.name for counts in bad.batch)))
        if bad.spoilt and overflow is not None:
            sound = again.with_finite_data(bad.spoilt)
            found = sound.investigated(before)
            if found is not None and found.reproduced and is_finite(found.fp32):
                still = overflow_in(found)
                if still is not None and still.producer.site == overflow.producer.site:
                    return cls(sound, replace(found, reach=made.reach), BadData())
        return cls(again, made, bad)

    def why_untold(self) -> str:
        """What replays show of it where they do not show that precision is the cause, nor that it is not."""
        made, low, fp32 = self.made, self.made.low, self.made.fp32
        short = FORMATS[self.again.half or "float32"].short
        if not made.reproduced and made.why == "gradients":
            return "its modules fail no more: it may be an earlier part of it that fails, or what they have kept since"
        if not made.reproduced or fp32 is None:
            return f"what its modules give is finite in {short}: look at what the script makes of that"
        if self.bad.spoilt:
            return "it is given inf or NaN, which it may have computed itself: no replay can tell"
        if low.error and fp32.error:
            return f"it raises an error in FP32 too, and precision is not the cause: {fp32.error}"
        if low.error and not is_blamed(made):
            return f"it raises that in {short} and not in FP32, and no op was found that goes wrong"
        makes_nan = math.isnan(fp32.loss) and any(one.phase == "forward" for one in fp32.producers)
        if not losses_of(self.again.played) and not math.isfinite(fp32.loss) and not makes_nan:
            return "what its modules give is not finite, and in FP32 neither"  # as where they mask what they give
        return ""

"""Whether a replay with pins is healthy, and if not, why and which modules go wrong in it (no torch)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import PurePath

from ampdbg.agreement import LOST_ENERGY, agrees, is_finite, losses_agree, noise_floor
from ampdbg.diagnosis.producers import Suspect, named, suspects
from ampdbg.quantities import number
from ampdbg.record.replays import Investigation, Producer, Replay


@dataclass(frozen=True)
class Health:
    """``guilty`` are the ops that go wrong, in order of execution; empty where the replay is healthy."""

    healthy: bool
    why: str = ""
    guilty: tuple[Suspect, ...] = ()


def health_of(made: Investigation, *, is_silent: bool) -> Health:
    """Judges the first replay of ``made`` against the second, FP32's.

    Healthy means: loss, gradients and buffers finite, the gradient's energy kept, and the loss within the noise floor
    of FP32's. So are the gradients, where the step has failed for no other reason than being far from FP32.

    Args:
        made: what ``PinnedReplays.with_pins`` returned.
        is_silent: an overflow that erases itself is what is being cured: then none may be left, although
            everything that leaves the step is finite.
    """
    low, fp32, floor = made.replays[0], made.replays[1], noise_floor(made)
    if low.error:
        return Health(False, f"raised: {low.error}")
    guilty = _guilty(made)
    if not is_finite(low) or low.buffers:
        return Health(False, _nonfinite(made, guilty), guilty)
    if not losses_agree(low, fp32, floor):
        return Health(
            False, f"finite, but the loss is {number(low.loss)}, and {number(fp32.loss)} in FP32", guilty or _far(made)
        )
    if made.why == "end" and not agrees(low, fp32, floor):
        why = f"finite, but the gradients are {low.gradient_distance or 0.0:.0%} away from FP32's"
        return Health(False, why, guilty or _far(made))
    lost = low.lost_energy or 0.0
    if lost > LOST_ENERGY:
        return Health(False, f"{lost:.0%} of the gradient's energy is flushed to zero", guilty)
    if is_silent and guilty:
        return Health(False, f"{named(guilty[0].producer)} still overflows and erases itself", guilty)
    return Health(True)


def _far(made: Investigation) -> tuple[Suspect, ...]:
    return (Suspect(made, made.first_far),) if made.first_far else ()


def _guilty(made: Investigation) -> tuple[Suspect, ...]:
    """What goes wrong in FP16 alone; masks do so on purpose. Behind a loss that is not finite gradients say nothing."""
    found = [suspect for suspect in suspects(made) if not suspect.is_constant]
    if not math.isfinite(made.replays[0].loss):
        found = [suspect for suspect in found if suspect.producer.phase == "forward"]
    return tuple(found)


def _nonfinite(made: Investigation, guilty: tuple[Suspect, ...]) -> str:
    return f"{_what(made.replays[0])}: {_reaches(guilty[0])}" if guilty else _what(made.replays[0])


def _what(low: Replay) -> str:
    if not math.isfinite(low.loss):
        return f"loss {'NaN' if math.isnan(low.loss) else 'inf'}"
    if low.gradients:
        return f"gradient of {_first(low.gradients)} not finite"
    return f"buffer {_first(low.buffers)} not finite"


def _first(names: tuple[str, ...]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _reaches(suspect: Suspect) -> str:
    producer: Producer = suspect.producer
    value = f" reaches {number(suspect.value)}" if suspect.value is not None else ""
    line = f" ({PurePath(producer.source.file).name}:{producer.source.line})" if producer.source else ""
    return f"{named(producer)}{line}{value}"

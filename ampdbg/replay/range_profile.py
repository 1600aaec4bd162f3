"""The range profile of one step: what the shadow has measured, and the replays that its claims are held against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ampdbg.agreement import is_finite
from ampdbg.diagnosis.ranges import scale_to_try
from ampdbg.probes.shadow_trace import sites_of
from ampdbg.record.run import Replay, Site, Unseen
from ampdbg.replay.replay import FP32, Manner, counted, replay_step, shadow_step
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import Snapshot


@dataclass(frozen=True)
class RangeProfile:
    """The fields of a record that a profile fills."""

    sites: tuple[Site, ...] = ()
    unseen: Unseen = field(default_factory=Unseen)
    checks: tuple[Replay, ...] = ()


def profile_of(run: Run, snapshot: Snapshot) -> RangeProfile:
    """Measures a step as the shadow and checks it by one more replay; changes nothing.

    Raises:
        UserCodeError: the user's code raised in the shadow.
    """
    shadow = shadow_step(run, snapshot)
    sites = sites_of(shadow.ranges)
    return RangeProfile(sites, shadow.unseen, (shadow.replay, *_checks(run, snapshot, shadow.replay, sites)))


def _checks(run: Run, snapshot: Snapshot, measured: Replay, sites: Sequence[Site]) -> Iterator[Replay]:
    """FP32 where the shadow is not finite: whose limits it has. Else FP16, unless an overflow is proposed already."""
    if not is_finite(measured):
        yield _checked(run, snapshot, FP32)
        return
    scale = scale_to_try(sites)
    if scale is not None:
        yield _checked(run, snapshot, Manner("float16", scale, is_lifted=False))


def _checked(run: Run, snapshot: Snapshot, manner: Manner) -> Replay:
    replayed = replay_step(run, snapshot, manner, keep_gradients=True)
    return counted(replayed.replay, replayed.gradients)

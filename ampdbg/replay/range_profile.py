"""The range profile of one step: the measurements of the shadow, and the replays that check its claims."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from ampdbg.agreement import is_finite
from ampdbg.diagnosis.ranges import is_mask, overflows_at_any_scale, scale_to_try, unpinned
from ampdbg.formats import BFLOAT16
from ampdbg.probes.shadow_trace import sites_of
from ampdbg.record.pins import OWN
from ampdbg.record.run import Replay, Site, Unseen
from ampdbg.replay.replay import FP32, Manner, counted, replay_step, shadow_step
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import Snapshot


@dataclass(frozen=True)
class RangeProfile:
    """The fields of a record that a profile provides."""

    sites: tuple[Site, ...] = ()
    unseen: Unseen = field(default_factory=Unseen)
    checks: tuple[Replay, ...] = ()


def profile_of(run: Run, snapshot: Snapshot) -> RangeProfile:
    """Measure a step as the shadow and check it by more replays; change no state.

    Raises:
        UserCodeError: the user's code raised in the shadow.
    """
    shadow = shadow_step(run, snapshot)
    sites = sites_of(shadow.ranges, run.mode.format.name)
    return RangeProfile(sites, shadow.unseen, (shadow.replay, *_checks(run, snapshot, shadow.replay, sites)))


def _checks(run: Run, snapshot: Snapshot, measured: Replay, sites: Sequence[Site]) -> Iterator[Replay]:
    """Replay in FP32 if the shadow is not finite, because it has FP32's range. Else replay in FP16, unless the shadow
    already predicts an overflow. Replay a bfloat16 step with more and more pins until it is finite."""
    if not is_finite(measured):
        yield _checked(run, snapshot, FP32)
        return
    is_wide = run.mode.format is BFLOAT16
    if overflows_at_any_scale(sites) and not is_wide:
        return
    for pins in dict.fromkeys(_pins_to_try(run.workload.model, sites)) if is_wide else [()]:
        manner = Manner("float16", scale_to_try(unpinned(sites, pins)), is_lifted=is_wide)
        with run.pinned(pins):
            check = replace(_checked(run, snapshot, manner), pins=pins)
        yield check
        if is_finite(check):
            return


def _pins_to_try(model: torch.nn.Module, sites: Sequence[Site]) -> Iterator[tuple[str, ...]]:
    """Yield sets of pins: none, the modules where an overflow starts, and also the modules that carry it on. Then yield
    the modules around all of them, the innermost first, up to the root."""
    modules = dict(model.named_modules())
    beyond: set[str] = set()
    yield ()
    for overflow in ("starts", "carried"):
        beyond |= {site.module for site in sites if site.overflow == overflow and not is_mask(site)} & modules.keys()
        yield tuple(name + OWN if any(modules[name].children()) else name for name in sorted(beyond))
    around = ".".join(os.path.commonprefix([name.split(".") for name in sorted(beyond)]))  # noqa: RUF071 - lists of names
    while around:
        if type(modules[around]).forward is not torch.nn.Module.forward:
            yield (around,)
        around = around.rpartition(".")[0]


def _checked(run: Run, snapshot: Snapshot, manner: Manner) -> Replay:
    replayed = replay_step(run, snapshot, manner, keep_gradients=True)
    return counted(replayed.replay, replayed.gradients)

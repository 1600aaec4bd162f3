"""Replays of one failing step with any set of pins, each at the highest loss scale that its gradients survive."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ampdbg.agreement import agrees, is_finite, keeps_its_gradients, noise_floor
from ampdbg.probes.producer_trace import ProducerTrace, SampleTrace
from ampdbg.record.run import Investigation, Replay
from ampdbg.replay.investigation import Noise, compared_with_fp32, departure, producers_of, rounded_angles
from ampdbg.replay.replay import FP32, Manner, Replayed, TraceKind, replay_step
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import FailingStep

LOWEST_SCALE = 1.0
"""The lowest loss scale to try: no dynamic scaler that works has a lower one."""

MOST_SUSPECTS = 10_000
"""The most producers of one kind in a replay: the next trial pins every one."""


@dataclass(frozen=True)
class ScaleRange:
    """The loss scales at which a step of scale S may be cured: S, S/4, S/16 … ``lowest``.

    With ``is_lossless``, a lower scale than S counts only if it flushes no important gradient to zero. The fault is
    then an overflow of gradients, and each set of pins has its own highest scale. Any other fault hides which scales
    the gradients survive. Then the first such scale is kept for later replays, as by a dynamic scaler.
    """

    lowest: float = LOWEST_SCALE
    is_lossless: bool = False


class PinnedReplays:
    """Replays one step, ``failing``, with any set of pins; the model must have the step's weights meanwhile.

    ``scale`` is the loss scale of the last finite replay: the highest of the range at which it is finite.
    """

    def __init__(self, run: Run, failing: FailingStep, scales: ScaleRange) -> None:
        self.scale = failing.scale
        self.scales = scales
        self._run = run
        self.failing = failing
        self._low = run.mode.format.name
        self._known_fp32: Replayed | None = None

    @property
    def fp32(self) -> Replayed:
        """The step in FP32, with its trace and its gradients."""
        return self._in_fp32(ProducerTrace)

    @property
    def fp32_in_brief(self) -> Replayed:
        """The step in FP32 with its gradients; it has a trace only if one was needed before."""
        return self._in_fp32(None)

    def with_pins(self, pins: Sequence[str], *, is_brief: bool = False, most: int = MOST_SUSPECTS) -> Investigation:
        """Return an investigation of the step with ``pins`` in force. It has the FP16 replay with producers and
        distances, the FP32 replay, and the noise floor if it was needed.

        A brief one takes a fraction of the time. It names no producers and no op that is far from FP32's. A full one
        names at most ``most`` producers of a kind.
        """
        traced = None if is_brief and not self.failing.made.rounded_angles else ProducerTrace
        low = self._at_a_usable_scale(pins, traced)
        fp32 = self._reference(low)
        if not is_finite(fp32.replay):
            return self._made(low.replay)
        if not math.isfinite(low.replay.loss):  # NaN also if the code raised
            return self._made(producers_of(low, fp32, most))
        replay, floor = self._compared_with_fp32(low, pins, most)
        made = self._made(replay, floor)
        if low.angular and self.failing.made.rounded_angles:
            made = replace(made, rounded_angles=rounded_angles(self._sampled(pins), self._references[0], low.angular))
        if is_brief or floor is None or replay.producers or agrees(replay, fp32.replay, floor):
            return made
        return replace(made, **departure(self._sampled(pins), *self._references))

    def _in_fp32(self, traced: TraceKind | None) -> Replayed:
        if self._known_fp32 is None or (traced is not None and self._known_fp32.trace is None):
            self._known_fp32 = self._replay(FP32, traced)
        return self._known_fp32

    def _reference(self, low: Replayed) -> Replayed:
        """Return the FP32 replay, with its trace only if ``low`` has producers to compare."""
        return self._in_fp32(ProducerTrace if low.overflows else None)

    def _made(self, low: Replay, floor: Replay | None = None) -> Investigation:
        made = self.failing.made
        made = replace(made, wide=None, at_lower=(), first_far=None, choice=None, rounded_angles=(), continuation=())
        return replace(made, low=low, fp32=self.fp32_in_brief.replay, floor=floor)

    def _at_a_usable_scale(self, pins: Sequence[str], traced: TraceKind | None) -> Replayed:
        """Return the first finite replay of the range. If there is none, return the last one, or the first of a
        lossless range.

        A trace takes several times as long as the step. So only the first replay and the returned one are traced.
        """
        tried: list[Replayed] = []
        for scale in self._scales():
            low = self._at_scale(pins, scale, None if tried else traced, stops_at_loss=True)
            if not math.isfinite(low.replay.loss):
                return low
            if is_finite(low.replay):
                if tried and self.scales.is_lossless:
                    compared, _ = self._compared_with_fp32(low, pins)
                    if not keeps_its_gradients(compared):
                        break
                self.scale = scale
                return self._with_trace(low, pins, traced)
            tried.append(low)
        return tried[0] if self.scales.is_lossless else self._with_trace(tried[-1], pins, traced)

    def _with_trace(self, low: Replayed, pins: Sequence[str], traced: TraceKind | None) -> Replayed:
        return low if low.trace or traced is None else self._at_scale(pins, low.replay.scale, traced)

    def _compared_with_fp32(
        self, low: Replayed, pins: Sequence[str], most: int = MOST_SUSPECTS
    ) -> tuple[Replay, Replay | None]:
        """Return the comparison with FP32. A lost gradient needs a trace, even in a brief replay. Only a trace shows
        overflows, and so if a gradient that is zero at any scale was flushed."""
        at_scale = functools.partial(self._at_scale, pins)
        held = compared_with_fp32(low, self._reference(low), self._floor, at_scale if low.trace else None, most)
        if low.trace is None and not keeps_its_gradients(held[0]):
            return self._compared_with_fp32(at_scale(low.replay.scale, ProducerTrace), pins, most)
        return held

    def _at_scale(
        self, pins: Sequence[str], scale: float, traced: TraceKind | None = None, *, stops_at_loss: bool = False
    ) -> Replayed:
        with self._run.pinned(pins):
            return self._replay(Manner(self._low, scale, is_lifted=False), traced, stops_at_loss=stops_at_loss)

    def _scales(self) -> Iterator[float]:
        scale = self.failing.scale if self.scales.is_lossless else self.scale
        yield scale
        while scale > self.scales.lowest:
            scale = max(self.scales.lowest, scale / 4.0)
            yield scale

    @cached_property
    def _floor(self) -> Noise:
        known = noise_floor(self.failing.made)
        return Noise(self.fp32_in_brief, self._low, functools.partial(self._replay, traced=None), known)

    @cached_property
    def _references(self) -> tuple[Replayed, Replayed]:
        return self._replay(FP32, SampleTrace), self._replay(self._floor.manner, SampleTrace)

    def _sampled(self, pins: Sequence[str]) -> Replayed:
        return self._at_scale(pins, self.scale, SampleTrace)

    def _replay(self, manner: Manner, traced: TraceKind | None, *, stops_at_loss: bool = False) -> Replayed:
        step = self.failing.snapshot
        return replay_step(self._run, step, manner, traced=traced, keep_gradients=True, stops_at_loss=stops_at_loss)

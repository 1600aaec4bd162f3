"""Replays of a failing step with modules pinned to FP32, held against the same step in FP32."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from ampdbg.agreement import agrees, is_finite, keeps_its_gradients
from ampdbg.precision.pins import pin_fp32
from ampdbg.probes.producer_trace import ProducerTrace, SampleTrace
from ampdbg.record.replays import Investigation, Replay
from ampdbg.replay.comparison import compared_gradients, first_far_op, producers_of
from ampdbg.replay.failing_step import FailingStep
from ampdbg.replay.replay import Manner, Replayed, TraceKind, replay_step
from ampdbg.replay.run import Run

LOWEST_SCALE = 1.0
"""No dynamic scaler that works goes below it."""


class PinnedReplays:
    """Runs one step with any set of pins; the model must have the step's weights meanwhile.

    The step's loss scale is kept with ``keeps_scale``: where it is the gradients that overflow at a scale which has
    to be usable. Any other fault has hidden how large a scale the gradients bear: such a step goes on at S/4, S/16
    … 1 until they are finite, as a dynamic scaler would, and stays there for later replays.
    """

    def __init__(self, run: Run, failing: FailingStep, *, keeps_scale: bool) -> None:
        self.scale = failing.scale
        self.keeps_scale = keeps_scale
        self._run = run
        self._failing = failing
        self._low = run.mode.format.name

    @cached_property
    def fp32(self) -> Replayed:
        """The step in FP32, with its trace and its gradients."""
        return self._replay(Manner("float32"), ProducerTrace)

    @cached_property
    def floor(self) -> Replay:
        """FP32 on weights and inputs rounded to half: the noise floor."""
        return replace(self._floor.replay, **compared_gradients(self._floor, self.fp32))

    def with_pins(self, pins: Sequence[str]) -> Investigation:
        """The step with ``pins`` in force: its FP16 replay with producers and distances, FP32's, and perhaps the
        noise floor, as an investigation of the step would hold them."""
        low = self._at_a_usable_scale(pins)
        if low.replay.error or not is_finite(self.fp32.replay):
            return self._made(low.replay)
        replay = replace(producers_of(low, self.fp32), **compared_gradients(low, self.fp32))
        if not is_finite(replay) or (agrees(replay, self.fp32.replay, None) and keeps_its_gradients(replay)):
            return self._made(replay)
        replay = replace(replay, **compared_gradients(low, self.fp32, self._floor))
        made = self._made(replay, self.floor)
        if replay.producers or agrees(replay, self.fp32.replay, self.floor):
            return made
        return replace(made, first_far=first_far_op(self._sampled(pins), *self._references))

    def _made(self, low: Replay, *more: Replay) -> Investigation:
        made = self._failing.made
        return replace(made, replays=(low, self.fp32.replay, *more), first_far=None, continuation=())

    def _at_a_usable_scale(self, pins: Sequence[str]) -> Replayed:
        for scale in self._scales():
            with self._pinned(pins):
                low = self._replay(Manner(self._low, scale, is_lifted=False), ProducerTrace)
            if not math.isfinite(low.replay.loss):
                return low
            if is_finite(low.replay):
                self.scale = scale
                return low
        return low

    def _scales(self) -> Iterator[float]:
        scale = self.scale
        yield scale
        while not self.keeps_scale and scale > LOWEST_SCALE:
            scale = max(LOWEST_SCALE, scale / 4.0)
            yield scale

    @cached_property
    def _floor(self) -> Replayed:
        return self._replay(Manner("float32", rounds_to=self._low), SampleTrace)

    @cached_property
    def _references(self) -> tuple[Replayed, Replayed]:
        return self._replay(Manner("float32"), SampleTrace), self._floor

    def _sampled(self, pins: Sequence[str]) -> Replayed:
        with self._pinned(pins):
            return self._replay(Manner(self._low, self.scale, is_lifted=False), SampleTrace)

    @contextlib.contextmanager
    def _pinned(self, pins: Sequence[str]) -> Iterator[None]:
        with pin_fp32(self._run.workload.model, pins):
            yield

    def _replay(self, manner: Manner, traced: TraceKind) -> Replayed:
        return replay_step(self._run, self._failing.snapshot, manner, traced=traced, keep_gradients=True)

"""The replays that decide what was wrong with a step: FP16 with every op, FP32, lower scales, FP64."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch.utils import _pytree

from ampdbg.agreement import agrees, is_finite, keeps_its_gradients, may_have_risen
from ampdbg.observer import Observer
from ampdbg.probes.producer_trace import ProducerTrace, SampleTrace
from ampdbg.probes.tensors import float_values
from ampdbg.record.replays import Investigation, Replay
from ampdbg.record.run import Step
from ampdbg.replay.comparison import compared_gradients, first_far_op, producers_of
from ampdbg.replay.replay import Manner, Replayed, TraceKind, continued_in_fp32, replay_step
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import Snapshot

Why = Literal["loss", "gradients", "end"]

CONTINUED_STEPS = 10
"""So many FP32 steps on the same batch tell a learning rate that diverges from an overflow of FP16."""

TRIES = 3
"""A step that does not go wrong again is replayed so often before that is said."""


def investigate(
    run: Run, snapshot: Snapshot, why: Why, scale: float, *, before: Sequence[Step], observer: Observer
) -> Investigation:
    """Replays a step until its cause can be told; the model, its optimizers and the random state stay as they are.

    Args:
        run: the workload, with the weights of the step.
        snapshot: the step.
        why: what called for it. ``loss``: it is not finite. ``gradients``: the loss is finite and they are
            not. ``end``: nothing is wrong so far; looks for what no loss and no gradient shows.
        scale: the loss scale of the step.
        before: the steps before it.
        observer: sees each replay before it runs.
    """
    replays = _Replays(run, snapshot, scale, observer)
    made = replays.of_hidden_fault() if why == "end" else replays.of_fault(why, before)
    largest = dict(_largest_in(snapshot))
    return replace(
        made,
        batch_largest={name: value for name, (value, _) in largest.items()},
        batch_index={name: index for name, (_, index) in largest.items()},
    )


class _Replays:
    """Makes the replays of one step, one after another."""

    def __init__(self, run: Run, snapshot: Snapshot, scale: float, observer: Observer) -> None:
        self._run = run
        self._snapshot = snapshot
        self._observer = observer
        self._as_it_was = Manner(run.mode.format.name, scale, is_lifted=False)
        self._producers = functools.partial(ProducerTrace, batches=snapshot.batches)

    def of_fault(self, why: Why, before: Sequence[Step]) -> Investigation:
        """The replays of a step whose loss or gradients are not finite."""
        made = Investigation(self._snapshot.step, why, ())
        low, failed, tries = self._again_until_it_fails(why)
        if not failed:
            return replace(made, replays=(low.replay,), reproduced=0, tries=tries)
        fp32 = self._fp32(traced=self._producers, keep_gradients=why == "gradients")
        replays = [producers_of(low, fp32), producers_of(fp32, fp32)]
        if why == "gradients" and is_finite(fp32.replay):
            replays += self._at_lower_scales(fp32)
        replays.append(self._wider(fp32.replay))
        may_diverge = may_have_risen([step.loss for step in before], fp32.replay.loss)
        continuation = self._continued() if may_diverge and not fp32.replay.error else ()
        return replace(made, replays=tuple(replays), reproduced=1, tries=tries, continuation=continuation)

    def of_hidden_fault(self) -> Investigation:
        """The replays of a step that looks healthy: two, and more only where those differ."""
        made = Investigation(self._snapshot.step, "end", ())
        low = self._low(traced=self._producers, keep_gradients=True)
        overflows = any(op.produces for op in low.trace.ops) if low.trace else False
        fp32 = self._fp32(traced=self._producers if overflows else None, keep_gradients=True)
        against = compared_gradients(low, fp32)
        replays = [replace(producers_of(low, fp32), **against), producers_of(fp32, fp32)]
        if not (is_finite(low.replay) and is_finite(fp32.replay)):
            return replace(made, replays=tuple(replays))
        if agrees(replays[0], fp32.replay, None) and keeps_its_gradients(replays[0]):
            return replace(made, replays=tuple(replays))
        floor = self._floor()
        replays[0] = replace(replays[0], **compared_gradients(low, fp32, floor))
        replays.append(replace(floor.replay, **compared_gradients(floor, fp32)))
        far = None
        if not agrees(replays[0], fp32.replay, replays[-1]):
            far = first_far_op(self._low(traced=SampleTrace), self._fp32(traced=SampleTrace), floor)
        return replace(made, replays=tuple(replays), first_far=far)

    def _again_until_it_fails(self, why: Why) -> tuple[Replayed, bool, int]:
        for number in range(1, TRIES + 1):
            low = self._low(traced=self._producers)
            if not (math.isfinite(low.replay.loss) if why == "loss" else is_finite(low.replay)):
                return low, True, number
        return low, False, TRIES

    def _low(self, traced: TraceKind | None = None, keep_gradients: bool = False) -> Replayed:
        return self._replay(
            f"{self._run.mode.format.short}, every op", self._as_it_was, traced=traced, keep_gradients=keep_gradients
        )

    def _fp32(self, traced: TraceKind | None = None, keep_gradients: bool = False) -> Replayed:
        return self._replay("FP32", Manner("float32"), traced=traced, keep_gradients=keep_gradients)

    def _floor(self) -> Replayed:
        manner = Manner("float32", rounds_to=self._as_it_was.dtype)
        return self._replay("FP32 on rounded weights", manner, traced=SampleTrace, keep_gradients=True)

    def _wider(self, fp32: Replay) -> Replay:
        """FP64 where FP32 is not finite; else bfloat16, which has FP32's range and less than FP16's precision."""
        if is_finite(fp32):
            return self._replay("bfloat16", Manner("bfloat16")).replay
        return self._replay("FP64", Manner("float64")).replay

    def _at_lower_scales(self, fp32: Replayed) -> Iterator[Replay]:
        """The backward pass at S/4, S/16 … 1, up to the first scale at which every gradient is finite."""
        scale = self._as_it_was.scale
        while scale > 1.0:
            scale = max(1.0, scale / 4.0)
            manner = replace(self._as_it_was, scale=scale)
            low = self._replay(f"loss scale {scale:g}", manner, keep_gradients=True)
            if not is_finite(low.replay):
                yield low.replay
                continue
            against = compared_gradients(low, fp32)
            if against["lost"]:
                against = compared_gradients(low, fp32, self._floor())
            yield replace(low.replay, **against)
            return

    def _continued(self) -> tuple[float, ...]:
        self._observer.replay(self._snapshot.step, f"{CONTINUED_STEPS} steps in FP32")
        return continued_in_fp32(self._run, self._snapshot, CONTINUED_STEPS)

    def _replay(
        self, doing: str, manner: Manner, *, traced: TraceKind | None = None, keep_gradients: bool = False
    ) -> Replayed:
        self._observer.replay(self._snapshot.step, doing)
        return replay_step(self._run, self._snapshot, manner, traced=traced, keep_gradients=keep_gradients)


def _largest_in(snapshot: Snapshot) -> Iterator[tuple[str, tuple[float, tuple[int, ...]]]]:
    """For each numeric leaf of the batches, its largest finite magnitude and where that stands.

    As float32 has it: what a model casts is that, whatever the batch holds.
    """
    for batch in snapshot.batches:
        for path, leaf in _pytree.tree_flatten_with_path(batch)[0]:
            values = _numbers_of(leaf) if isinstance(leaf, torch.Tensor) else None
            if values is not None and values.numel():
                finite = torch.where(torch.isfinite(values), values.detach().abs(), 0.0)
                at = torch.unravel_index(finite.argmax(), finite.shape)
                yield _pytree.keystr(path), (float(finite.max()), tuple(int(index) for index in at))


def _numbers_of(leaf: torch.Tensor) -> torch.Tensor | None:
    """The leaf's values in float32; None where it has none, or none on this device."""
    is_integer = not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype is torch.bool)
    if is_integer and leaf.layout is torch.strided and leaf.device.type != "meta":
        return leaf.float()
    values = float_values(leaf)
    return values if values is None else values.float()

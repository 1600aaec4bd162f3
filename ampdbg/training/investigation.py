"""The replays that decide what was wrong with a step: FP16 with every op, FP32, lower scales, FP64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.utils import _pytree

from ampdbg.precision.levels import low_dtype
from ampdbg.probes.magnitudes import magnitude_of
from ampdbg.probes.ops import OpSeen
from ampdbg.probes.source_lines import source_of
from ampdbg.record import Investigation, Producer, Replay
from ampdbg.training.replay import Replayed, continued_in_fp32, replay_step
from ampdbg.training.run import Run
from ampdbg.training.snapshot import Snapshot

Why = Literal["loss", "gradients", "end"]

CONTINUED_STEPS = 10
"""So many FP32 steps on the same batch tell a learning rate that diverges from an overflow of FP16."""

PRODUCERS_KEPT = 20
"""So many producers of a replay go into the record; the first is the one that counts."""


@dataclass(frozen=True)
class _Key:
    """What an op of one replay has in common with the same op of another: all but its dtype."""

    phase: str
    module: str
    call: int
    op: str
    line: Any


def investigate(run: Run, snapshot: Snapshot, why: Why, scale: float) -> Investigation:
    """Replays a step until its cause can be told; the model, its optimizers and the random state stay as they are.

    Args:
        run: the workload, with the weights of the step.
        snapshot: the step.
        why: what called for it. ``loss``: it is not finite. ``gradients``: the loss is finite and they are
            not. ``end``: nothing is wrong so far; looks for what no loss and no gradient shows.
        scale: the loss scale of the step.
    """
    low = str(low_dtype(run.config.precision)).rpartition(".")[2]
    traced = replay_step(run, snapshot, low, scale, traced=True, keep_gradients=why == "end")
    fp32 = replay_step(run, snapshot, "float32", traced=True, keep_gradients=why == "end")
    replays = [_with_producers(traced, fp32), _with_producers(fp32, fp32)]
    if why == "end":
        replays[0] = replace(replays[0], lost_energy=_lost_energy(traced.gradients, fp32.gradients))
    if why == "gradients":
        replays += _at_lower_scales(run, snapshot, low, scale)
    if not _is_finite(replays[1]):
        replays.append(replay_step(run, snapshot, "float64").replay)
    elif why != "end":
        replays.append(replay_step(run, snapshot, "bfloat16").replay)
    continuation = continued_in_fp32(run, snapshot, CONTINUED_STEPS) if why != "end" else ()
    return Investigation(snapshot.step, why, tuple(replays), continuation, dict(_largest_in(snapshot.batches)))


def _is_finite(replay: Replay) -> bool:
    return math.isfinite(replay.loss) and not replay.gradients


def _at_lower_scales(run: Run, snapshot: Snapshot, dtype: str, scale: float) -> Iterator[Replay]:
    """The backward pass at S/4, S/16 … 1, up to the first scale at which every gradient is finite."""
    while scale > 1.0:
        scale = max(1.0, scale / 4.0)
        replay = replay_step(run, snapshot, dtype, scale).replay
        yield replay
        if not replay.gradients:
            return


def _with_producers(replayed: Replayed, fp32: Replayed) -> Replay:
    """The replay with its producers, each held against the same op of the FP32 replay."""
    met = _largest_by_key(fp32.ops)
    producers = [_producer(seen, met) for seen in replayed.ops if seen.produces]
    return replace(replayed.replay, producers=tuple(producers[:PRODUCERS_KEPT]))


def _largest_by_key(ops: tuple[OpSeen, ...]) -> dict[_Key, tuple[float, bool]]:
    """For each op of a replay its largest magnitude, and whether all its outputs were finite."""
    met: dict[_Key, tuple[float, bool]] = {}
    for seen in ops:
        largest, finite = met.get(_key(seen), (0.0, True))
        met[_key(seen)] = max(largest, seen.output.largest), finite and seen.output.is_finite
    return met


def _key(seen: OpSeen) -> _Key:
    return _Key(seen.place.phase, seen.place.module, seen.place.call, seen.op, seen.place.line)


def _producer(seen: OpSeen, fp32: Mapping[_Key, tuple[float, bool]]) -> Producer:
    largest, finite = fp32.get(_key(seen), (None, None))
    return Producer(
        phase=seen.place.phase,
        module=seen.place.module,
        call=seen.place.call,
        op=seen.op,
        source=source_of(seen.place.line) if seen.place.line else None,
        dtype=seen.output.dtype,
        input_largest=seen.inputs.largest,
        output_largest=seen.output.largest,
        inf=seen.output.inf,
        nan=seen.output.nan,
        size=seen.output.size,
        parameter=seen.parameter,
        fp32_largest=largest,
        finite_in_fp32=finite,
    )


def _lost_energy(low: Mapping[str, torch.Tensor], fp32: Mapping[str, torch.Tensor]) -> float | None:
    """The share of the FP32 gradient's sum of squares that stands where the low one is exactly zero."""
    lost = total = 0.0
    for name, reference in fp32.items():
        squares = reference.double().square()
        total += float(squares.sum())
        lost += float(squares[low[name] == 0].sum()) if name in low else float(squares.sum())
    return lost / total if total > 0 and math.isfinite(total) else None


def _largest_in(batches: tuple[Any, ...]) -> Iterator[tuple[str, float]]:
    for batch in batches:
        for path, leaf in _pytree.tree_flatten_with_path(batch)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                yield _pytree.keystr(path), magnitude_of(leaf).largest

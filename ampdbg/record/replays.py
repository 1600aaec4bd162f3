"""What replays of a step showed: the numbers of each, and the ops where inf and NaN start in it (no torch)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ampdbg.record.findings import Count, Phase, Source

SUM = "the sum of what its modules give"
"""What stands for the loss of a step that has none, in words."""

OpSite = tuple[Phase, str, int, str, Source | None]
"""Where an op is in a step: its phase, its module, which call of that, its name and its line."""


@dataclass(frozen=True)
class Producer:
    """An op where inf or NaN starts: its inputs are finite and its output is not.

    ``input_largest`` and ``output_largest`` are the largest finite magnitudes, ``fp32_largest`` is what the
    same op on the same line has in the FP32 replay (None when it was not met there), ``call`` says which
    call of the module it was.

    ``is_constant`` says that all it overflows on is one constant, such as a mask; ``divides_by_zero`` that a
    divisor, or the argument of a logarithm or root, holds exact zeros. ``leaf`` is the path of the batch's leaf
    where the op casts values of that leaf and nothing else. ``is_erased`` says that no gradient is another one where it
    makes a finite number in the place of inf and NaN, as behind a closed ReLU. ``distance`` is set where the op is not
    infinite but far from FP32: the norm of the difference over that of the FP32 result. ``reaches_gradients`` says that
    the loss is finite, and that gradients are not because of it: an op of the forward pass too, whose NaN the loss
    leaves out and a backward pass takes up.
    """

    phase: Phase
    module: str
    call: Count
    op: str
    source: Source | None
    dtype: str
    input_largest: float
    output_largest: float
    inf: Count
    nan: Count
    size: Count
    parameter: str = ""
    fp32_largest: float | None = None
    finite_in_fp32: bool | None = None
    is_constant: bool = False
    divides_by_zero: bool = False
    leaf: str | None = None
    distance: float | None = None
    is_erased: bool = False
    reaches_gradients: bool = False

    @property
    def site(self) -> OpSite:
        """Where it is in the step."""
        return self.phase, self.module, self.call, self.op, self.source


@dataclass(frozen=True)
class Replay:
    """One step run again: forward and backward, without the optimizer.

    ``dtype`` is what autocast lowers to (``float32`` and ``float64``: none, and half tensors that the code
    asks for are that wide too), ``scale`` the loss scale. ``rounded`` says that the weights and the batch
    were rounded to the run's dtype first: how far that is from FP32, of several roundings at most, is the noise floor.

    ``loss`` is unscaled; ``grad_norm`` is the norm of all gradients after unscaling. ``gradients`` and
    ``buffers`` name the parameters whose gradient is not finite, and the buffers that this step made so; ``inf`` and
    ``nan`` are how many elements of those gradients are, where they were counted. ``error`` is what the user's code
    raised, if it did. ``producers`` are in the order of execution, and only there when the replay was traced.

    Against FP32's gradients, where both are finite: ``gradient_distance`` is the norm of the difference over
    that of FP32's, ``lost_energy`` the share of the sum of squares that was flushed to zero, and ``lost``
    names the parameters that lost more than half of theirs, and have more than rounding noise to lose. ``unreached``
    names those that have no gradient at any loss scale, and one in FP32: no distance tells of them.
    """

    dtype: str
    scale: float
    loss: float
    grad_norm: float
    gradients: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    producers: tuple[Producer, ...] = ()
    error: str = ""
    rounded: bool = False
    gradient_distance: float | None = None
    lost_energy: float | None = None
    lost: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    inf: Count = 0
    nan: Count = 0


@dataclass(frozen=True)
class Investigation:
    """The replays of one step. ``why`` says what called for them: the loss, the gradients, or the end of the run.

    The first replay is the step as it was, the second, where there is one, FP32. ``loss`` is what the step itself
    had; ``reproduced`` of ``tries`` replays as it was went wrong like it. ``continuation`` has the losses of FP32
    steps on the same batch from the same state. ``first_far`` is the first op whose result is far from FP32's, where
    the step's is. ``is_of_others`` says that all that this process computed was finite, and what it got from another
    one was not; ``spoilt`` names what it was given that is not finite, and why no replay is, where the step may have
    computed that itself, as by a network without gradients; ``replaced`` what finite numbers stand for in its replays,
    for that reason. ``has_loss`` says that its replays have the step's own
    loss, and no more than what its modules gave where it is false. ``weights_grew`` is how many times as large all
    weights together are in it as when the run began, by their 2-norm. ``batch_largest`` is the largest finite
    magnitude in the batch's numeric leaves, by leaf, and ``batch_index`` where in the leaf it stands.
    """

    step: Count
    why: Literal["loss", "gradients", "end"]
    replays: tuple[Replay, ...]
    loss: float = math.nan
    reproduced: Count = 1
    tries: Count = 1
    continuation: tuple[float, ...] = ()
    first_far: Producer | None = None
    batch_largest: Mapping[str, float] = field(default_factory=dict)
    batch_index: Mapping[str, tuple[Count, ...]] = field(default_factory=dict)
    is_of_others: bool = False
    spoilt: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    has_loss: bool = True
    weights_grew: float = 1.0

    @property
    def what(self) -> str:
        """What the losses of its replays are, in words."""
        return "the loss" if self.has_loss else SUM

    @property
    def is_as_it_trained(self) -> bool:
        """Whether the step was traced as it trained and not replayed: FP32 is known of single ops alone."""
        return len(self.replays) == 1 and self.reproduced > 0

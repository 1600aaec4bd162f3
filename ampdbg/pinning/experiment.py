"""The trial of a set of pins: replays of failing steps, a judgment, and the overflowing ops by module."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from pathlib import PurePath
from typing import Literal

from ampdbg.agreement import LOST_ENERGY, agrees, is_finite, losses_agree, noise_floor
from ampdbg.diagnosis.producers import Suspect, suspects
from ampdbg.quantities import listed, number
from ampdbg.record.pins import PinSite, Trial
from ampdbg.record.run import Investigation
from ampdbg.replay.pinned_replays import MOST_SUSPECTS, PinnedReplays, ScaleRange
from ampdbg.replay.random_state import RandomState
from ampdbg.replay.run import Run, name_of_line
from ampdbg.replay.snapshot import FailingStep, weights_of
from ampdbg.search import AtomTree

FURTHER_BATCHES = 3
"""The number of further batches on which a set, and then its patch, is tried."""


@dataclass
class Experiment:
    """Runs failing steps with pins. A set is healthy if all steps are; a trial ends at the first unhealthy step.

    The first of the ``cases`` is the step of the search, and the run has its weights. ``suspected`` modules are known
    to fail. ``outside`` are ops that failed although their module was pinned: in the step function or the loss. The
    other ops that fail in any trial are kept by atom: a module's own lines, or a line of the script.
    """

    _run: Run
    cases: Sequence[PinnedReplays]
    tree: AtomTree
    _: KW_ONLY
    is_silent: bool
    suspected: InitVar[Iterable[str]] = ()
    outside: list[PinSite] = field(default_factory=list, init=False)

    def __post_init__(self, suspected: Iterable[str]) -> None:
        self._sites: dict[str, list[PinSite]] = {self.tree.own(name): [] for name in suspected if name in self.tree}

    def run(self, pins: Sequence[str], names: NamingMode = "always") -> Trial:
        """Run one trial. Its loss is the FP16 loss of the first step."""
        started = time.perf_counter()
        health, made = judged(self.cases[0], pins, names, is_silent=self.is_silent)
        for case in self.cases[1:] if health.healthy else ():
            with weights_of(self._run.workload.model, case.failing):
                health, _ = judged(case, pins, names, is_silent=self.is_silent)
            if not health.healthy:
                health = replace(health, why=f"step {case.failing.snapshot.step}: {health.why}")
                break
        sites = tuple(site for suspect in health.guilty for site in _sites(suspect))
        self._note(sites, pins)
        return Trial(
            pins=tuple(pins),
            healthy=health.healthy,
            why=health.why,
            suspects=tuple(filter(self.tree.has_run, dict.fromkeys(map(self.atom_of, sites)))),
            loss=made.low.loss,
            seconds=round(time.perf_counter() - started, 3),
        )

    @property
    def seen_atoms(self) -> tuple[str, ...]:
        """The atoms in which an op failed in any trial."""
        return tuple(self._sites)

    def sites(self, atoms: Iterable[str]) -> tuple[PinSite, ...]:
        """Return the ops that failed in these atoms, without duplicates."""
        return tuple(site for atom in atoms for site in self._sites.get(atom, ()))

    def fails_without(self, atoms: Iterable[str]) -> bool:
        """True if every healthy set must contain one of these atoms, as far as is known without a trial.

        That is the case if no overflow may remain and one of their ops exceeds the format's range in FP32. Pins
        elsewhere do not reduce that value.
        """
        largest = self._run.mode.format.largest
        forward = (site for site in self.sites(atoms) if site.phase == "forward" and self.is_silent)
        return any(site.value is not None and site.value > largest for site in forward)

    def atom_of(self, site: PinSite) -> str:
        """Return the atom of an op."""
        return self.atom_at(site.module, *((site.source.file, site.source.line) if site.source is not None else ()))

    def atom_at(self, module: str, file: str = "", number: int = 0) -> str:
        """Return the atom of a place: its module's own lines, or its script line after all modules."""
        line = name_of_line(file, number)
        return line if not module and line in self.tree else self.tree.own(module)

    def _note(self, sites: Iterable[PinSite], pins: Sequence[str]) -> None:
        pinned = self.tree.expand(pins)
        for site in sites:
            atom = self.atom_of(site)
            is_outside = not self.tree.has_run(atom) or atom in pinned
            into = self.outside if is_outside else self._sites.setdefault(atom, [])
            places = [(known.phase, known.module, known.op, known.source) for known in into]
            if (site.phase, site.module, site.op, site.source) not in places:
                into.append(site)


def _sites(suspect: Suspect) -> Iterator[PinSite]:
    """Yield where the op fails; for a gradient cast back to half, where its tensor was cast to half."""
    producer = suspect.producer
    for _, module, call, _, source in producer.made_half or (producer.site,):
        yield PinSite(producer.phase, module, producer.op, source, suspect.value, call, producer.parameter)


def on_further_batches(run: Run, failing: FailingStep, scales: ScaleRange) -> Iterator[PinnedReplays]:
    """Yield the step on the batches after its own, if FP32 is finite on them."""
    made = replace(failing.made, floor=None)  # the floor belongs to the step's own batch
    micro = len(failing.snapshot.batches)
    batches = itertools.islice(run.workload.batches(), (failing.snapshot.step + 1) * micro, None)
    for _ in range(FURTHER_BATCHES):
        taken = tuple(itertools.islice(batches, micro))
        if len(taken) < micro:  # a script's step has only its own batches
            return
        snapshot = replace(failing.snapshot, batches=taken, random_state=RandomState.now())
        case = PinnedReplays(run, replace(failing, snapshot=snapshot, made=made), scales)
        if is_finite(case.fp32_in_brief.replay):
            yield case


# Health of a replay with pins, the reason for a failure, and the failing ops


@dataclass(frozen=True)
class Health:
    """The health of a replay: ``why`` it failed, or "". ``guilty`` are the failing ops, causes of a NaN loss first."""

    why: str = ""
    guilty: tuple[Suspect, ...] = ()

    @property
    def healthy(self) -> bool:
        return not self.why


NamingMode = Literal["always", "unhealthy", "never"]
"""When a trial names the failing ops, which takes several times as long. A trial that is expected to pass names them
only if it fails. Silent overflows are always searched for. With ``never``, the search stops at the first op."""


def judged(
    case: PinnedReplays, pins: Sequence[str], names: NamingMode, *, is_silent: bool
) -> tuple[Health, Investigation]:
    """Replay once with pins and judge the replay; see :func:`health_of`."""
    most = 1 if names == "never" else MOST_SUSPECTS
    made = case.with_pins(pins, is_brief=names != "always" and not is_silent, most=most)
    health = health_of(made, is_silent=is_silent)
    if health.healthy or is_silent or names != "unhealthy":
        return health, made
    again, named_too = judged(case, pins, "always", is_silent=is_silent)
    return (health, made) if again.healthy else (again, named_too)


def health_of(made: Investigation, *, is_silent: bool) -> Health:
    """Judge the first replay of ``made`` against the second, in FP32.

    A replay is healthy if loss, gradients and buffers are finite and the gradients keep their energy. The loss must be
    within the noise floor of FP32's loss. The gradients must be too, if the step failed only by its distance from FP32.
    If the failure ``is_silent``, an overflow that erases itself, none may remain, even if all results are finite.
    """
    low, fp32 = made.low, made.reference
    guilty = _guilty(made)
    far = guilty or ((Suspect(made, made.first_far),) if made.first_far else ())
    if low.error:
        return Health(f"an error: {low.error}", guilty)
    if not is_finite(low) or low.buffers:
        return Health(f"{_what(made)}: {_goes_wrong(guilty[0])}" if guilty else _what(made), guilty)
    if not losses_agree(low, fp32, noise_floor(made)):
        return Health(f"finite, but {made.what} is {number(low.loss)}, and {number(fp32.loss)} in FP32", far)
    if made.why == "end" and (why := gradients_far(made)):
        return Health(why, far)
    if made.rounded_angles:
        angular = tuple(Suspect(made, one) for one in made.rounded_angles)
        return Health(f"finite, but {angular[0].name} takes rounded angles", angular)
    lost = low.lost_energy or 0.0
    if lost > LOST_ENERGY:
        return Health(f"{lost:.0%} of the gradient's energy is flushed to zero", guilty)
    if is_silent and guilty:
        return Health(f"{guilty[0].name} still overflows, and the inf erases itself", guilty)
    return Health()


def gradients_far(made: Investigation) -> str:
    """Describe how far the gradients of an otherwise healthy replay are from FP32's, or return "" within the noise."""
    if agrees(made.low, made.reference, noise_floor(made)):
        return ""
    return f"finite, but the gradients are {made.low.gradient_distance or 0.0:.0%} away from FP32's"


def _guilty(made: Investigation) -> tuple[Suspect, ...]:
    """Return the ops that fail only in FP16, except intended masks. After a non-finite loss, gradients are ignored."""
    found = [suspect for suspect in suspects(made) if not suspect.is_constant]
    if not math.isfinite(made.low.loss):
        found = [suspect for suspect in found if suspect.producer.phase == "forward"]
    return tuple(found)


def _what(made: Investigation) -> str:
    low = made.low
    if not math.isfinite(low.loss):
        value = "NaN" if math.isnan(low.loss) else "inf"
        return f"loss {value}" if made.reach == "whole" else f"{made.what} is {value}"
    if low.gradients:
        return f"gradient of {listed(low.gradients, 1)} not finite"
    return f"buffer {listed(low.buffers, 1)} not finite"


def _goes_wrong(suspect: Suspect) -> str:
    """Describe the op, and its value if that explains the failure; after a division by zero it does not."""
    source, place, why = suspect.producer.source, "", ""
    if source is not None:
        line = f":{source.line}" if source.line else ""  # a line that exists only in a patch has no number
        place = f" ({PurePath(source.file).name}{line})"
    if suspect.overflows:
        why = f" reaches {number(suspect.value)}"
    elif suspect.is_flushed and suspect.producer.divides_by_zero:
        why = f" {suspect.takes_a_pole}"
    return f"{suspect.name}{place}{why}"

"""The experiment of a search: failing steps run with a set of pins, judged, and what went wrong noted by module."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Literal

from ampdbg.agreement import LOST_ENERGY, agrees, is_finite, losses_agree, noise_floor
from ampdbg.diagnosis.producers import Suspect, suspects
from ampdbg.quantities import listed, number
from ampdbg.record.findings import Source
from ampdbg.record.pins import PinSite, Trial
from ampdbg.record.run import Investigation
from ampdbg.replay.pinned_replays import SUSPECTS, PinnedReplays, ScaleRange
from ampdbg.replay.run import Run, name_of_line
from ampdbg.replay.snapshot import FailingStep, further_steps, weights_of
from ampdbg.search.strategies import AtomTree

FURTHER_BATCHES = 3
"""A set that was found, and the patch of it, is tried on so many more batches."""


class Experiment:
    """Runs failing steps with pins: a set is healthy when it is on all of them, and the first that it is not on ends
    the trial. Each op that was seen to go wrong in any trial is kept with its atom.

    Args:
        run: the workload; it has the weights of the first step meanwhile.
        cases: the steps, the one that the search is about first.
        tree: what can be pinned.
        is_silent: see :func:`health_of`.
        suspected: modules that something is known to go wrong in.
    """

    def __init__(
        self,
        run: Run,
        cases: Sequence[PinnedReplays],
        tree: AtomTree,
        *,
        is_silent: bool,
        suspected: Iterable[str] = (),
    ) -> None:
        self.cases = tuple(cases)
        self.is_silent = is_silent
        self.outside: list[PinSite] = []
        """What went wrong although the module that it seems to be in was pinned: lines of the step or the loss."""
        self._run = run
        self.tree = tree
        self._sites: dict[str, list[PinSite]] = {tree.own(name): [] for name in suspected if name in tree}

    def run(self, pins: Sequence[str], names: Names = "always") -> Trial:
        """One trial. Its loss is that of the first step, in FP16."""
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
        """The atoms in which something was seen to go wrong, in any trial."""
        return tuple(self._sites)

    def sites(self, atoms: Iterable[str]) -> tuple[PinSite, ...]:
        """What was seen to go wrong in these atoms, each op once."""
        return tuple(site for atom in atoms for site in self._sites.get(atom, ()))

    def fails_without(self, atoms: Iterable[str]) -> bool:
        """No set without one of these atoms can be healthy, as far as is known without a trial.

        So it is where no overflow may be left, and an op of theirs has a value in FP32 that the format does not hold:
        pins elsewhere make that no smaller.
        """
        largest = self._run.mode.format.largest
        forward = (site for site in self.sites(atoms) if site.phase == "forward" and self.is_silent)
        return any(site.value is not None and site.value > largest for site in forward)

    def atom_of(self, site: PinSite) -> str:
        """The atom that an op is of."""
        return self.atom_at(site.module, *((site.source.file, site.source.line) if site.source is not None else ()))

    def atom_at(self, module: str, file: str = "", number: int = 0) -> str:
        """The atom of a place: its module's own lines, or its line of a script behind all modules."""
        line = name_of_line(file, number)
        return line if not module and line in self.tree else self.tree.own(module)

    def _note(self, sites: Iterable[PinSite], pins: Sequence[str]) -> None:
        pinned = self.tree.expand(pins)
        for site in sites:
            atom = self.atom_of(site)
            is_outside = not self.tree.has_run(atom) or atom in pinned
            into = self.outside if is_outside else self._sites.setdefault(atom, [])
            if not any(_is_same(site, known) for known in into):
                into.append(site)


def _sites(suspect: Suspect) -> Iterator[PinSite]:
    """Where it goes wrong; of a gradient that becomes half again where its tensor was made half."""
    producer = suspect.producer
    for _, module, call, _, source in producer.made_half or (producer.site,):
        yield PinSite(producer.phase, module, producer.op, source, suspect.value, call, producer.parameter)


def _is_same(one: PinSite, other: PinSite) -> bool:
    return (one.phase, one.module, one.op, one.source) == (other.phase, other.module, other.op, other.source)


def on_further_batches(run: Run, failing: FailingStep, scales: ScaleRange) -> Iterator[PinnedReplays]:
    """The step on the batches that come after its own, where FP32 is finite on them."""
    made = replace(failing.made, floor=None)  # that is of the step's own batch
    for snapshot in further_steps(run, failing, FURTHER_BATCHES):
        case = PinnedReplays(run, replace(failing, snapshot=snapshot, made=made), scales)
        if is_finite(case.fp32_in_brief.replay):
            yield case


# Whether a replay with pins is healthy, and if not, why and which ops go wrong in it


@dataclass(frozen=True)
class Health:
    """``guilty`` are the ops that go wrong, those behind a NaN loss first; empty where the replay is healthy."""

    healthy: bool
    why: str = ""
    guilty: tuple[Suspect, ...] = ()


Names = Literal["always", "unhealthy", "never"]
"""A trial names what goes wrong, which takes several times as long. One that is expected to be healthy does so
only where it is not. What is silent is always looked for; where nothing is to be named, the first op is enough."""


def judged(case: PinnedReplays, pins: Sequence[str], names: Names, *, is_silent: bool) -> tuple[Health, Investigation]:
    """One replay with pins, and its health; see :func:`health_of`."""
    most = 1 if names == "never" else SUSPECTS
    made = case.with_pins(pins, is_brief=names != "always" and not is_silent, most=most)
    health = health_of(made, is_silent=is_silent)
    if health.healthy or is_silent or names != "unhealthy":
        return health, made
    again, named_too = judged(case, pins, "always", is_silent=is_silent)
    return (health, made) if again.healthy else (again, named_too)


def health_of(made: Investigation, *, is_silent: bool) -> Health:
    """Judges the first replay of ``made`` against the second, FP32's.

    Healthy means: loss, gradients and buffers finite, the gradient's energy kept, and the loss within the noise floor
    of FP32's. So are the gradients, where the step has failed for no other reason than being far from FP32.

    Args:
        made: what ``PinnedReplays.with_pins`` returned.
        is_silent: an overflow that erases itself is what is being cured: then none may be left, although
            everything that leaves the step is finite.
    """
    low, fp32, floor = made.low, made.reference, noise_floor(made)
    guilty = _guilty(made)
    if low.error:
        return Health(False, f"raised: {low.error}", guilty)
    if not is_finite(low) or low.buffers:
        why = f"{_what(made)}: {_goes_wrong(guilty[0])}" if guilty else _what(made)
        return Health(False, why, guilty)
    if not losses_agree(low, fp32, floor):
        return Health(
            False,
            f"finite, but {made.what} is {number(low.loss)}, and {number(fp32.loss)} in FP32",
            guilty or _far(made),
        )
    if made.why == "end" and (far := gradients_far(made)):
        return Health(False, far, guilty or _far(made))
    if made.rounded_angles:
        angular = tuple(Suspect(made, one) for one in made.rounded_angles)
        return Health(False, f"finite, but {angular[0].name} takes rounded angles", angular)
    lost = low.lost_energy or 0.0
    if lost > LOST_ENERGY:
        return Health(False, f"{lost:.0%} of the gradient's energy is flushed to zero", guilty)
    if is_silent and guilty:
        return Health(False, f"{guilty[0].name} still overflows, and the inf erases itself", guilty)
    return Health(True)


def gradients_far(made: Investigation) -> str:
    """How far the gradients of a replay that is healthy else are from FP32's; "" within the noise."""
    if agrees(made.low, made.reference, noise_floor(made)):
        return ""
    return f"finite, but the gradients are {made.low.gradient_distance or 0.0:.0%} away from FP32's"


def _far(made: Investigation) -> tuple[Suspect, ...]:
    return (Suspect(made, made.first_far),) if made.first_far else ()


def _guilty(made: Investigation) -> tuple[Suspect, ...]:
    """What goes wrong in FP16 alone; masks do so on purpose. Behind a loss that is not finite gradients say nothing."""
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
    """The op, and its value where that is what explains it: behind a zero divisor no value of FP32's does."""
    why = ""
    if suspect.overflows:
        why = f" reaches {number(suspect.value)}"
    elif suspect.is_flushed and suspect.producer.divides_by_zero:
        why = f" {suspect.takes_a_pole}"
    return f"{suspect.name}{_place(suspect.producer.source)}{why}"


def _place(source: Source | None) -> str:
    if source is None:
        return ""
    name = PurePath(source.file).name
    return f" ({name}:{source.line})" if source.line else f" ({name})"  # in a line that only a patch has

"""The experiment of a search: failing steps run with a set of pins, judged, and what went wrong noted by module."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ampdbg.diagnosis.producers import Suspect
from ampdbg.pinning.health import Health, health_of
from ampdbg.record.pins import PinSite
from ampdbg.replay.investigation import PinnedReplays
from ampdbg.replay.run import Run
from ampdbg.replay.snapshot import FailingStep, weights_of
from ampdbg.search import Answer, AtomTree


@dataclass(frozen=True)
class Case:
    """A step to be cured; the model has its weights only while it is run."""

    failing: FailingStep
    replays: PinnedReplays


class Experiment:
    """Runs failing steps with pins: a set is healthy when it is on all of them, and the first that it is not on ends
    the trial. Each op that was seen to go wrong in any trial is kept with its atom.

    Args:
        run: the workload; it has the weights of the first step meanwhile.
        cases: the steps, the one that the search is about first.
        tree: what can be pinned.
        is_silent: see :func:`~ampdbg.pinning.health.health_of`.
    """

    def __init__(self, run: Run, cases: Sequence[Case], tree: AtomTree, *, is_silent: bool) -> None:
        self.cases = tuple(cases)
        self.is_silent = is_silent
        self.outside: list[PinSite] = []
        """What went wrong although the module that it seems to be in was pinned: lines of the step or the loss."""
        self._run = run
        self.tree = tree
        self._sites: dict[str, list[PinSite]] = {}

    def run(self, pins: Sequence[str], *, is_brief: bool = False) -> Answer:
        """One trial. Its loss is that of the first step, in FP16. A brief one is faster, and names no suspects."""
        is_brief = is_brief and not self.is_silent
        started = time.perf_counter()
        health, loss = self._tried(self.cases[0], pins, is_brief)
        for case in self.cases[1:] if health.healthy else ():
            with weights_of(self._run.workload.model, case.failing):
                health, _ = self._tried(case, pins, is_brief)
            if not health.healthy:
                health = replace(health, why=f"step {case.failing.snapshot.step}: {health.why}")
                break
        sites = tuple(map(_site, health.guilty))
        self._note(sites, pins)
        return Answer(
            healthy=health.healthy,
            why=health.why,
            suspects=tuple(atom for atom in dict.fromkeys(map(self._atom, sites)) if atom in self.tree),
            loss=loss,
            seconds=round(time.perf_counter() - started, 3),
        )

    def _tried(self, case: Case, pins: Sequence[str], is_brief: bool) -> tuple[Health, float]:
        made = case.replays.with_pins(pins, is_brief=is_brief)
        return health_of(made, is_silent=self.is_silent), made.replays[0].loss

    @property
    def seen_atoms(self) -> tuple[str, ...]:
        """The atoms in which something was seen to go wrong, in any trial."""
        return tuple(self._sites)

    def sites(self, atoms: Iterable[str]) -> tuple[PinSite, ...]:
        """What was seen to go wrong in these atoms, each op once."""
        return tuple(site for atom in atoms for site in self._sites.get(atom, ()))

    def _atom(self, site: PinSite) -> str:
        return self.tree.own(site.module)

    def _note(self, sites: Iterable[PinSite], pins: Sequence[str]) -> None:
        pinned = self.tree.expand(pins)
        for site in sites:
            atom = self._atom(site)
            into = self.outside if atom in pinned or atom not in self.tree else self._sites.setdefault(atom, [])
            if not any(_is_same(site, known) for known in into):
                into.append(site)


def _site(suspect: Suspect) -> PinSite:
    producer = suspect.producer
    return PinSite(
        phase=producer.phase,
        module=producer.module,
        op=producer.op,
        source=producer.source,
        value=suspect.value,
        call=producer.call,
        parameter=producer.parameter,
    )


def _is_same(one: PinSite, other: PinSite) -> bool:
    return (one.phase, one.module, one.op, one.source) == (other.phase, other.module, other.op, other.source)

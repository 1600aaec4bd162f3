"""What a run, a search or a proof reports on its way."""

from __future__ import annotations

from ampdbg.record.pins import Trial
from ampdbg.record.run import Step


class Observer:
    """Sees a run on its way, and does nothing. What a method raises ends the run, a KeyboardInterrupt too."""

    def start(self, planned: int) -> None:
        """So many steps are planned; model and data are about to be loaded."""

    def level(self, name: str) -> None:
        """The run of that level of precision is about to begin, one of several with the same number of steps."""

    def step(self, step: Step) -> None:
        """An optimizer step has ended."""

    def replay(self, step: int, doing: str) -> None:
        """The step of this number is about to be replayed, in the precision that ``doing`` names."""

    def ended_in(self, step: int) -> None:
        """A script has ended in the middle of the step of this number, which is about to be replayed."""

    def search(self, modules: tuple[str, ...]) -> None:
        """A search for pins begins, or begins again, over modules of these names, in the order of their first calls."""

    def trial(self, trial: Trial) -> None:
        """An experiment has ended."""

    def warned(self, text: str) -> None:
        """Something beside the run has failed, and the run continues."""

    def stage(self, doing: str) -> None:
        """A part of planning or proving a patch is about to run."""


UNOBSERVED = Observer()

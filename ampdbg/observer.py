"""The reports of a run, a search or a proof while it is under way."""

from __future__ import annotations

from ampdbg.record.pins import Trial
from ampdbg.record.run import Step


class Observer:
    """Receives the reports of a run and ignores them. An exception in a method ends the run, KeyboardInterrupt too."""

    def start(self, planned: int) -> None:
        """A run of ``planned`` steps is about to load its model and data."""

    def level(self, name: str) -> None:
        """The run at this precision level is about to begin. Every level has the same number of steps."""

    def step(self, step: Step) -> None:
        """An optimizer step has ended."""

    def replay(self, step: int, doing: str) -> None:
        """The step of this number is about to be replayed, in the precision that ``doing`` names."""

    def ended_in(self, step: int) -> None:
        """A script has ended within the step of this number, which is about to be replayed."""

    def search(self, modules: tuple[str, ...]) -> None:
        """A search for pins begins or restarts over the named modules, in the order of their first calls."""

    def trial(self, trial: Trial) -> None:
        """A trial of the search has ended."""

    def warned(self, text: str) -> None:
        """A side task of the run has failed, such as writing the log, and the run continues."""

    def stage(self, doing: str) -> None:
        """A stage of planning or proving a patch is about to run."""


UNOBSERVED = Observer()

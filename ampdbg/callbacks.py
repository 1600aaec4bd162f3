"""Callbacks that watch the loops of Lightning and of the transformers Trainer, with captures and a report.

Neither library is imported before its callback is requested.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampdbg.commands.output import look_of, save, typed_as
from ampdbg.commands.streams import say
from ampdbg.record.file import CAPTURES
from ampdbg.report.formats import written

if TYPE_CHECKING:
    from ampdbg.probes.watch import Watch


class Watched:
    """One training run of a framework, watched from :meth:`begin` to :meth:`end`, which writes and shows its record."""

    def __init__(self, captures: str | Path | None) -> None:
        self._captures = captures
        self._watch: Watch | None = None

    def begin(self, model: Any, optimizers: Any) -> None:
        """Start to watch the model and its optimizers."""
        from ampdbg.script.loop_watch import watch

        self.end()
        self._watch = watch(model, optimizers, captures=self._captures).start()

    def end(self, error: BaseException | None = None) -> None:
        """Stop the watch, write its record to ``.ampdbg`` and its report to stderr; do nothing without a watch."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        from ampdbg.diagnosis.diagnose import diagnose

        if error is not None:
            watch.calls.failed(error)
        watch.stop()
        record = diagnose(watch.record())
        saved = save(record, None)
        say(written(record, typed_as("", saved.path), look_of(sys.stderr), "text").rstrip("\n"))


def lightning_callback(captures: str | Path | None = CAPTURES) -> Any:
    """Return a callback for ``lightning.Trainer(callbacks=[...])``; ``captures`` is where failing steps go."""
    has_new_name = importlib.util.find_spec("lightning") is not None
    base: Any = importlib.import_module("lightning" if has_new_name else "pytorch_lightning").Callback

    class LightningWatch(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._watched = Watched(captures)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.optimizers:  # without an optimizer nothing steps
                self._watched.begin(pl_module, trainer.optimizers)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self._watched.end()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self._watched.end(exception)

    return LightningWatch()


def transformers_callback(captures: str | Path | None = CAPTURES) -> Any:
    """Return a callback for ``transformers.Trainer(callbacks=[...])``, as :func:`lightning_callback` does."""
    base: Any = importlib.import_module("transformers").TrainerCallback

    class TrainerWatch(base):  # type: ignore[misc]
        def __init__(self) -> None:
            self._watched = Watched(captures)

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self._watched.begin(given["model"], given["optimizer"])

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self._watched.end()

    return TrainerWatch()

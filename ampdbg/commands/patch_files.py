"""What ``ampdbg suggest-fp32`` writes: the patched files, and its text where it was asked for or beside the record."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ampdbg.errors import PatchError
from ampdbg.files import replace_file

from .patch_output import Output, PatchFormat

if TYPE_CHECKING:
    from ampdbg.config import Config
    from ampdbg.proof.suggestion import Suggestion

SUFFIXES = {
    PatchFormat.diff: ".patch",
    PatchFormat.module: ".py",
    PatchFormat.yaml: ".yaml",
    PatchFormat.json: ".patch.json",
}
"""What is saved beside the record, which itself ends in ``.json``."""


@dataclass(frozen=True)
class Written:
    """What became of a suggestion: ``file`` has its text, if any; ``failure`` is what could not be written."""

    file: Path | None
    failure: PatchError | None = None


def write_suggestion(
    found: Suggestion,
    ready: Output,
    output: Path | None,
    record: Path | None,
    *,
    apply: bool,
    force: bool,
    beside_record: bool,
) -> Written:
    """Writes the patched files if they are to be, and the text to ``output``, else beside the record if it is to be.

    What cannot be written where it was asked for must not be lost: then the text is beside the record all the same.
    """
    failure = _failure_of_apply(found, force) if apply else None
    if ready.content is None:
        return Written(None, failure)
    if output is not None:
        try:
            replace_file(output, ready.content)
            return Written(output, failure)
        except OSError as error:
            failure = failure or PatchError(f"{output}: cannot be written: {error.strerror or error}")
    path = record.with_suffix(SUFFIXES[ready.format]) if record is not None else None
    if path is None or not (beside_record or (failure is not None and not path.exists())):
        return Written(None, failure)
    return Written(path if _is_written(path, ready.content) else None, failure)


def _failure_of_apply(found: Suggestion, force: bool) -> PatchError | None:
    try:
        apply_patch(found, force)
    except PatchError as error:
        return error
    return None


def apply_patch(found: Suggestion, force: bool) -> None:
    """Writes the patched files, where there is a patch.

    Raises:
        PatchError: a file cannot be written, or git sees uncommitted changes in it and it is not forced.
    """
    from ampdbg.patch.file_edits import write_edits

    if found.patch is not None:
        write_edits(found.patch.edits, force=force)


def _is_written(path: Path, content: bytes) -> bool:
    """A copy that nobody asked for may be missing."""
    try:
        replace_file(path, content)
    except OSError:
        return False
    return True


def with_places(failure: PatchError, file: Path | None, record: Path | None) -> PatchError:
    """The failure, and where the search's results are all the same."""
    kept = {"the patch": file, "the record": record}
    places = " and ".join(f"{what} is in {shlex.quote(str(path))}" for what, path in kept.items() if path is not None)
    return PatchError(f"{failure}; {places}" if places else str(failure))


def uncommitted_sources(config: Config) -> Iterator[Path]:
    """The files named in the config that git has not got as they are now: a patch of them would not be written."""
    from ampdbg.config import parse_target
    from ampdbg.patch.file_edits import uncommitted

    specs = (spec for spec in (config.model, config.data, config.loss, config.step) if spec is not None)
    files = dict.fromkeys(target.path(config.folder) for spec in specs if (target := parse_target(spec.target)).file)
    return (file for file in files if uncommitted(file))

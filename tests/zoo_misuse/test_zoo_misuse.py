"""Every misuse as a planted loop: its exact code and line; and every healthy twin, which gives no finding."""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.precision.emulation import cuda_on_cpu
from ampdbg.probes.watch import watch
from ampdbg.record import codes
from ampdbg.record.file import from_json, to_json
from ampdbg.record.run import Record
from tests.zoo_misuse import healthy, planted
from tests.zoo_misuse.parts import Parts, make_parts

Loop = Callable[[Parts], None]

# What torch says to each is part of the misuse; the loop ends there.
ENDS_THE_RUN = {
    "bare_step_then_update",
    "bare_step_without_update",
    "unscale_twice",
    "unscale_after_step",
    "no_update",
    "no_update_with_clipping",
    "unscale_in_window_update_at_end",
    "update_in_window",
    "half_parameters",
    "unused_optimizer",
    "no_loss_is_scaled",
    "update_again",
    "custom_function",
    "bce",
}

# A few skips settle the scale, and so the misuse stands beside what says that they do.
IS_INFORMATION = {"scheduler_on_a_first_skip"}


def loops_of(module: ModuleType) -> list[Loop]:
    functions = inspect.getmembers(module, inspect.isfunction)
    return [loop for _, loop in functions if loop.__module__ == module.__name__]


def marks_in(path: Path) -> Iterator[tuple[int, str]]:
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        _, mark, code = text.rpartition("# misuse-")
        if mark:
            yield number, f"misuse-{code}"


MARKS = dict(marks_in(Path(planted.__file__)))


def marks_of(loop: Loop) -> dict[int, str]:
    """The marked lines of a loop, and of the Function that it applies."""
    lines: list[int] = []
    sources: list[Callable[..., object]] = [loop]
    if "custom" in loop.__name__:
        sources.append(planted.Projection)
    for source in sources:
        text, first = inspect.getsourcelines(source)
        lines += range(first, first + len(text))
    return {line: MARKS[line] for line in lines if line in MARKS}


def watched(loop: Loop, raises: bool = False) -> Record:
    parts = make_parts()
    with warnings.catch_warnings(), cuda_on_cpu():
        warnings.simplefilter("ignore")
        ending = pytest.raises((RuntimeError, AssertionError, ValueError)) if raises else contextlib.nullcontext()
        with ending, watch(parts.both, parts.optimizers) as seen:
            loop(parts)
        return diagnose(seen.record())


@pytest.mark.parametrize("loop", loops_of(planted), ids=lambda loop: loop.__name__)
def test_a_planted_misuse_has_its_code_and_its_line(loop: Loop) -> None:
    record = watched(loop, raises=loop.__name__ in ENDS_THE_RUN)
    [(line, code)] = marks_of(loop).items()
    told = [finding for finding in record.findings if finding.code.startswith("misuse-")]
    assert [finding.code for finding in told] == [code]
    source = told[0].source
    assert source is not None
    assert (Path(source.file), source.line) == (Path(planted.__file__), line)
    assert code in source.text
    if loop.__name__ in IS_INFORMATION:
        assert (record.verdict, told[0].severity, told[0].root) == ("healthy", "info", None)
    else:
        assert record.verdict == "other"
        assert told[0].severity != "info"
        assert (record.findings[0].code, record.findings[0].root) == (code, None)
    assert from_json(to_json(record)).misuses == record.misuses


@pytest.mark.parametrize("loop", loops_of(healthy), ids=lambda loop: loop.__name__)
def test_a_healthy_loop_gives_no_finding(loop: Loop) -> None:
    record = watched(loop)
    assert [finding for finding in record.findings if finding.severity != "info"] == []
    assert record.misuses == ()
    assert record.verdict == "healthy"
    assert len(record.steps) >= 3


SEEN_IN_SOURCE_ALONE = {
    "misuse-autocast-decorator",
    "misuse-autocast-device",
    "misuse-autocast-float32",
    "misuse-unsaved-scaler",
    "misuse-lost-upcast",
}
"""They do nothing wrong in a step that could be watched: planted in tests/lint."""


def test_every_code_is_planted_has_a_meaning_and_is_explained() -> None:
    every = {code for code in codes.CODES if code.startswith("misuse-")}
    assert every - set(MARKS.values()) == SEEN_IN_SOURCE_ALONE
    assert all(codes.CODES[code].message and codes.CODES[code].phase for code in every)

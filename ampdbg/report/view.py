"""The view of a record: a page of headline, sections and next command, as data that any output format can draw."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import ClassVar, Literal, TypeVar

from ampdbg.formats import Exponents
from ampdbg.quantities import counted
from ampdbg.record.findings import CodeLine, Finding, Severity
from ampdbg.record.run import Environment, Record, Step

Tone = Literal["plain", "good", "bad", "doubtful", "warning", "strong", "faint", "name", "chart"]
"""What a piece of text says by its colour."""

TONES: Mapping[Severity, Tone] = {"error": "bad", "warning": "doubtful", "info": "name"}
"""The tone of a finding by its severity."""

Order = Literal["tightest", "execution"]
"""How a range profile lists its sites."""


@dataclass(frozen=True)
class Words:
    """A piece of text in one tone."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class StyledLine:
    """A line of text, which is wrapped where it is too long. ``is_code`` cuts it instead; ``depth`` indents it."""

    words: tuple[Words, ...]
    depth: int = 0
    is_code: bool = False


Cell = str | StyledLine | tuple[StyledLine, ...] | Exponents


@dataclass(frozen=True)
class Column:
    """A column of a table: ``names`` are wrapped where there is no room, at ``most`` characters if that is given.

    Numbers and shares stand to the right, signs to the left; a share is a percentage, and a bar where one can be drawn.
    ``is_spare`` columns are left out where there is no room.
    """

    heading: str = ""
    kind: Literal["names", "number", "share", "sign", "histogram"] = "names"
    most: int | None = None
    is_spare: bool = False


RIGHT = ("number", "share")
"""The kinds of column that stand to the right."""


@dataclass(frozen=True)
class Table:
    """Rows under columns, with lines ``above`` and ``below``."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    above: tuple[StyledLine, ...] = ()
    below: tuple[StyledLine, ...] = ()


@dataclass(frozen=True)
class Paragraph:
    """Lines of text, under a title if there is one."""

    lines: tuple[StyledLine, ...]
    title: str = ""


@dataclass(frozen=True)
class Snippet:
    """Lines to copy as they stand."""

    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Prose:
    """A text in Markdown: paragraphs, lists with ``-`` and fenced code."""

    title: str
    markdown: str


@dataclass(frozen=True)
class Findings:
    """What the diagnosis found; ``is_brief`` gives each finding without a root a line, but for the first."""

    findings: tuple[Finding, ...]
    is_brief: bool = False
    title: ClassVar = ""


@dataclass(frozen=True)
class ScaleChart:
    """The loss scale over ``steps``, at least one, with the skipped ones and the non-finite losses marked."""

    title: str
    steps: tuple[Step, ...]


Section = Table | Paragraph | Snippet | Prose | Findings | ScaleChart


CONTENTS = ("rows", "above", "below", "lines", "markdown", "findings", "steps")
"""The fields of sections that hold what they show."""


def filled(*sections: Section) -> tuple[Section, ...]:
    """The sections in which something stands, in order."""
    return tuple(one for one in sections if any(getattr(one, field, ()) for field in CONTENTS))


@dataclass(frozen=True)
class Headline:
    """The first line of a page: one sentence."""

    tone: Tone
    sentence: str


@dataclass(frozen=True)
class NextCommand:
    """What to do next and the command for it."""

    why: str
    command: str


@dataclass(frozen=True)
class Page:
    """All that a report shows of a record, in order; ``footer`` says what ran, where, and where its record is.

    The ``story`` replaces the sections where one screen of 80 × 24 has to do; where there is
    none, the sections are short enough.
    """

    headline: Headline | None
    sections: tuple[Section, ...]
    footer: tuple[str, ...] = ()
    record_path: str = ""
    next_command: NextCommand | None = None
    story: tuple[Section, ...] = ()


@dataclass(frozen=True)
class Typed:
    """What the record does not know: how the ``config`` and the options were typed, and where the record was written.

    Both are quoted for a shell. ``folder`` is where the command was typed: files below it are named from there.
    ``order`` and ``top``, where it was given, are those of the sites and modules that a range profile lists. What
    ``suggest-fp32`` hands over is in the file ``handed_over`` and, if ``is_applied``, in the user's files.
    ``is_record`` says that a record was given for a config. ``verbose`` asks for all sections, not the story alone.
    """

    config: str = "CONFIG"
    record_path: str = ""
    folder: str = ""
    order: Order = "tightest"
    top: int | None = None
    handed_over: str = ""
    is_applied: bool = False
    is_record: bool = False
    verbose: bool = False


@dataclass(frozen=True)
class Look:
    """What a stream can show: its width in columns, ANSI colours, and characters beyond ASCII."""

    width: int
    color: bool
    unicode: bool


def line(*parts: str | Words, tone: Tone = "plain", depth: int = 0, is_code: bool = False) -> StyledLine:
    """A line of ``parts``; ``tone`` is that of parts which have none of their own."""
    return StyledLine(tuple(Words(part, tone) if isinstance(part, str) else part for part in parts), depth, is_code)


def lines(*texts: str, tone: Tone = "plain", is_code: bool = False) -> tuple[StyledLine, ...]:
    """A line for each text in which something stands."""
    return tuple(line(text, tone=tone, is_code=is_code) for text in texts if text)


def table(title: str, columns: Sequence[Column], rows: Sequence[tuple[Cell, ...]], *below: StyledLine) -> Table:
    """A table without the columns in which nothing stands."""
    used = [any(row[at] for row in rows) for at in range(len(columns))]
    return Table(title, tuple(compress(columns, used)), tuple(tuple(compress(row, used)) for row in rows), below=below)


def module(name: str) -> str:
    """A module by its name; the root has none."""
    return name or "(root)"


def ran_on(record: Record) -> Iterator[str]:
    """What the run ran on, and what its record has to say about that."""
    ran = record.environment
    policy = "in FP32" if ran.policy == "none" else f"{ran.policy} autocast policy"
    yield f"torch {ran.torch} · {device(ran)} · {policy}{', emulated' * ran.emulated}"
    yield from (f"Note: {note}" for note in (*ran.notes, *record.unseen.notes))


def device(ran: Environment) -> str:
    """The device, with its name where it has one."""
    return f"{ran.device} ({ran.device_name})" if ran.device_name else ran.device


def root_of(findings: Sequence[Finding], index: int) -> int:
    """The index at the end of the chain of ``root``; a damaged chain, one in a circle, ends at its lowest index."""
    path = {index}
    while True:
        root = findings[index].root
        if root is None or not 0 <= root < len(findings):
            return index
        if root in path:
            return min(path)
        path.add(root)
        index = root


def with_effects(findings: Sequence[Finding]) -> Iterator[tuple[Finding, tuple[Finding, ...]]]:
    """Every finding without a root, with those that it explains."""
    roots = [root_of(findings, index) for index in range(len(findings))]
    for index, finding in enumerate(findings):
        if roots[index] == index:
            yield finding, tuple(findings[other] for other, root in enumerate(roots) if root == index != other)


def places(finding: Finding) -> Iterator[tuple[str, CodeLine]]:
    """The line of a finding, and of a library's below it the user's that led there, each with what comes before it."""
    if finding.source is not None:
        yield "", finding.source
        if finding.source.called_from is not None:
            yield "called from ", finding.source.called_from


def conjunction(finding: Finding, effect: Finding) -> str:
    """The word before an effect of a finding: "then", or "and" where it began before the replayed step."""
    return "then" if effect.step >= finding.step else "and"


def more(count: int, noun: str = "") -> tuple[StyledLine, ...]:
    """The line below a table that leaves ``count`` rows to the record."""
    rest = counted(count, f"more {noun}") if noun else f"{count:,} more"
    return (line(f"… and {rest} (all in the record)", tone="faint"),) if count > 0 else ()


Value = TypeVar("Value")


def every(*rows: tuple[object, Value]) -> Iterator[Value]:
    """What stands beside each condition that holds."""
    return (value for holds, value in rows if holds)


def first(*rows: tuple[object, Value]) -> Value:
    """What stands beside the first of conditions that holds."""
    return next(every(*rows))


def next_of(*rows: tuple[object, str, str]) -> NextCommand | None:
    """Of why and what to type, those beside the first condition that holds; None where none does, or why is empty."""
    why, command = first(*((holds, (why, command)) for holds, why, command in rows), (True, ("", "")))
    return NextCommand(why, command) if why else None


def with_option(command: str, option: str, value: object) -> str:
    """``command`` with ``option`` at its end, instead of the same option; of ``--set``, of the same key."""
    words, new = shlex.split(command), str(value)
    for at in reversed(range(len(words) - 1)):
        if words[at] == option and (option != "--set" or _key(words[at + 1]) == _key(new)):
            del words[at : at + 2]
    return shlex.join([*words, option, new])


def _key(setting: str) -> str:
    return setting.partition("=")[0].strip()

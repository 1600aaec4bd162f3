"""The view of a record: a page of headline, sections and next command, as data that any output format can draw."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import ClassVar, Literal, TypeVar

from ampdbg.formats import Exponents
from ampdbg.quantities import counted, module_name
from ampdbg.record.findings import CodeLine, Finding, Severity
from ampdbg.record.run import Environment, Record, Step

Tone = Literal["plain", "good", "bad", "doubtful", "warning", "strong", "faint", "name", "chart"]
"""The meaning of a piece of text, which its color shows."""

TONES: Mapping[Severity, Tone] = {"error": "bad", "warning": "doubtful", "info": "name"}
"""The tone of a finding by its severity."""

Order = Literal["tightest", "execution"]
"""The order in which a range profile lists its sites."""


@dataclass(frozen=True)
class Words:
    """A piece of text in one tone."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class StyledLine:
    """A line of text, which is wrapped if it is too long. ``is_code`` cuts it instead; ``depth`` indents it."""

    words: tuple[Words, ...]
    depth: int = 0
    is_code: bool = False


Cell = str | StyledLine | tuple[StyledLine, ...] | Exponents


@dataclass(frozen=True)
class Column:
    """A column of a table: ``names`` are wrapped if space is short, at ``most`` characters if that is given.

    Numbers and shares are aligned to the right, signs to the left. A share is a percentage, with a bar if the format
    can draw one. ``is_spare`` columns are left out if space is short.
    """

    heading: str = ""
    kind: Literal["names", "number", "share", "sign", "histogram"] = "names"
    most: int | None = None
    is_spare: bool = False


RIGHT = ("number", "share")
"""The kinds of column that are aligned to the right."""


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
    """Lines to copy unchanged."""

    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Prose:
    """A text in Markdown: paragraphs, lists with ``-`` and fenced code."""

    title: str
    markdown: str


@dataclass(frozen=True)
class Findings:
    """The findings of the diagnosis. With ``is_brief`` the first is whole, and each later root has a line."""

    findings: tuple[Finding, ...]
    is_brief: bool = False
    title: ClassVar = ""


@dataclass(frozen=True)
class ScaleChart:
    """The loss scale over ``steps``, at least one, with skipped steps and non-finite losses marked."""

    title: str
    steps: tuple[Step, ...]


Section = Table | Paragraph | Snippet | Prose | Findings | ScaleChart


CONTENTS = ("rows", "above", "below", "lines", "markdown", "findings", "steps")
"""The fields of sections that hold their content."""


def filled(*sections: Section) -> tuple[Section, ...]:
    """Return the sections that have content, in order."""
    return tuple(one for one in sections if any(getattr(one, field, ()) for field in CONTENTS))


@dataclass(frozen=True)
class Headline:
    """The first line of a page: one sentence."""

    tone: Tone
    sentence: str


@dataclass(frozen=True)
class NextCommand:
    """The next step for the user, and the command for it."""

    why: str
    command: str


@dataclass(frozen=True)
class Page:
    """The whole report of a record, in order; ``footer`` names what ran, on which machine, and the record's file.

    The ``story`` is a brief form, which replaces the sections if one screen of 80 × 24 must suffice. If it is empty,
    the sections are short enough.
    """

    headline: Headline | None
    sections: tuple[Section, ...]
    footer: tuple[str, ...] = ()
    record_path: str = ""
    next_command: NextCommand | None = None
    story: tuple[Section, ...] = ()


@dataclass(frozen=True)
class CommandContext:
    """What the record does not know: the ``config`` and the options as typed, and where the record was written.

    Both are quoted for a shell. ``folder`` is the working folder of the command: files below it are named relative to
    it. ``order`` and ``top``, if given, apply to the sites and modules of a range profile. The result of
    ``suggest-fp32`` is in the file ``handed_over`` and, if ``is_applied``, in the user's files. ``is_record`` is True
    if a record was given for a config. ``verbose`` asks for all sections, not only the story.
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
    """The abilities of a stream: its width in columns, ANSI colors, and characters beyond ASCII."""

    width: int
    color: bool
    unicode: bool


def line(*parts: str | Words, tone: Tone = "plain", depth: int = 0, is_code: bool = False) -> StyledLine:
    """Return a line of ``parts``; ``tone`` applies to parts without a tone."""
    return StyledLine(tuple(Words(part, tone) if isinstance(part, str) else part for part in parts), depth, is_code)


def lines(*texts: str, tone: Tone = "plain", is_code: bool = False) -> tuple[StyledLine, ...]:
    """Return a line for each text that is not empty."""
    return tuple(line(text, tone=tone, is_code=is_code) for text in texts if text)


def table(title: str, columns: Sequence[Column], rows: Sequence[tuple[Cell, ...]], *below: StyledLine) -> Table:
    """Return a table without its empty columns."""
    used = [any(row[at] for row in rows) for at in range(len(columns))]
    return Table(title, tuple(compress(columns, used)), tuple(tuple(compress(row, used)) for row in rows), below=below)


def module(name: str) -> str:
    """Return a module's name as shown: ``(root)`` for the root, which has no name."""
    return module_name(name, "(root)")


def ran_on(record: Record) -> Iterator[str]:
    """Yield what the run ran on, and the notes of its record about that."""
    ran = record.environment
    policy = "in FP32" if ran.policy == "none" else f"{ran.policy} autocast policy"
    yield f"torch {ran.torch} · {device(ran)} · {policy}{', emulated' * ran.emulated}"
    yield from (f"Note: {note}" for note in (*ran.notes, *record.unseen.notes))


def device(ran: Environment) -> str:
    """Return the device, with its name if it has one."""
    return f"{ran.device} ({ran.device_name})" if ran.device_name else ran.device


def root_of(findings: Sequence[Finding], index: int) -> int:
    """Return the index at the end of the chain of ``root``; a damaged chain in a circle ends at its lowest index."""
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
    """Yield every finding without a root, with the findings that it explains."""
    roots = [root_of(findings, index) for index in range(len(findings))]
    for index, finding in enumerate(findings):
        if roots[index] == index:
            yield finding, tuple(findings[other] for other, root in enumerate(roots) if root == index != other)


def places(finding: Finding) -> Iterator[tuple[str, CodeLine]]:
    """Yield the finding's line, and for a library's line the user's line that called it, each with a prefix."""
    if finding.source is not None:
        yield "", finding.source
        if finding.source.called_from is not None:
            yield "called from ", finding.source.called_from


def conjunction(finding: Finding, effect: Finding) -> str:
    """Return the word before an effect of a finding: "then", or "and" if it began before the replayed step."""
    return "then" if effect.step >= finding.step else "and"


def more(count: int, noun: str = "") -> tuple[StyledLine, ...]:
    """Return the line below a table that leaves ``count`` rows to the record."""
    rest = counted(count, f"more {noun}") if noun else f"{count:,} more"
    return (line(f"… and {rest} (all in the record)", tone="faint"),) if count > 0 else ()


Value = TypeVar("Value")


def every(*rows: tuple[object, Value]) -> Iterator[Value]:
    """Yield the value beside each condition that holds."""
    return (value for holds, value in rows if holds)


def first(*rows: tuple[object, Value]) -> Value:
    """Return the value beside the first condition that holds."""
    return next(every(*rows))


def next_of(*rows: tuple[object, str, str]) -> NextCommand | None:
    """Return why and what to type, for the first condition that holds; None if none does, or if the why is empty."""
    why, command = first(*((holds, (why, command)) for holds, why, command in rows), (True, ("", "")))
    return NextCommand(why, command) if why else None


def with_option(command: str, option: str, value: object) -> str:
    """Return ``command`` with ``option`` at its end, replacing the same option, or for ``--set`` the same key."""
    words, new = shlex.split(command), str(value)
    for at in reversed(range(len(words) - 1)):
        if words[at] == option and (option != "--set" or _key(words[at + 1]) == _key(new)):
            del words[at : at + 2]
    return shlex.join([*words, option, new])


def _key(setting: str) -> str:
    return setting.partition("=")[0].strip()

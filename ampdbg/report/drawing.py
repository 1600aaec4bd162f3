"""Sections drawn as text: the one console of all that is printed as a result."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich.console import Console, RenderableType

# Every character beyond ASCII that a report's own text uses, for terminals that cannot show them.
ASCII = str.maketrans(
    {"━": "=", "┃": "|", "─": "-", "┤": "|", "└": "+", "×": "x", "·": "-", "…": "...", "✓": "+", "✗": "x", "│": "|"}
    | {"↳": ">", **dict(zip("▁▂▃▄▅▆▇█", ".,:-=+*#", strict=True))}
)


def draw(sections: Iterable[RenderableType], *, width: int, color: bool, unicode: bool) -> str:
    """The sections with an empty line between them, for ``width`` columns.

    With ANSI colours if ``color``; ``unicode=False`` draws with ASCII alone.
    """
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        force_jupyter=False,
        legacy_windows=False,
        emoji=False,
        markup=False,
        highlight=False,
        _environ={},
    )
    with console.capture() as capture:
        for number, section in enumerate(sections):
            if number:
                console.print()
            console.print(section, crop=False)  # lines to copy are wider than the terminal
    text = "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"
    return text if unicode else text.translate(ASCII)

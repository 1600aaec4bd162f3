"""Makes docs/screens/: what the examples' commands print, as text and as a picture. `make screens` runs it: minutes.

Each command runs in a terminal of 80 columns, in the repository's root. What it hands over goes to a file beside.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
SCREENS = ROOT / "docs" / "screens"
README = ROOT / "README.md"
IN_README = re.compile(r"```console\n\$ ampdbg run .*?\n```", re.DOTALL)
COLUMNS = 80

COMMANDS = {
    "run": "ampdbg run --emulate examples/train.py",
    "scan": "ampdbg scan configs/linear_attention.yaml",
    "ranges": "ampdbg ranges configs/linear_attention.yaml",
    "suggest-fp32": "ampdbg suggest-fp32 configs/linear_attention.yaml",
    "camera": "ampdbg scan configs/camera.yaml",
    "camera-suggest": "ampdbg suggest-fp32 configs/camera.yaml",
    "vit": "ampdbg scan configs/vit.yaml",
    "vit-ranges": "ampdbg ranges configs/vit.yaml",
    "vit-bisect": "ampdbg bisect configs/vit.yaml",
    "cost": "ampdbg cost configs/vit.yaml --steps 20",
    "doctor": "ampdbg doctor",
}
"""By the name of the file."""

FONT = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
"""A picture that loads nothing: without rich's font, the reader's own monospace is taken."""


def main() -> int:
    """Makes the screens that are named, or all; 1 where a command could not run."""
    SCREENS.mkdir(parents=True, exist_ok=True)
    codes = [made(name, COMMANDS[name]) for name in sys.argv[1:] or COMMANDS]
    return int(any(code not in (0, 1) for code in codes))


def made(name: str, command: str) -> int:
    """Writes the screen of a command; its exit code."""
    code, screen = shown(command)
    plain = Text.from_ansi(screen).plain
    lines = "\n".join(line.rstrip() for line in plain.splitlines())
    (SCREENS / f"{name}.txt").write_text(f"$ {command}\n{lines}\n", encoding="utf-8")
    if name == "run":
        readme = README.read_text(encoding="utf-8")
        README.write_text(IN_README.sub(lambda _: f"```console\n$ {command}\n{lines}\n```", readme), encoding="utf-8")
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "dim"), (command, "bold")))
    console.print(Text.from_ansi(screen), soft_wrap=True)
    picture = console.export_svg(title="ampdbg", unique_id=name)
    (SCREENS / f"{name}.svg").write_text(FONT.sub("", picture), encoding="utf-8")
    print(f"{name}: exit code {code}")
    return code


def shown(command: str) -> tuple[int, str]:
    """The exit code, and the page in colour as a terminal shows it; a patch goes to its own file."""
    arguments = command.split()[1:]
    if arguments[0] == "run":
        return in_terminal(arguments, also_stderr=True)  # where its report goes: stdout is the script's
    if arguments[0] != "suggest-fp32":
        return in_terminal([*arguments, *(["--quiet"] if arguments[0] != "doctor" else [])])
    done = subprocess.run(
        [sys.executable, "-m", "ampdbg", *arguments, "--quiet"], cwd=ROOT, stdout=subprocess.PIPE, check=False
    )
    return done.returncode, done.stdout.decode() + in_terminal(["report"])[1]


def in_terminal(arguments: list[str], *, also_stderr: bool = False) -> tuple[int, str]:
    """Runs the program with stdout in a terminal of its own."""
    ours, theirs = pty.openpty()
    variables = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    variables.pop("NO_COLOR", None)
    program = [sys.executable, "-m", "ampdbg", *arguments]
    stderr = theirs if also_stderr else None
    running = subprocess.Popen(program, cwd=ROOT, stdout=theirs, stderr=stderr, env=variables)
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not part:
            break
        seen += part
    os.close(ours)
    return running.wait(), seen.decode().replace("\r\n", "\n")


if __name__ == "__main__":
    sys.exit(main())

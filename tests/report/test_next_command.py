"""A command with an option set anew: the others stay, and each stands there once."""

from __future__ import annotations

import shlex

import pytest

from ampdbg.report.next_command import with_option

COMMANDS = {
    "an option is added": ("ampdbg scan c.yaml", "--steps", 50, "ampdbg scan c.yaml --steps 50"),
    "it replaces its like": (
        "ampdbg scan c.yaml --steps 5 --seed 3",
        "--steps",
        50,
        "ampdbg scan c.yaml --seed 3 --steps 50",
    ),
    "a setting replaces that of its key alone": (
        "ampdbg scan c.yaml --set precision.level=O1 --set train.seed=4",
        "--set",
        "precision.level=O0",
        "ampdbg scan c.yaml --set train.seed=4 --set precision.level=O0",
    ),
    "a file may be called as an option": (
        "ampdbg scan 'my --steps 5.yaml'",
        "--steps",
        50,
        "ampdbg scan 'my --steps 5.yaml' --steps 50",
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_option_is_there_once_and_the_others_stay(name: str) -> None:
    command, option, value, expected = COMMANDS[name]
    assert with_option(command, option, value) == expected


def test_what_was_quoted_stays_quoted() -> None:
    settings = ["a.b=[1, 2]", "c=it's", "d={x: $HOME}"]
    command = shlex.join(["ampdbg", "scan", "my c.yaml", *(word for one in settings for word in ("--set", one))])
    assert shlex.split(with_option(command, "--steps", 5)) == [*shlex.split(command), "--steps", "5"]

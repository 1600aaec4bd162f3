"""What is said of an option's wrong value: in the words of the other messages, whichever library checked it."""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperCommand

OUR_WORDS = (
    (r"(?:Value error, )?(?P<given>'.*') is not one of (?P<all>.*)", r"got \g<given>; allowed: \g<all>"),
    (r"Input should be a valid integer.*", "allowed: whole numbers"),
    (r"(?P<given>'.*') is not a valid int(?:eger)?", r"got \g<given>; allowed: whole numbers"),
    (r"Input should be greater than or equal to (?P<least>\d+)", r"allowed: whole numbers from \g<least>"),
    (
        r"(?P<given>-?\d+) is not in the range x>=(?P<least>\d+)",
        r"got \g<given>; allowed: whole numbers from \g<least>",
    ),
)
"""What Typer's versions write, by themselves or through click or pydantic, and what it means; without final periods."""


class Command(TyperCommand):
    """A command that says what is allowed where an option's value is refused."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the arguments; a refusal is raised as it was, in our words."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = in_our_words(error.message)
            raise


def in_our_words(message: str) -> str:
    """The message that was meant, or ``message`` itself where it is none of those that are known."""
    plain = message if message.endswith("..") else message.removesuffix(".")
    for pattern, ours in OUR_WORDS:
        if match := re.fullmatch(pattern, plain, re.DOTALL):
            return match.expand(ours)
    return plain

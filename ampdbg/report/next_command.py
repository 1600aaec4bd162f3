"""A command to type next: the one that was typed, with an option set anew."""

from __future__ import annotations

import shlex


def with_option(command: str, option: str, value: object) -> str:
    """``command`` with ``option`` at its end, in the place of the same option; of ``--set``, of the same key."""
    words, new = shlex.split(command), str(value)
    for at in reversed(range(len(words) - 1)):
        if words[at] == option and (option != "--set" or _key(words[at + 1]) == _key(new)):
            del words[at : at + 2]
    return shlex.join([*words, option, new])


def _key(setting: str) -> str:
    return setting.partition("=")[0].strip()

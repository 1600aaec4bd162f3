"""The program in this process, as the tests of the commands have it."""

from __future__ import annotations

from tests.commands.conftest import here

__all__ = ["here"]

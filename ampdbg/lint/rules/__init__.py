"""The rules: one file for each rule or family of rules, with the examples that test it."""

from __future__ import annotations

import importlib
import pkgutil

from ampdbg.lint.rule import Rule

RULES: tuple[Rule, ...] = tuple(
    importlib.import_module(f".{module.name}", __name__).RULE for module in pkgutil.iter_modules(__path__)
)
"""Every rule: the ``RULE`` of each module of this folder."""

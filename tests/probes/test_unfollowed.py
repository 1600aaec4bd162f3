"""Tests that the compiler follows no code of ampdbg."""

import sys
from pathlib import Path
from types import CodeType, ModuleType

import pytest

from ampdbg.probes import unfollowed
from ampdbg.probes.unfollowed import exclude_from_compile

MODULE = """\
import functools
import torch
from dataclasses import dataclass, field
from pathlib import Path  # not defined here

def plain():
    return [0 for _ in map(lambda x: x, ())], (each for each in ())

@functools.lru_cache
def cached(): ...

@torch.no_grad()
def without_gradients(): ...

TABLE = {"a": lambda: 0}

def with_defaults(one=lambda: 0, *, other=lambda: 0): ...

@dataclass
class Held:
    number: int
    kinds: list = field(default_factory=lambda: [])

    class Inner:
        def deep(self): ...

    @property
    def asked(self): ...

    @functools.cached_property
    def kept(self): ...

    @classmethod
    def made(cls): ...
"""


def test_all_code_that_a_module_of_ampdbg_defines_is_skipped_and_no_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("ampdbg.defines")
    file = str(Path(unfollowed.__file__).with_name("defines.py"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(MODULE, file, "exec"), vars(module))
    marked: list[CodeType] = []
    monkeypatch.setattr(unfollowed, "_skipping", lambda: marked.append)
    monkeypatch.setattr(unfollowed, "_done", {name for name in sys.modules if name != module.__name__})
    exclude_from_compile()
    names = {code.co_name for code in marked}
    assert {code.co_filename for code in marked} == {file, "<string>"}
    assert names >= {"plain", "<lambda>", "<genexpr>", "cached", "without_gradients", "deep", "asked", "kept", "made"}
    assert "__init__" in names
    assert sum(code.co_name == "<lambda>" for code in marked) == 5
    marked.clear()
    exclude_from_compile()
    assert not marked

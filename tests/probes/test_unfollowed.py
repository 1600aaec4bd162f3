"""Code of ours that no compiler follows."""

import contextlib
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampdbg.probes import unfollowed
from ampdbg.probes.unfollowed import is_in_compiled_call, leave_ours_alone, note_mode_left

MODULE = """\
import functools
import torch
from dataclasses import dataclass
from pathlib import Path  # not defined here

def plain():
    return [0 for _ in map(lambda x: x, ())], (each for each in ())

@functools.lru_cache
def cached(): ...

@torch.no_grad()
def without_gradients(): ...

TABLE = {"a": lambda: 0}

@dataclass
class Held:
    number: int

    class Inner:
        def deep(self): ...

    @property
    def asked(self): ...

    @functools.cached_property
    def kept(self): ...

    @classmethod
    def made(cls): ...
"""


def test_all_code_that_a_module_defines_is_found_and_none_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("ampdbg.defines")
    file = str(Path(unfollowed.__file__).with_name("defines.py"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(MODULE, file, "exec"), vars(module))
    marked: list[CodeType] = []
    monkeypatch.setattr(unfollowed, "_skipping", lambda: marked.append)
    monkeypatch.setattr(unfollowed, "_done", {name for name in sys.modules if name != module.__name__})
    leave_ours_alone()
    names = {code.co_name for code in marked}
    assert {code.co_filename for code in marked} == {file, "<string>"}
    assert names >= {"plain", "<lambda>", "<genexpr>", "cached", "without_gradients", "deep", "asked", "kept", "made"}
    assert "__init__" in names
    assert sum(code.co_name == "<lambda>" for code in marked) == 2
    marked.clear()
    leave_ours_alone()
    assert not marked


@pytest.mark.slow  # the compiler takes seconds to come
def test_what_runs_within_a_compiled_call_is_told() -> None:
    seen = []

    @torch.compile(backend="eager")
    def outer(x: torch.Tensor) -> torch.Tensor:
        look()
        return x + 1

    def look() -> None:
        torch._dynamo.graph_break()
        seen.append(is_in_compiled_call())

    outer(torch.ones(1))
    look()
    assert seen == [True, False]


class Counted(TorchDispatchMode):
    ops = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return op(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("is_traced", [False, True])
def test_a_mode_may_be_left_within_a_compiled_call(raises: bool, is_traced: bool) -> None:
    mode, deep = Counted(), list[int]()

    def leave() -> None:
        torch._dynamo.graph_break()
        mode.__exit__(None, None, None)
        note_mode_left()
        if raises:
            raise ValueError("in the middle")

    @torch.compile(backend="eager")
    def outer(x: torch.Tensor) -> torch.Tensor:
        inner(x)
        deep.append(torch._C._len_torch_dispatch_stack())
        return x + 1

    @torch.compile(backend="eager")
    def inner(x: torch.Tensor) -> None:
        leave()

    tracer = (lambda *_: None) if is_traced else sys.gettrace()
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        mode.__enter__()
        with pytest.raises(ValueError, match="in the middle") if raises else contextlib.nullcontext():
            outer(torch.ones(1))
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not deep or deep == [1]
    seen = mode.ops
    assert torch.randn(2).abs().isfinite().all()  # fails where torch looks for a mode
    assert mode.ops == seen

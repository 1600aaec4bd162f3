"""Tests of the names that held half tensors on a line: names, attributes, elements and targets of in-place adds."""

from pathlib import Path
from typing import Any

import torch

from ampdbg.probes.half_names import names_seen

CODE = """\
import collections


class Unlike:
    def __getitem__(self, key):
        raise AssertionError("code of the user's was run")


class Net:
    def __init__(self):
        self.total, self.rows, self.cache = 0.0, Unlike(), collections.defaultdict(list)

    def forward(self, keys, i, h):
        self.total += h.sum()
        y = h @ keys[i].T
        z = self.rows[i] if i > 5 else y
        z = self.cache["k"] if i > 5 else z
        return z
"""


def test_elements_indexed_by_a_name_and_the_target_of_an_addition_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(CODE)
    module: dict[str, Any] = {}
    exec(compile(CODE, file, "exec"), module)
    net, h = module["Net"](), torch.ones(2, 2).half()
    net.total = torch.zeros(())
    with names_seen({(str(file), 14)}) as seen:
        net.forward([h, h], 1, h)
    assert set(seen[str(file), 14].half) == {"h"}
    assert set(seen[str(file), 14].full) == {"self.total"}
    assert set(seen[str(file), 15].half) == {"h", "keys[i]", "keys[i].T"}
    assert net.cache == {}


CALLS = """\
import functools

import torch


def plain(a, b=None, *rest, c=None, **more):
    return a


@functools.wraps(plain)
def wrapped(*args, **kwargs):
    return plain(*args, **kwargs)


class Net(torch.nn.Module):
    def forward(self, x, y):
        return x

    def method(self, x):
        return x


def step(net, h, t, pair):
    plain(h * 1, (t * 2).half(), h * 3, c=h * 4, d=t * 5)
    wrapped(h * 6, t * 7)
    net(h * 8, y=t * 9)
    net.method(h * 10)
    plain(*pair, h * 11)
    plain((plain(h * 12) + 1).float())
"""
"""No value is recorded where one function is called twice."""


def test_arguments_that_are_expressions_are_seen_with_the_values_that_the_callee_gets(tmp_path: Path) -> None:
    file = tmp_path / "calls.py"
    file.write_text(CALLS)
    module: dict[str, Any] = {}
    exec(compile(CALLS, file, "exec"), module)
    h, t = torch.ones(2).half(), torch.ones(2)
    with names_seen({(str(file), line) for line in range(24, 30)}) as seen:
        module["step"](module["Net"](), h, t, [h, h])
    half, full = ({text for names in seen.values() for text in getattr(names, kind)} for kind in ("half", "full"))
    expressions = {"h * 1", "(t * 2).half()", "h * 3", "h * 4", "h * 6", "h * 8", "h * 10"}
    assert half - {"h", "a", "x", "b", "c"} == expressions
    assert full - {"t", "a", "b", "y"} == {"t * 5", "t * 7", "t * 9"}

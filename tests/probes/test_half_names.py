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

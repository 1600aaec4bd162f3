"""What a search costs: trials and its own time, by how many modules ran and how many culprits were planted.

The step is synthetic and takes no time, so that the milliseconds are the search's alone; of a real model each
trial is a training step besides. Each row is the worst of several planted sets, beside the most trials that are
allowed. Of guided's, the command needs k + 1 itself, to narrow the pins and to run the whole set once more.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from ampdbg.record.pins import Trial
from ampdbg.search import AtomTree, Result, Trials, atom_tree, delta_debug, guided_search

BLOCK = ("", ".norm1", ".attn", ".attn.qkv", ".attn.out", ".norm2", ".mlp", ".mlp.up", ".mlp.act", ".mlp.down")
"""The modules of a transformer's block."""

FALSE = 4
"""How many false candidates there are besides the culprits, where there are any."""


@dataclass(frozen=True)
class Strategy:
    """``search(trials, culprits, false candidates)``, and the most trials allowed for n modules and k culprits."""

    search: Callable[[Trials, Sequence[str], Sequence[str]], Result]
    allowed: Callable[[int, int], float]


STRATEGIES = {
    "guided": Strategy(lambda trials, culprits, false: guided_search(trials, culprits), lambda n, k: 2 * k + 3),
    f"guided, {FALSE} false": Strategy(
        lambda trials, culprits, false: guided_search(trials, [*culprits, *false]), lambda n, k: 2 * k + 3 + FALSE
    ),
    "ddmin": Strategy(lambda trials, culprits, false: delta_debug(trials), lambda n, k: int(3 * k * math.log2(n)) + 10),
}


def transformer(count: int) -> AtomTree:
    """A transformer of so many modules."""
    blocks = (f"blocks.{block}{part}" for block in range(count) for part in BLOCK)
    return atom_tree(["", "embed", *islice(blocks, count - 4), "norm", "head"])


def planted(tree: AtomTree, culprits: Sequence[str]) -> Trials:
    """Trials of a step that is healthy exactly when all culprits are pinned."""
    needed = frozenset(culprits)
    return Trials(lambda pins: Trial(pins, healthy=tree.expand(pins) >= needed), tree)


def row(name: str, tree: AtomTree, count: int, rounds: int) -> str:
    """The worst of ``rounds`` searches for ``count`` culprits, and how many found exactly those."""
    trials, seconds, exact = [], [], 0
    for seed in range(rounds):
        drawn = random.Random(seed).sample(tree.atoms, count + FALSE)
        culprits, false = drawn[:count], drawn[count:]
        made = planted(tree, culprits)
        start = time.perf_counter()
        found = STRATEGIES[name].search(made, culprits, false)
        seconds.append(time.perf_counter() - start)
        trials.append(len(made.made))
        exact += found.minimal and found.pins == tree.compress(culprits)
    allowed = STRATEGIES[name].allowed(len(tree.atoms), count)
    return (
        f"{name:<16} {len(tree.atoms):7} {count:8} {max(trials):6} {allowed:7.0f} "
        f"{1e3 * max(seconds):9.1f} {exact:5} of {rounds}"
    )


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="planted sets a row")
    parser.add_argument("--modules", type=int, nargs="+", default=[50, 500, 2000], help="sizes of the model")
    parser.add_argument("--culprits", type=int, nargs="+", default=[1, 2, 4, 8], help="how many are planted")
    options = parser.parse_args(arguments)
    print(f"{'search':<16} modules culprits trials allowed search ms exact")
    for name in STRATEGIES:
        for modules in options.modules:
            tree = transformer(modules)
            for count in options.culprits:
                print(row(name, tree, count, options.rounds), flush=True)


if __name__ == "__main__":
    main()

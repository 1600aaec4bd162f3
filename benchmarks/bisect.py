"""What ``bisect`` costs on real models: trials and wall time, by how many modules there are and how many overflow.

The models are those of the tests, with layers planted among them whose product is beyond half. The wall time is that
of the whole command: three training steps, the replays that diagnose them, the search and the proof on further
batches. ``steps`` is that time in steps of the same model in FP16, unwatched, taken in the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from ampdbg.config.file import load_config
from ampdbg.pinning.bisection import bisect_run
from ampdbg.record.pins import Search, Strategy
from ampdbg.record.run import Record
from benchmarks.steps import machine, threads
from tests.pinning.planted import name_of

ALLOWED: Mapping[Strategy, Callable[[int, int], int]] = {
    "guided": lambda modules, culprits: 2 * culprits + 3,
    "ddmin": lambda modules, culprits: int(3 * culprits * math.log2(modules)) + 10,
}
"""The most trials a search may take."""

PROOF = "further batch"
"""How the stage of a trial begins that is none of the search."""


@dataclass(frozen=True)
class Row:
    """One search: of how many modules, for how many culprits, with what outcome; times in seconds."""

    strategy: Strategy
    modules: int
    culprits: int
    trials: int
    allowed: int
    seconds: float
    exact: bool

    def line(self) -> str:
        """The row as it is printed."""
        return (
            f"{self.strategy:<8} {self.modules:7} {self.culprits:8} {self.trials:6} {self.allowed:7} "
            f"{self.seconds:8.1f} {'yes' if self.exact else 'NO':>5}"
        )


def measured(strategy: Strategy, modules: int, culprits: int) -> Row:
    """Plants culprits in a model of about ``modules`` modules and has them found."""
    planted = sorted(random.Random(modules + culprits).sample(range(modules * 6 // 7), culprits))
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        record = _bisected(Path(folder), strategy, modules, planted)
        seconds = time.perf_counter() - start
    search = record.search
    assert search is not None
    searched = [trial for trial in record.trials if not trial.stage.startswith(PROOF)]
    return Row(
        strategy,
        search.modules,
        culprits,
        len(searched),
        ALLOWED[strategy](search.modules, culprits),
        seconds,
        _is_exact(record, search, planted),
    )


def _bisected(folder: Path, strategy: Strategy, modules: int, planted: list[int]) -> Record:
    home = "tests.pinning.planted"
    config = {
        "model": {"target": f"{home}:Planted", "args": {"modules": modules, "culprits": planted}},
        "data": {"target": f"{home}:batches"},
        "loss": {"target": f"{home}:loss"},
        "precision": {"loss_scale": {"init": 1024.0}},
        "train": {"steps": 3},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return bisect_run(load_config(path), strategy=strategy)


def _is_exact(record: Record, search: Search, planted: list[int]) -> bool:
    return search.minimal and [pin.name for pin in record.pins] == [name_of(culprit) for culprit in planted]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--modules", type=int, nargs="+", default=[50, 500, 2000], help="sizes of the model")
    parser.add_argument("--culprits", type=int, nargs="+", default=[1, 2, 4, 8], help="how many are planted")
    parser.add_argument("--strategy", nargs="+", choices=list(ALLOWED), default=list(ALLOWED))
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Prints a line for each search and writes the figures."""
    options = parse(arguments)
    rows: list[Row] = []
    with threads(options.threads):
        print(machine())
        print("search   modules culprits trials allowed  wall s exact")
        for strategy in options.strategy:
            for modules in options.modules:
                for culprits in options.culprits:
                    rows.append(measured(strategy, modules, culprits))
                    print(rows[-1].line(), flush=True)
        if options.json:
            figures = {"machine": machine(), "results": [asdict(row) for row in rows]}
            options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

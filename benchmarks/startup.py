"""How long the program takes to answer without a workload: ``ampdbg --help`` against a bare start of Python.

Each command is timed as a whole process, in turn with the bare start; what counts is the median of the differences of
neighbours. The target stands beside it; nothing is asserted.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

TARGET = 0.3
"""Seconds for the whole process of ``ampdbg --help``."""

COMMANDS = {
    "ampdbg --help": ("-m", "ampdbg", "--help"),
    "ampdbg explain": ("-m", "ampdbg", "explain", "forward-overflow"),
    "import ampdbg": ("-c", "import ampdbg"),
}
BARE = ("-c", "pass")


def seconds(arguments: tuple[str, ...]) -> float:
    """The time of one process."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main(arguments: list[str] | None = None) -> None:
    """Prints one row a command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args(arguments).rounds
    print(f"{'command':20} {'seconds':>8} {'bare Python':>12} {'difference':>11} {'target':>7}")
    for name, command in COMMANDS.items():
        pairs = [(seconds(command), seconds(BARE)) for _ in range(rounds)]
        whole, bare = (statistics.median(times) for times in zip(*pairs, strict=True))
        difference = statistics.median(one - other for one, other in pairs)
        print(f"{name:20} {whole:8.3f} {bare:12.3f} {difference:11.3f} {TARGET:7}")


if __name__ == "__main__":
    main()

"""Tasks that replace the experiments in the process of a proof: they end in each way that user code may end."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ampdbg.observer import Observer
from ampdbg.proof.processes import Deliver


@dataclass(frozen=True)
class Light:
    """A result that replaces that of an experiment, which imports torch."""

    name: str = ""
    losses: tuple[float, ...] = ()


def reports_two_stages(seen: object, observer: Observer, deliver: Deliver, folder: Path) -> None:
    deliver(seen)
    observer.stage("one")
    os.write(1, b"what a user prints")
    observer.stage("two")


def exits(seen: object, observer: Observer, deliver: Deliver, folder: Path) -> None:
    os._exit(3)


def exits_with_a_message(seen: object, observer: Observer, deliver: Deliver, folder: Path) -> None:
    sys.exit("no more memory")


def reads_stdin(seen: object, observer: Observer, deliver: Deliver, folder: Path) -> None:
    input()


def crashes(seen: object, observer: Observer, deliver: Deliver, folder: Path) -> None:
    os.abort()


def does_not_end(seen: object, observer: Observer, deliver: Deliver, folder: Path) -> None:
    deliver(seen)
    os.close(sys.stdout.fileno())
    vars(observer)["stage"].__closure__[1].cell_contents.close()
    time.sleep(60)


def starts_a_worker(seen: object, observer: Observer, deliver: Deliver, folder: Path) -> None:
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    observer.stage(f"{os.getpid()} {worker.pid}")
    time.sleep(60)


def forks_a_worker(seen: object, observer: Observer, deliver: Deliver, folder: Path) -> None:
    deliver(seen)
    if (pid := os.fork()) == 0:
        time.sleep(20)
        os._exit(0)
    observer.stage(str(pid))

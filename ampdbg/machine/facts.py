"""What a machine has for mixed precision: GPUs, driver, compiler, torch and frameworks; none of it is imported here.

torch answers in a process of its own, and the driver by its tool: an import may raise or crash, a call hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib import metadata, util
from pathlib import Path
from typing import Any

IMPORT_LIMIT = 90.0
"""Seconds for torch: its first import from a slow disk takes half of that."""

TOOL_LIMIT = 10.0
"""Seconds for the tools of NVIDIA's, asked at once: where no daemon keeps the GPUs awake, nvidia-smi wakes each."""

ASK_TORCH = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from ampdbg.environment import answer; answer()"
)


@dataclass(frozen=True)
class Gpu:
    """``capability`` is NVIDIA's compute capability, (major, minor); None where it is not known."""

    name: str
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Driver:
    """What nvidia-smi says, or its ``problem``. ``cuda`` is the newest CUDA that the driver serves."""

    version: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class InstalledTorch:
    """``version`` is the package's, "" where there is none; ``problem`` is why not all questions were answered.

    The rest are the answers to the questions of :mod:`ampdbg.environment`, and what each of them raised.
    """

    version: str = ""
    problem: str = ""
    problems: Mapping[str, str] = field(default_factory=dict)
    imported: str = ""
    cuda: str | None = None
    hip: str | None = None
    flags: Mapping[str, bool] = field(default_factory=dict)
    attention: Sequence[str] = ()
    op_lists: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    has_mps: bool = False
    gpus: tuple[Gpu, ...] = ()
    kernels: Sequence[str] = ()
    device: str = ""


@dataclass(frozen=True)
class Machine:
    """``visible`` is CUDA_VISIBLE_DEVICES; ``nvcc`` the version of its CUDA, or else its problem. Each framework has
    its version, and what it does with fp16 on a CPU and on a GPU, "" where that was not found in its source."""

    torch: InstalledTorch
    driver: Driver = Driver()
    nvcc: str = ""
    nvcc_problem: str = ""
    visible: str | None = None
    frameworks: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)


def this_machine() -> Machine:
    """Asks torch, the driver, the compiler and the installed packages, all at once; takes three seconds.

    It takes at most ten where a tool hangs, and a minute and a half where torch does.
    """
    with ThreadPoolExecutor() as pool:
        torch, driver = pool.submit(_torch), pool.submit(_driver)
        cuda, nvcc = pool.submit(_cuda_of_driver), pool.submit(_nvcc)
        frameworks = dict(_frameworks())
    served = driver.result() if driver.result().problem else replace(driver.result(), cuda=cuda.result())
    return Machine(torch.result(), served, *nvcc.result(), os.environ.get("CUDA_VISIBLE_DEVICES"), frameworks)


def output_of(command: Sequence[str], limit: float) -> tuple[str, str]:
    """What a program writes to stdout within ``limit`` seconds, and why it failed or ""."""
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        return "", f"cannot be started: {error.strerror or error}"
    assert child.stdout is not None
    assert child.stderr is not None
    with child.stdout, child.stderr:
        try:
            output, errors = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            child.kill()
            try:
                output, _ = child.communicate(timeout=1)
            except subprocess.TimeoutExpired as late:  # what hangs inside of a driver cannot be ended
                output = late.output or b""
            return output.decode(errors="replace"), f"no answer within {limit:g} s"
    text, said = output.decode(errors="replace"), errors.decode(errors="replace")
    if child.returncode == 0:
        return text, ""
    if child.returncode < 0:
        return text, f"ended by a signal: {signal.strsignal(-child.returncode)}"
    lines = [line.strip() for line in (said or text).splitlines() if line.strip()]
    is_python = any(line.startswith("Traceback") for line in lines)  # which says last what it is about
    return text, [*lines, f"ended with exit code {child.returncode}"][len(lines) - 1 if is_python else 0]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except Exception:  # noqa: BLE001 - it is not installed, or its metadata is damaged
        return None


def _folders(package: str) -> list[Path]:
    """Where a package is found; it is not imported."""
    try:
        spec = util.find_spec(package)
    except Exception:  # noqa: BLE001 - finders are anybody's code
        return []
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]


def _torch() -> InstalledTorch:
    version = _version("torch") or ("of unknown version" if _folders("torch") else "")
    if not version:
        return InstalledTorch()
    text, problem = output_of([sys.executable, "-c", ASK_TORCH, json.dumps(sys.path)], IMPORT_LIMIT)
    said: dict[str, Any] = {"problems": {}}
    for line in text.splitlines():
        # What is no answer was printed by a package that torch imports, or is cut off.
        with contextlib.suppress(ValueError, TypeError, KeyError):
            name, answer, raised = json.loads(line)["ampdbg"]
            said |= {} if answer is None else {name: answer}
            said["problems"] |= {name: raised} if raised else {}
    if "imported" not in said:
        problem = problem or "its import ended the process, with exit code 0"
    said["gpus"] = tuple(_gpu(name, capability) for name, capability in said.get("gpus", ()))
    return InstalledTorch(version=version, problem=problem, **said)


def _gpu(name: str, capability: Sequence[int]) -> Gpu:
    return Gpu(name, (capability[0], capability[1]) if len(capability) == 2 else None)


def _driver() -> Driver:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return Driver()
    text = problem = fields = ""
    # A driver from before 2021 does not know compute_cap.
    for fields in ("driver_version,name,compute_cap", "driver_version,name"):
        text, problem = output_of([smi, f"--query-gpu={fields}", "--format=csv,noheader"], TOOL_LIMIT)
        if "compute_cap" not in problem:
            break
    if problem:
        return Driver(problem=problem)
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == len(fields.split(",")) and re.fullmatch(r"\d[\d.]*", row[0])]
    if not rows and text.strip() and "No devices" not in text:
        return Driver(problem="its answer is no list of GPUs")
    gpus = tuple(_gpu(name, [*map(int, re.findall(r"\d+", "".join(cap)))]) for _, name, *cap in rows)
    return Driver(rows[0][0] if rows else "", gpus=gpus)


def _cuda_of_driver() -> str:
    """The newest CUDA that it serves; CUDA 13's calls it the version of the user-mode driver: CUDA UMD Version."""
    smi = shutil.which("nvidia-smi")
    found = re.search(r"CUDA (?:UMD )?Version:\s*(\d[\d.]*)", output_of([smi], TOOL_LIMIT)[0] if smi else "")
    return found[1] if found else ""


def _nvcc() -> tuple[str, str]:
    """The CUDA version of the compiler that torch would compile extensions with, and its problem."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=str(Path(home, "bin")) if home else None)
    text, problem = output_of([nvcc, "--version"], TOOL_LIMIT) if nvcc else ("", "")
    found = re.search(r"release (\d[\d.]*)", text)
    return found[1] if found else "", problem


SCALED = "fp16 is autocast with a GradScaler"
DROPPED = "fp16 is dropped silently: it trains in FP32"
TO_BFLOAT16 = "16-mixed becomes bf16-mixed, with a warning"

LIGHTNING = ("AMP with fp16 is not supported on", TO_BFLOAT16, SCALED)
TO_ACCELERATE = "its Trainer leaves fp16 to accelerate"

SOURCES: Mapping[str, tuple[str, str, str, str]] = {
    "accelerate": (
        "accelerate/accelerator.py",
        r'mixed_precision == "fp16"\s+and self\.device\.type != "cpu"',
        DROPPED,
        SCALED,
    ),
    "transformers": (
        "transformers/training_args.py",
        r'mixed_precision(_dtype)? = "fp16"',
        TO_ACCELERATE,
        TO_ACCELERATE,
    ),
    "lightning": ("lightning/pytorch/trainer/connectors/accelerator_connector.py", *LIGHTNING),
    "lightning.fabric": ("lightning/fabric/connector.py", *LIGHTNING),
    "pytorch_lightning": ("pytorch_lightning/trainer/connectors/accelerator_connector.py", *LIGHTNING),
    "lightning_fabric": ("lightning_fabric/connector.py", *LIGHTNING),
}
"""By framework: a file of its package, the passage there that decides what becomes of fp16, and what that does on a
CPU and on a GPU. A release without the passage does something that nobody has looked at."""


def _frameworks() -> Iterator[tuple[str, tuple[str, str, str]]]:
    for name, (file, passage, *does) in SOURCES.items():
        package, _, inner = file.partition("/")
        version, files = _version(package), [folder / inner for folder in _folders(package)]
        if version:
            texts = [file.read_text("utf-8", "replace") for file in files if file.is_file()]
            on_cpu, on_gpu = does if any(re.search(passage, text) for text in texts) else ("", "")
            yield name, (version, on_cpu, on_gpu)

"""Facts about a machine's mixed precision support: GPUs, driver, compiler, torch and frameworks.

torch is queried in a child process and the driver by nvidia-smi: an import may crash, and a call may hang.
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
"""The time limit for importing torch, in seconds. A first import from a slow disk takes about half of it."""

TOOL_LIMIT = 10.0
"""The time limit for NVIDIA's tools, in seconds. Without the persistence daemon, nvidia-smi wakes each GPU first."""

ASK_TORCH = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from ampdbg.environment import main; main()"


@dataclass(frozen=True)
class Gpu:
    """A GPU; ``capability`` is NVIDIA's compute capability as (major, minor), or None if unknown."""

    name: str
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Driver:
    """The answers of nvidia-smi, or its ``problem``. ``cuda`` is the newest CUDA version that the driver supports."""

    version: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class InstalledTorch:
    """The installed torch package and its answers to the questions of :mod:`ampdbg.environment`.

    ``version`` is "" if there is none. ``problem`` is why questions are unanswered, and ``problems`` are their errors.
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
    """Facts about a machine. ``visible`` is CUDA_VISIBLE_DEVICES, and ``nvcc`` is nvcc's CUDA version. Each framework
    has its version and its fp16 behavior on a CPU and on a GPU ("" if unknown)."""

    torch: InstalledTorch
    driver: Driver = Driver()
    nvcc: str = ""
    nvcc_problem: str = ""
    visible: str | None = None
    frameworks: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)


def this_machine() -> Machine:
    """Query torch, the driver, the compiler and the installed packages concurrently, in about three seconds.

    It takes up to 10 s if a tool hangs, and up to 90 s if torch does.
    """
    with ThreadPoolExecutor() as pool:
        torch, driver = pool.submit(_torch), pool.submit(_driver)
        cuda, nvcc = pool.submit(_cuda_of_driver), pool.submit(_nvcc)
        frameworks = dict(_frameworks())
    served = driver.result() if driver.result().problem else replace(driver.result(), cuda=cuda.result())
    return Machine(torch.result(), served, *nvcc.result(), os.environ.get("CUDA_VISIBLE_DEVICES"), frameworks)


def output_of(command: Sequence[str], limit: float) -> tuple[str, str]:
    """Return a program's stdout within ``limit`` seconds, and the reason for a failure or ""."""
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
            except subprocess.TimeoutExpired as late:  # a process that hangs inside a driver cannot be killed
                output = late.output or b""
            return output.decode(errors="replace"), f"no answer within {limit:g} s"
    text, said = output.decode(errors="replace"), errors.decode(errors="replace")
    if child.returncode == 0:
        return text, ""
    if child.returncode < 0:
        return text, f"ended by a signal: {signal.strsignal(-child.returncode)}"
    lines = [line.strip() for line in (said or text).splitlines() if line.strip()]
    is_python = any(line.startswith("Traceback") for line in lines)  # Python names the error in the last line
    return text, [*lines, f"ended with exit code {child.returncode}"][len(lines) - 1 if is_python else 0]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except Exception:  # noqa: BLE001 - not installed, or damaged metadata
        return None


def _folders(package: str) -> list[Path]:
    """Return a package's folders without importing it."""
    try:
        spec = util.find_spec(package)
    except Exception:  # noqa: BLE001 - third-party finders may raise anything
        return []
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]


def _torch() -> InstalledTorch:
    version = _version("torch") or ("of unknown version" if _folders("torch") else "")
    if not version:
        return InstalledTorch()
    text, problem = output_of([sys.executable, "-c", ASK_TORCH, json.dumps(sys.path)], IMPORT_LIMIT)
    said: dict[str, Any] = {"problems": {}}
    for line in text.splitlines():
        # Other lines come from packages that torch imports, or are cut off.
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
    # Drivers before 2021 do not support compute_cap.
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
    """Return the newest CUDA version that the driver supports. CUDA 13 prints it as "CUDA UMD Version"."""
    smi = shutil.which("nvidia-smi")
    found = re.search(r"CUDA (?:UMD )?Version:\s*(\d[\d.]*)", output_of([smi], TOOL_LIMIT)[0] if smi else "")
    return found[1] if found else ""


def _nvcc() -> tuple[str, str]:
    """Return the CUDA version of the compiler that torch uses for extensions, and the compiler's problem."""
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
"""By framework: a source file, a pattern that decides the fate of fp16, and its effects on a CPU and a GPU. Without the
pattern, a release's behavior is unknown."""


def _frameworks() -> Iterator[tuple[str, tuple[str, str, str]]]:
    for name, (file, passage, *does) in SOURCES.items():
        package, _, inner = file.partition("/")
        version, files = _version(package), [folder / inner for folder in _folders(package)]
        if version:
            texts = [file.read_text("utf-8", "replace") for file in files if file.is_file()]
            on_cpu, on_gpu = does if any(re.search(passage, text) for text in texts) else ("", "")
            yield name, (version, on_cpu, on_gpu)

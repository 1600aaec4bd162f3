"""Makes .venv: torch, as a CPU build where there is no GPU, then ampdbg with what its tests need.

Every make target runs it first; it does nothing when .venv is up to date. Standard library only. Annotations are
quoted so that a Python too old for ampdbg can still read this file down to the line that says so.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / "ampdbg-setup"
CONSTRAINTS = VENV / "ampdbg-constraints.txt"

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 6)
TORCH = "torch>=2.6"
OVERRIDE = "AMPDBG_TORCH"


class SetupError(Exception):
    """The set-up cannot go on; the message says why and what to type."""


def main() -> int:
    """Brings .venv up to date. Returns 0, or 2 after printing one message."""
    try:
        refuse_old_python(sys.version_info[:2])
        key = setup_key()
        if not is_up_to_date(key):
            set_up()
            STAMP.write_text(key, encoding="utf-8")
    except SetupError as error:
        print(f"ampdbg set-up: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ampdbg set-up: interrupted; the next make continues from here", file=sys.stderr)
        return 130
    return 0


def refuse_old_python(version: "tuple[int, ...]") -> None:
    """Raises SetupError for a Python that ampdbg does not run on."""
    if version < OLDEST_PYTHON:
        given, allowed = (".".join(map(str, numbers)) for numbers in (version, OLDEST_PYTHON))
        raise SetupError(
            f"{sys.executable} is Python {given}; ampdbg needs {allowed} or newer. "
            "Name a newer one: make PYTHON=python3.12 test"
        )


def setup_key() -> str:
    """What .venv was made from: it is out of date when any of this has changed."""
    parts = [sys.version, str(ROOT), os.environ.get(OVERRIDE, "")]
    parts += [path.read_text(encoding="utf-8") for path in (ROOT / "pyproject.toml", Path(__file__))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def is_up_to_date(key: str) -> bool:
    """Whether .venv was made from what ``key`` stands for."""
    return PYTHON.exists() and STAMP.is_file() and STAMP.read_text(encoding="utf-8") == key


def set_up() -> None:
    """Makes what is missing; each part is skipped where it is there already."""
    STAMP.unlink(missing_ok=True)
    if not has_working_venv():
        make_venv()
    install_torch()
    install_project()
    say("ready\n")


def has_working_venv() -> bool:
    """Whether .venv runs this same Python and has pip: an interrupted or moved one may not."""
    if not PYTHON.exists():
        return False
    answer = quiet([str(PYTHON), "-c", "import pip, sys; print(sys.version)"])
    return answer is not None and answer.strip() == sys.version.strip()


def make_venv() -> None:
    """Creates .venv.

    Raises:
        SetupError: this Python's venv module was split off, as Debian and Ubuntu do.
    """
    if any(importlib.util.find_spec(module) is None for module in ("venv", "ensurepip")):
        version = ".".join(map(str, sys.version_info[:2]))
        raise SetupError(
            f"{sys.executable} cannot make virtual environments: its venv module is packaged apart. "
            f"On Debian and Ubuntu type: sudo apt install python{version}-venv, and then the same make again"
        )
    say("making .venv (once; about two minutes in all)")
    run([sys.executable, "-m", "venv", "--clear", str(VENV)], "no virtual environment could be made in .venv")


def install_torch() -> None:
    """Installs torch unless a fitting one is there, and writes the constraint that keeps it.

    On Linux the package index serves torch built for CUDA, gigabytes with what it depends on: right
    where there is an NVIDIA GPU, never wanted elsewhere.

    Raises:
        SetupError: no torch of the right build could be installed.
    """
    override = os.environ.get(OVERRIDE, "")
    gpu = has_nvidia_gpu()
    if override:
        # The user knows better: any requirement or wheel that pip understands.
        say(f"installing {override}, as {OVERRIDE} says")
        run(pip("install", override), f"pip could not install {override}, which {OVERRIDE} asks for")
    elif is_fitting(installed_torch(), gpu):
        pass
    elif gpu or not sys.platform.startswith("linux"):
        # macOS and Windows get CPU builds from the index; a machine with a GPU wants CUDA.
        say("installing torch" + (" for this machine's NVIDIA GPU (gigabytes)" if gpu else ""))
        run(pip("install", TORCH), f"pip could not install {TORCH}")
    else:
        install_cpu_torch()
    found = installed_torch()
    if found is None or not (override or is_fitting(found, gpu)):
        raise SetupError(f"torch was installed, but {describe(found)}. {no_torch_advice()}")
    CONSTRAINTS.write_text(f"torch=={found[0]}\n", encoding="utf-8")


def install_cpu_torch() -> None:
    """Installs torch's CPU build on Linux from wherever one can be had; never falls back to a CUDA build.

    Raises:
        SetupError: there is none to be had.
    """
    # Where pip is configured with a source of CPU builds, their versions end in "+cpu": a pin no other build meets.
    version = newest_cpu_version(quiet([str(PYTHON), "-m", "pip", "index", "versions", "torch"]) or "")
    if version:
        say(f"installing torch {version} (about 200 MB)")
        run(pip("install", f"torch=={version}"), f"pip could not install torch=={version}")
        return
    # uv knows PyTorch's own index of CPU builds.
    say("installing torch's CPU build with uv (about 200 MB)")
    run(pip("install", "uv"), "pip could not install uv, which finds torch's CPU build. " + no_torch_advice())
    uv = [str(PYTHON), "-m", "uv", "pip", "install", "--quiet", "--python", str(PYTHON)]
    run([*uv, "--torch-backend", "cpu", TORCH], "uv found no CPU build of torch. " + no_torch_advice())


def newest_cpu_version(pip_index_output: str) -> str:
    """The newest CPU build that ``pip index versions torch`` lists (newest first) and ampdbg runs on, or ""."""
    _, _, listed = pip_index_output.partition("Available versions:")
    versions = [version.strip() for version in listed.split("\n")[0].split(",")]
    fitting = [v for v in versions if v.endswith("+cpu") and release(v) >= OLDEST_TORCH]
    return fitting[0] if fitting else ""


def installed_torch() -> "tuple[str, str] | None":
    """(version, CUDA or ROCm version or "") of the torch in .venv; None where it is missing or does not import."""
    # The package's own version: torch.__version__ says "+cu130" even where the package was served without that suffix.
    version_code = "from importlib.metadata import version; print(version('torch'), end='|'); "
    build_code = "import torch; print(torch.version.cuda or torch.version.hip or '')"
    answer = quiet([str(PYTHON), "-W", "ignore", "-c", version_code + build_code])
    if answer is None:
        return None
    version, _, cuda = answer.strip().partition("|")
    return version, cuda


def is_fitting(torch: "tuple[str, str] | None", gpu: bool) -> bool:
    """Whether ``torch`` (see installed_torch) is new enough, and no CUDA build on a machine without a GPU."""
    return torch is not None and release(torch[0]) >= OLDEST_TORCH and (gpu or not torch[1])


def release(version: str) -> "tuple[int, ...]":
    """(2, 13, 0) of "2.13.0+cpu"."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))


def describe(torch: "tuple[str, str] | None") -> str:
    """What is wrong with a torch that does not fit."""
    if torch is None:
        return "it cannot be imported"
    return f"it is torch {torch[0]}" + (f", built for CUDA {torch[1]}, and this machine has no GPU" if torch[1] else "")


def no_torch_advice() -> str:
    """What to type when no CPU build can be had."""
    return (
        "The CUDA build is not tried: it takes gigabytes, and there is no GPU here. "
        f"Name a CPU build yourself, as a pip requirement or a wheel's path: {OVERRIDE}=/path/to/torch.whl make test"
    )


def has_nvidia_gpu() -> bool:
    """Whether an NVIDIA GPU can be used here. A container may see the driver without any device: that is none."""
    if os.path.exists("/dev/nvidia0"):
        return True
    smi = shutil.which("nvidia-smi")
    return smi is not None and "GPU " in (quiet([smi, "-L"]) or "")


def install_project() -> None:
    """Installs ampdbg as editable with its test extra, beside the torch that is there."""
    say("installing ampdbg and what its tests need")
    what = "pip could not install ampdbg and what its tests need (see above); is there a network?"
    run(pip("install", "--constraint", str(CONSTRAINTS), "--editable", ".[test]"), what)


def pip(*arguments: str) -> "list[str]":
    """A call of .venv's pip that prints errors only."""
    return [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--quiet", "--quiet", *arguments]


def run(command: "list[str]", failure: str) -> None:
    """Runs a command; its errors go to the screen.

    Raises:
        SetupError: it failed; ``failure`` is the message.
    """
    # A machine-wide `pip install --user` default would fail inside a virtual environment.
    result = subprocess.run(command, cwd=ROOT, env={**os.environ, "PIP_USER": "0"}, check=False)
    if result.returncode:
        raise SetupError(failure)


def quiet(command: "list[str]") -> "str | None":
    """The command's standard output, or None where it failed or does not exist."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def say(message: str) -> None:
    """Prints one line about the step that begins."""
    print(f"ampdbg set-up: {message}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

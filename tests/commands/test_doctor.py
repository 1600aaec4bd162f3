"""``ampdbg doctor`` on this machine, on faked machines, and with a broken torch or driver."""

import json
import os
import stat
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from ampdbg import environment
from ampdbg.environment import QUESTIONS
from ampdbg.machine import facts
from ampdbg.machine.facts import Machine
from ampdbg.machine.judgments import judged
from tests.commands.program import ROOT, Here, Result, imported_by, start_fresh

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the tools are faked by shell scripts")

INSTALLED = metadata.version("torch")
"""Lacks the +cu126 of ``torch.__version__`` if the package came from PyPI."""

OLD = """#!/bin/sh
case "$1" in
  --query*) echo '470.256.02, NVIDIA GeForce GTX 1080, 6.1'; echo '470.256.02, NVIDIA GeForce GTX 1080, 6.1' ;;
  *) echo '| NVIDIA-SMI 470.256.02   Driver Version: 470.256.02   CUDA Version: 11.4     |' ;;
esac
"""
BROKEN = """#!/bin/sh
echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
exit 9
"""
HANGS = "#!/bin/sh\nexec sleep 600\n"

BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise {error}
sys.meta_path.insert(0, Blocked())
"""


def tool(folder: Path, name: str, script: str) -> str:
    """Writes a fake tool and returns the PATH that finds it first."""
    path = folder / "tools" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return f"{path.parent}{os.pathsep}{os.environ['PATH']}"


def with_sitecustomize(folder: Path, site: str) -> str:
    """Writes a sitecustomize and returns the PYTHONPATH that finds it."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(site)
    return os.pathsep.join([str(folder / "site"), str(ROOT)])


def page_text(result: Result, code: int = 0) -> str:
    """Asserts the exit code and an empty stderr; returns the page as one line."""
    assert (result.code, result.stderr) == (code, "")
    return " ".join(result.stdout.split())


def fake_torch_answers(monkeypatch: pytest.MonkeyPatch, *lines: Any, then: str = "") -> None:
    """Makes the process that imports torch print these answers."""
    printed = "".join(json.dumps({"ampdbg": line}) + "\n" for line in lines)
    program = f"import sys, time; sys.stdout.write({printed!r}); sys.stdout.flush(); {then}"
    monkeypatch.setattr(facts, "ASK_TORCH", program)


def with_tools(monkeypatch: pytest.MonkeyPatch, folder: Path, **scripts: str) -> None:
    """Puts these tools first on the PATH, lets torch import, and unsets the CUDA variables."""
    fake_torch_answers(monkeypatch, ["imported", "2.13.0", ""], ["device", "cpu", ""])
    for name, script in scripts.items():
        monkeypatch.setenv("PATH", tool(folder, name.replace("_", "-"), script))
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)


def test_doctor_json_has_facts_and_lines_and_its_process_does_not_import_torch(tmp_path: Path) -> None:
    result = start_fresh(tmp_path, "doctor", "--json", flags=("-X", "importtime"))
    data = json.loads(result.stdout)
    assert (data["format"], data["version"], result.code) == ("ampdbg.doctor", 1, 0)
    assert not imported_by(result) & {"torch", "ampdbg.environment"}
    seen = data["machine"]["torch"]
    assert (seen["imported"], seen["version"]) == (torch.__version__, INSTALLED)
    assert (seen["problem"], seen["problems"]) == ("", {})
    assert QUESTIONS.keys() < seen.keys()
    assert {"linear", "mm"} <= set(seen["op_lists"]["header"]["LOWER_PRECISION_FP"])
    assert "binary_cross_entropy" in seen["op_lists"]["table"]["BANNED"]
    assert [line["topic"] for line in data["lines"]][:2] == ["torch", "GPU"]


def test_a_driver_that_raises_is_reported_within_40_lines_of_80_columns(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # no nvidia-smi reports a GPU of this machine
    raised = "CUDA error: unknown error"
    fake_torch_answers(monkeypatch, ["imported", "2.13.0", ""], ["gpus", None, raised], ["device", None, raised])
    result = here("doctor")
    text = page_text(result)
    assert "? GPU CUDA error: unknown error" in text
    assert "✗ torch 2.13.0, built" in text
    assert "asked for its device: CUDA error: unknown error" in text
    assert "--device cpu needs no driver" in text
    lines = result.stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80


def test_an_old_gpu_is_judged_by_the_compute_capability_from_nvidia_smi(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_tools(monkeypatch, tmp_path, nvidia_smi=OLD)
    text = page_text(here("doctor"))
    assert "2 x NVIDIA GeForce GTX 1080 (compute capability 6.1)" in text
    assert "none: it starts at 7.0, this is 6.1; FP16 saves memory here, but hardly any time" in text
    assert "none: it starts at 8.0, this is 6.1" in text


def test_a_failing_nvidia_smi_reports_its_message(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_tools(monkeypatch, tmp_path, nvidia_smi=BROKEN)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "absent"))
    text = page_text(here("doctor"))
    assert "✗ GPU nvidia-smi: NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver." in text


MISSING = "ModuleNotFoundError(\"No module named 'torch'\", name='torch')"


def test_doctor_without_torch_exits_with_2_and_still_reports_the_gpu(tmp_path: Path) -> None:
    """The Python sees every package installed here except torch, and no metadata of torch."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for folder in filter(os.path.isdir, sys.path):
        for item in Path(folder).iterdir() if folder.endswith("site-packages") else ():
            if not item.name.startswith(("torch", "ampdbg", "__editable__")) and not (packages / item.name).exists():
                (packages / item.name).symlink_to(item)
    path = os.pathsep.join([str(packages), str(ROOT)])
    result = start_fresh(tmp_path, "doctor", flags=("-S",), PYTHONPATH=path, PATH=tool(tmp_path, "nvidia-smi", OLD))
    text = page_text(result, 2)
    assert text.startswith("✗ ampdbg cannot run on this machine. ✗ torch not installed; ampdbg needs it")
    assert "pip install torch" in text
    assert "GTX 1080" in text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MISSING, "ModuleNotFoundError: No module named 'torch'"),
        pytest.param('OSError("libcudart.so.13: missing")', "OSError: libcudart.so.13: m", marks=pytest.mark.slow),
        pytest.param("RuntimeError()", "RuntimeError", marks=pytest.mark.slow),
        ("__import__('os')._exit(0)", "its import ended the process, with exit code 0"),
        pytest.param("__import__('os')._exit(3)", "ended with exit code 3", marks=pytest.mark.slow),
    ],
)
def test_a_torch_that_cannot_be_imported_is_reported_with_the_reason(error: str, said: str, tmp_path: Path) -> None:
    text = page_text(
        start_fresh(tmp_path, "doctor", PYTHONPATH=with_sitecustomize(tmp_path, BLOCKED.format(error=error))), 2
    )
    assert f"torch {INSTALLED} cannot be imported: {said}" in text


def test_a_torch_and_tools_that_hang_are_abandoned_after_their_time_limits(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", tool(tmp_path, "nvidia-smi", HANGS))
    monkeypatch.setenv("PYTHONPATH", with_sitecustomize(tmp_path, "import time; time.sleep(600)"))
    monkeypatch.setattr(facts, "TOOL_LIMIT", 0.2)
    monkeypatch.setattr(facts, "IMPORT_LIMIT", 0.3)
    tool(tmp_path, "nvcc", HANGS)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    text = page_text(here("doctor"), 2)
    assert f"torch {INSTALLED} cannot be imported: no answer within 0.3 s" in text
    assert "GPU nvidia-smi: no answer within 0.2 s" in text
    assert "nvcc no answer within 0.2 s" in text


REPLAY_SECONDS = """#!/bin/sh
touch "$(dirname "$0")/$$"
i=0
while [ $i -lt 100 ]; do
  set -- "$(dirname "$0")"/[0-9]*
  [ $# -ge 3 ] && echo 'release 13.0' && exit 0
  sleep 0.1; i=$((i + 1))
done
exit 1
"""
"""A tool that answers only once three copies run at the same time."""


def test_doctor_runs_the_tools_in_parallel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_tools(monkeypatch, tmp_path, nvidia_smi=REPLAY_SECONDS, nvcc=REPLAY_SECONDS)
    assert facts.this_machine().nvcc == "13.0"


CSV = "535.104.05, NVIDIA H100 80GB HBM3, 9.0"


@pytest.mark.parametrize(
    ("printed", "gpus", "problem"),
    [
        (CSV, [("NVIDIA H100 80GB HBM3", (9, 0))], ""),
        ("470.1, Tesla K80, [N/A]", [("Tesla K80", None)], ""),
        (f"warning: a, b\n{CSV}\n,,\n", [("NVIDIA H100 80GB HBM3", (9, 0))], ""),
        ("NVIDIA H100, 9.9, 80000 MiB, 999.99\n,,,,\na, b", [], "its answer is no list of GPUs"),
        ("\\377\\001,\\020\\021,\\033[31m\n1,\\002", [], "its answer is no list of GPUs"),
        ("No devices were found", [], ""),
        ("", [], ""),
    ],
)
def test_only_nvidia_smi_lines_with_the_requested_columns_are_gpus(
    printed: str, gpus: list[Any], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_tools(monkeypatch, tmp_path, nvidia_smi=f"#!/bin/sh\nprintf '{printed}'\n")
    driver = facts.this_machine().driver
    assert ([(gpu.name, gpu.capability) for gpu in driver.gpus], driver.problem) == (gpus, problem)


def test_answers_given_before_a_driver_hangs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[Any] = [
        ["imported", "2.13.0", ""],
        ["cuda", "13.0", ""],
        ["hip", None, ""],
        ["flags", {"cudnn.allow_tf32": True}, ""],
    ]
    fake_torch_answers(
        monkeypatch, *lines, then='sys.stdout.write(\'{"ampdbg": ["gp\'); sys.stdout.flush(); time.sleep(600)'
    )
    monkeypatch.setattr(facts, "IMPORT_LIMIT", 1.0)
    seen = facts.this_machine().torch
    assert (seen.cuda, seen.flags, seen.device) == ("13.0", {"cudnn.allow_tf32": True}, "")
    assert (seen.imported, seen.problem) == ("2.13.0", "no answer within 1 s")
    assert "asked for its device: no answer within 1 s" in {j.topic: j.says for j in judged(Machine(seen))}["torch"]


def test_each_question_returns_its_answer_and_its_warning_or_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def warns() -> int:
        warnings.warn("the driver is too old\nupdate it", stacklevel=1)
        return 1

    def raises() -> int:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(environment, "QUESTIONS", {"a": warns, "b": raises, "c": lambda: 3})
    environment.main()
    said = [json.loads(line)["ampdbg"] for line in capsys.readouterr().out.splitlines()]
    assert said == [
        ["a", 1, "the driver is too old"],
        ["b", None, "Torch not compiled with CUDA enabled"],
        ["c", 3, ""],
    ]

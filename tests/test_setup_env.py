"""Tests that the set-up installs no CUDA packages on a machine without a GPU, and works only once."""

import ast
from pathlib import Path

import pytest

from scripts import setup_env

ROOT = Path(__file__).parent.parent
LISTED = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.14.0, 2.13.0+cpu, 2.13.0, 2.12.0+cpu\n  INSTALLED: 2.1\n"
CPU, CUDA = ("2.13.0+cpu", ""), ("2.13.0", "13.0")


class Machine:
    """A machine that only records the commands; ``torch`` is the version after a successful install."""

    def __init__(self, *, listed: str = LISTED, torch: tuple[str, str] = CPU, failing: str = "\0") -> None:
        self.listed, self.torch, self.failing = listed, torch, failing
        self.commands: list[str] = []
        self.installed: tuple[str, str] | None = None

    def run(self, command: list[str], failure: str) -> None:
        self.commands.append(" ".join(command[1:]))
        if self.failing in self.commands[-1]:
            raise setup_env.SetupError(failure)
        self.installed = self.torch

    def quiet(self, command: list[str]) -> str:
        return self.listed

    def requirements(self) -> list[str]:
        """The last word of each command, which is the installed package."""
        return [command.split()[-1] for command in self.commands]


def install_torch_on(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, folder: Path, *, gpu: bool = False, platform: str = "linux"
) -> None:
    monkeypatch.setattr(setup_env, "run", machine.run)
    monkeypatch.setattr(setup_env, "quiet", machine.quiet)
    monkeypatch.setattr(setup_env, "installed_torch", lambda: machine.installed)
    monkeypatch.setattr(setup_env, "has_nvidia_gpu", lambda: gpu)
    monkeypatch.setattr(setup_env, "CONSTRAINTS", folder / "constraints.txt")
    monkeypatch.setattr("sys.platform", platform)
    setup_env.install_torch()


@pytest.fixture(autouse=True)
def _no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(setup_env.OVERRIDE, raising=False)


def test_a_cpu_build_that_pip_lists_is_pinned_by_its_suffix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_torch_on(machine := Machine(), monkeypatch, tmp_path)
    assert machine.requirements() == ["torch==2.13.0+cpu"]
    assert (tmp_path / "constraints.txt").read_text() == "torch==2.13.0+cpu\n"


def test_uv_fetches_the_cpu_build_if_pip_lists_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_torch_on(machine := Machine(listed="Available versions: 2.15.0"), monkeypatch, tmp_path)
    assert machine.requirements() == ["uv", "torch>=2.6"]
    assert "--torch-backend cpu" in machine.commands[-1]


def test_the_set_up_stops_with_a_hint_if_no_cpu_build_exists(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Machine(listed="", failing="--torch-backend")
    with pytest.raises(setup_env.SetupError, match=r"AMPDBG_TORCH=.* make test"):
        install_torch_on(machine, monkeypatch, tmp_path)
    assert not any("pip" in command and "uv" not in command for command in machine.commands)


def test_a_cuda_build_is_refused_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(setup_env.SetupError, match=r"built for CUDA 13\.0, and this machine has no GPU"):
        install_torch_on(Machine(torch=CUDA), monkeypatch, tmp_path)


@pytest.mark.parametrize(("gpu", "platform"), [(True, "linux"), (False, "darwin"), (False, "win32")])
def test_the_default_build_is_installed_with_a_gpu_and_on_macos_and_windows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpu: bool, platform: str
) -> None:
    machine = Machine(torch=CUDA if gpu else ("2.13.0", ""))
    install_torch_on(machine, monkeypatch, tmp_path, gpu=gpu, platform=platform)
    assert machine.requirements() == ["torch>=2.6"]


def test_an_installed_torch_that_fits_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Machine()
    machine.installed = CPU
    install_torch_on(machine, monkeypatch, tmp_path)
    assert machine.commands == []


def test_the_user_can_override_the_version_of_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(setup_env.OVERRIDE, "wheels/torch.whl")
    machine = Machine(torch=CUDA)
    machine.installed = CPU
    install_torch_on(machine, monkeypatch, tmp_path)
    assert machine.requirements() == ["wheels/torch.whl"]


@pytest.mark.parametrize(
    ("output", "version"),
    [
        (LISTED, "2.13.0+cpu"),
        ("Available versions: 2.6.0+cpu", "2.6.0+cpu"),
        ("Available versions: 2.5.1+cpu, 2.13.0+cu130", ""),
        ("ERROR: no such option", ""),
        ("", ""),
    ],
)
def test_the_newest_supported_cpu_version_is_chosen(output: str, version: str) -> None:
    assert setup_env.newest_cpu_version(output) == version


@pytest.mark.parametrize(
    ("torch", "gpu", "fits"),
    [
        (None, False, False),
        (CPU, False, True),
        (CPU, True, True),
        (CUDA, True, True),
        (CUDA, False, False),
        (("2.5.1", ""), False, False),
        (("2.10.0", ""), False, True),
    ],
)
def test_old_torch_or_cuda_without_a_gpu_does_not_fit(torch: tuple[str, str] | None, gpu: bool, fits: bool) -> None:
    assert setup_env.is_fitting(torch, gpu) is fits


@pytest.mark.parametrize(
    ("devices", "smi", "answer", "gpu"),
    [
        ({"/dev/nvidia0"}, None, None, True),
        (set(), "/usr/bin/nvidia-smi", "GPU 0: NVIDIA H100\n", True),
        (set(), "/usr/bin/nvidia-smi", None, False),  # the driver does not answer
        ({"/proc/driver/nvidia"}, None, None, False),  # a container without a device
    ],
)
def test_only_a_usable_gpu_counts(
    monkeypatch: pytest.MonkeyPatch, devices: set[str], smi: str | None, answer: str | None, gpu: bool
) -> None:
    monkeypatch.setattr("os.path.exists", devices.__contains__)
    monkeypatch.setattr("shutil.which", lambda name: smi)
    monkeypatch.setattr(setup_env, "quiet", lambda command: answer)
    assert setup_env.has_nvidia_gpu() is gpu


def test_a_missing_venv_module_gives_the_apt_command_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ensurepip" else object())
    with pytest.raises(setup_env.SetupError, match=r"sudo apt install python3\.\d+-venv"):
        setup_env.make_venv()


def test_an_old_python_is_refused_and_can_parse_the_script() -> None:
    with pytest.raises(setup_env.SetupError, match=r"is Python 3\.9; ampdbg needs 3\.10 or newer"):
        setup_env.refuse_old_python((3, 9))
    source = Path(setup_env.__file__).read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 6))
    assert "from __future__" not in source  # Python 3.6 has no annotations feature and would stop there


def test_the_set_up_runs_once_until_the_override_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs: list[str] = []
    monkeypatch.setattr(setup_env, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(setup_env, "PYTHON", tmp_path)
    monkeypatch.setattr(setup_env, "set_up", lambda: runs.append("set up"))
    assert (setup_env.main(), setup_env.main()) == (0, 0)
    assert runs == ["set up"]
    monkeypatch.setenv(setup_env.OVERRIDE, "torch==2.7.0+cpu")
    assert setup_env.main() == 0
    assert runs == ["set up", "set up"]


def test_a_failed_set_up_prints_one_message_and_is_not_marked_as_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise setup_env.SetupError("no network")

    monkeypatch.setattr(setup_env, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(setup_env, "set_up", fail)
    assert setup_env.main() == 2
    assert capsys.readouterr().err == "ampdbg set-up: no network\n"
    assert not (tmp_path / "stamp").exists()


def test_the_oldest_torch_is_the_one_in_the_project_file() -> None:
    assert f'"{setup_env.TORCH}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert setup_env.TORCH.endswith(".".join(map(str, setup_env.OLDEST_TORCH)))

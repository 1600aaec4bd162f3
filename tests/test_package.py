"""Tests of the published package: wheel and sdist build and pass the index's check, and the wheel runs by itself."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from ampdbg import __version__

ROOT = Path(__file__).parents[1]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs a program without this checkout on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, encoding="utf-8", check=False
    )


def test_replay_is_the_function_even_after_its_subpackage_was_imported() -> None:
    import ampdbg.api
    import ampdbg.replay.copies

    assert ampdbg.replay is ampdbg.api.replay


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a wheel and an sdist, built by the installed build backend, which needs no network."""
    folder = tmp_path_factory.mktemp("dist")
    built = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture
def installed(dist: Path, tmp_path: Path) -> Path:
    """The programs of an environment with only the wheel; its dependencies are those of this environment."""
    venv.create(tmp_path / "env", symlinks=os.name != "nt")
    programs = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")
    asked = run(programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    site = Path(asked.stdout.strip())
    [wheel] = dist.glob("*.whl")
    target = ("--python", str(programs / "python"), "install", "--no-deps", "--no-index", str(wheel))
    done = run(sys.executable, "-m", "pip", "--disable-pip-version-check", *target)
    assert done.returncode == 0, done.stderr
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return programs


def test_the_distributions_pass_twine_and_the_wheel_runs_without_a_checkout(
    dist: Path, installed: Path, tmp_path: Path
) -> None:
    checked = run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir())
    assert checked.returncode == 0, checked.stdout
    [wheel], [sdist] = dist.glob(f"ampdbg-{__version__}-*.whl"), dist.glob(f"ampdbg-{__version__}.tar.gz")
    assert "ampdbg/py.typed" in zipfile.ZipFile(wheel).namelist()
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "Makefile", "mkdocs.yml", "tests/test_package.py", "ampdbg/py.typed"} <= names

    (tmp_path / "work").mkdir()
    assert run(installed / "ampdbg", "init", cwd=tmp_path / "work").returncode == 0
    scanned = run(installed / "ampdbg", "scan", "--steps=3", cwd=tmp_path / "work")
    assert scanned.returncode == 0, scanned.stderr
    assert scanned.stdout.startswith("✓ Healthy")
    where = run(installed / "python", "-c", "import ampdbg; print(ampdbg.__file__)", cwd=tmp_path / "work").stdout
    assert Path(where.strip()).is_relative_to(tmp_path)


@pytest.mark.slow  # mypy reads torch
def test_mypy_sees_the_package_as_typed(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text("import ampdbg\nreveal_type(ampdbg.scan('run.yaml').verdict)\n", "utf-8")
    (tmp_path / "empty.ini").write_text("[mypy]\n", encoding="utf-8")
    options = ("--python-executable", str(installed / "python"), "--config-file", str(tmp_path / "empty.ini"))
    seen = run(sys.executable, "-m", "mypy", *options, tmp_path / "user.py", cwd=tmp_path)
    assert "import-untyped" not in seen.stdout
    assert "Literal['healthy']" in seen.stdout


def test_a_release_is_published_from_a_tag_only_after_its_tests_and_trial() -> None:
    jobs = WORKFLOW["jobs"]
    assert WORKFLOW[True]["push"] == {"tags": ["v*"]}  # YAML 1.1 reads `on` as true
    assert jobs["publish"]["needs"] == ["test", "try"]
    assert jobs["try"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert {"run": "make test"} in jobs["test"]["steps"]

"""What a script would remove of its temporary files at its end is gone when it was started again and ended midway."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.commands.program import start
from tests.script import scripts
from tests.script.test_captures import capture_of
from tests.script.test_run import run

AROUND_THE_LOOP = """
    import multiprocessing, os, shutil, tempfile
    folder, made, file = tempfile.TemporaryDirectory(), tempfile.mkdtemp(), tempfile.NamedTemporaryFile()
    for one in folder.name, made:
        open(os.path.join(one, "data"), "w").write("data")
    lock = multiprocessing.get_context("spawn").Lock()
    print("semaphore", lock._semlock.name, flush=True)
    cache = os.path.join(tempfile.gettempdir(), "cache")
    if os.path.exists(cache):
        print("cached", open(cache).read(), flush=True)
    if len(sys.argv) > 3:
        x = [torch.ones(3)] * 8
        loader = torch.utils.data.DataLoader(x, num_workers=1, multiprocessing_context="spawn", persistent_workers=True)
        print("loaded", len([*loader]), flush=True)
    main(float(sys.argv[1]), int(sys.argv[2]))
    shutil.rmtree(made)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script and its capture."""
    folder = tmp_path_factory.mktemp("temporaries")
    run(folder, scripts.PLAIN.partition("\n    main(")[0] + AROUND_THE_LOOP, "400", "6")
    return folder


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no TMPDIR, and no semaphores that stay")
@pytest.mark.parametrize("arguments", ["400 6", "400 6 loader"])
@pytest.mark.parametrize("command", ["replay", "suggest-fp32"])
def test_temporary_files_go_with_the_script(command: str, arguments: str, made: Path, tmp_path: Path) -> None:
    folder, temporary = tmp_path / "f", tmp_path / "t"
    shutil.copytree(made, folder)
    temporary.mkdir()
    for name in ("cache", "tmp0123"):
        (temporary / name).write_text("of before")
    result = start(folder, command, str(capture_of(folder)), f"--script=train.py {arguments}", TMPDIR=str(temporary))
    assert result.code == (command == "replay"), result.stderr
    assert "cached of before" in result.stderr
    assert ("loaded 8" in result.stderr) == arguments.endswith("loader")
    assert {path.name for path in temporary.iterdir()} - {"torchinductor_root"} == {"cache", "tmp0123"}
    names = re.findall(r"semaphore (\S+)", result.stderr)
    assert names
    assert not any(Path(f"/dev/shm/sem.{name[1:]}").exists() for name in names)

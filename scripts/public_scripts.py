"""Whether ``ampdbg run`` still does right by a public training script, as it stands in its repository.

    python scripts/public_scripts.py FOLDER                 # fetches nanoGPT from GitHub into FOLDER
    python scripts/public_scripts.py FOLDER --from CLONES   # CLONES/OWNER+NAME is a clone, bare or not

nanoGPT's ``train.py`` is run with ``--device=cuda --dtype=float16``, emulated where there is no GPU: unchanged, where
it is healthy and its losses are those that it has unwatched; and with attention scores that overflow planted in its
model, where the line is to be named, captured, replayed in another folder, and patched with a proof. Exit code 1 where
not.
"""

from __future__ import annotations

import argparse
import array
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = "karpathy/nanoGPT"

ARGUMENTS = (
    "--device=cuda --dtype=float16 --dataset=bytes --n_layer=2 --n_head=2 --n_embd=64 --block_size=64 --batch_size=8 "
    "--max_iters=12 --gradient_accumulation_steps=2 --eval_iters=1 --eval_interval=100 --log_interval=1 "
    "--compile=False --dropout=0.1"
).split()

HEALTHY = "att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))"
PLANTED = "att = ((q * 1e3) @ (k * 1e3).transpose(-2, -1)) * (1e-6 / math.sqrt(k.size(-1)))"
FLASH = "self.flash = hasattr(torch.nn.functional, 'scaled_dot_product_attention')"


def main() -> int:
    """Runs all of it in the folder of the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--from", dest="clones", type=Path, help="a folder of clones, named OWNER+NAME")
    options = parser.parse_args()
    own, planted, other = (_checkout(options, name) for name in ("healthy", "planted", "replayed"))
    for folder in (planted, other):
        model = folder / "model.py"
        text = model.read_text(encoding="utf-8")
        model.write_text(text.replace(HEALTHY, PLANTED).replace(FLASH, "self.flash = False"), encoding="utf-8")
    problems = [*_healthy(own), *_faulty(planted, other)]
    print("\n".join(problems) or "nanoGPT's train.py: as expected")
    return int(bool(problems))


def _checkout(options: argparse.Namespace, name: str) -> Path:
    source = f"https://github.com/{REPOSITORY}"
    if options.clones is not None:
        source = str(options.clones / REPOSITORY.replace("/", "+"))
    folder: Path = options.folder / name
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", source, str(folder)], check=True)
    data = folder / "data" / "bytes"
    data.mkdir()
    text = (folder / "README.md").read_bytes() * 20
    for file in ("train.bin", "val.bin"):
        (data / file).write_bytes(array.array("H", list(text)).tobytes())
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))
    return folder


def _ran(folder: Path, *arguments: str) -> tuple[int, str, str]:
    program = [sys.executable, "-m", "ampdbg", *arguments]
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True, encoding="utf-8", check=False)
    return done.returncode, done.stdout, done.stderr


def _losses(output: str) -> list[str]:
    """Every loss that the script prints, without the times beside it."""
    return [line.partition(", time")[0] for line in output.splitlines() if line.startswith(("iter ", "step "))]


def _healthy(folder: Path) -> list[str]:
    code, watched, errors = _ran(folder, "run", "--emulate", "--record=r.json", "train.py", *ARGUMENTS)
    _, alone, _ = _ran(folder, "run", "--emulate", "--no-watch", "train.py", *ARGUMENTS)
    if code != 0 or _record(folder / "r.json")["verdict"] != "healthy":
        return [f"unchanged: exit code {code}\n{errors}"]
    if not _losses(alone) or _losses(alone) != _losses(watched):
        return ["unchanged: its losses are others while it is watched"]
    return []


def _faulty(folder: Path, other: Path) -> list[str]:
    code, _, errors = _ran(folder, "run", "--emulate", "--record=r.json", "train.py", *ARGUMENTS)
    if code != 1 or not _names_it(_record(folder / "r.json")):
        return [f"planted: exit code {code}\n{errors}"]
    captures = sorted((folder / ".ampdbg" / "captures").iterdir())
    shutil.copy(captures[0], other / "step.safetensors")
    shutil.rmtree(folder)
    code, _, errors = _ran(other, "replay", "step.safetensors", "--record=r.json")
    if code != 1 or not _names_it(_record(other / "r.json")):
        return [f"replayed: exit code {code}\n{errors}"]
    code, patch, errors = _ran(other, "suggest-fp32", "step.safetensors", "--record=s.json")
    proof = _record(other / "s.json")["verification"] if code == 0 else None
    if not proof or not proof["passed"] or "+++ b/model.py" not in patch:
        return [f"patched: exit code {code}\n{errors}"]
    return []


def _names_it(record: dict[str, Any]) -> bool:
    if not record["findings"] or not record["findings"][0]["source"]:
        return False
    found = record["findings"][0]
    return bool(found["code"] == "forward-overflow" and found["source"]["text"] == PLANTED)


def _record(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


if __name__ == "__main__":
    sys.exit(main())

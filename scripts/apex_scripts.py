"""Public training scripts that use apex, before and after ``ampdbg lint --fix``: whether they train alike.

    python scripts/apex_scripts.py FOLDER                 # fetches from GitHub into FOLDER, then runs all
    python scripts/apex_scripts.py FOLDER --from CLONES   # CLONES/OWNER+NAME is a clone, bare or not

Every run is on a CPU under ``ampdbg run --emulate --no-watch``, and cut: few steps, synthetic data, and for tacotron2
narrow layers and stand-ins for librosa, tensorflow and its logger. Before the fix the stand-in for apex of
tests/lint/reference runs in its place, which is FP32 (apex's O0); after it, native AMP runs in FP16. What apex's own
maintainers made of their example is run beside ampdbg's fix of it. Needs torchvision, pillow and scipy.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GITHUB = "https://github.com"
LOSS = re.compile(r"(?:Loss|Train loss \d+|final loss = +tensor\() ?([\d.]+)")
LIMIT = 1800
FIRST_SCALE = 256.0
LEAST_NOISE = 0.01


@dataclass(frozen=True)
class Script:
    """One script: where it is from, and how it is started.

    ``beside`` are files of the repository that it needs, ``stubs`` what stands in for others.

    ``theirs`` is the commit in which its maintainers turned it to torch.amp themselves.
    """

    name: str
    repository: str
    commit: str
    path: str
    arguments: tuple[str, ...]
    theirs: str = ""
    beside: tuple[str, ...] = ()
    stubs: Mapping[str, str] = field(default_factory=dict)


TACOTRON_DATA = """
import torch

class TextMelLoader(torch.utils.data.Dataset):
    def __init__(self, files, hparams):
        made = torch.Generator().manual_seed(len(files))
        mels = hparams.n_mel_channels
        self.items = [(torch.randint(1, 60, (12,), generator=made), torch.randn(mels, 24, generator=made))
                      for _ in range(32)]

    def __getitem__(self, index):
        return self.items[index]

    def __len__(self):
        return len(self.items)

class TextMelCollate:
    def __init__(self, n_frames_per_step):
        pass

    def __call__(self, batch):
        text, mel = torch.stack([one[0] for one in batch]), torch.stack([one[1] for one in batch])
        gate = torch.zeros(len(batch), mel.size(2))
        gate[:, -1] = 1
        lengths = torch.full((len(batch),), text.size(1)), torch.full((len(batch),), mel.size(2))
        return text, lengths[0], mel, gate, lengths[1]
"""
TACOTRON_LOGGER = """
class Tacotron2Logger:
    def __init__(self, folder):
        pass

    def log_training(self, *given):
        pass

    def log_validation(self, *given):
        pass
"""
TENSORFLOW = """
import types

class HParams:
    def __init__(self, **given):
        vars(self).update(given)

    def parse(self, text):
        for name, _, value in (one.partition("=") for one in text.split(",")):
            old = getattr(self, name)
            setattr(self, name, value == "True" if isinstance(old, bool) else type(old)(value))

    def values(self):
        return vars(self)

contrib = types.SimpleNamespace(training=types.SimpleNamespace(HParams=HParams))
logging = types.SimpleNamespace(info=print)
"""
NARROW = (
    "batch_size=4,epochs=1,iters_per_checkpoint=1000000,symbols_embedding_dim=32,encoder_embedding_dim=32,"
    "attention_rnn_dim=32,decoder_rnn_dim=32,prenet_dim=32,attention_dim=16,postnet_embedding_dim=32,n_mel_channels=16"
)

SCRIPTS = (
    Script(
        "imagenet",
        "NVIDIA/apex",
        "c54dbd3a~1",
        "examples/imagenet/main_amp.py",
        ("DATA", "-a", "resnet18", "-b", "4", "-j", "0", "--epochs", "1", "--print-freq", "1", "--opt-level", "O1",
         "--deterministic"),
        theirs="c54dbd3a",
    ),
    Script(
        "distributed_data_parallel",
        "NVIDIA/apex",
        "c54dbd3a~1",
        "examples/simple/distributed/distributed_data_parallel.py",
        (),
    ),
    Script(
        "tacotron2",
        "NVIDIA/tacotron2",
        "HEAD",
        "train.py",
        ("-o", "out", "-l", "log", "--hparams", f"fp16_run=True,{NARROW}"),
        beside=("model.py", "layers.py", "utils.py", "loss_function.py", "distributed.py", "hparams.py", "stft.py",
                "audio_processing.py", "text"),
        stubs={
            "data_utils.py": TACOTRON_DATA,
            "logger.py": TACOTRON_LOGGER,
            "tensorflow.py": TENSORFLOW,
            "librosa/__init__.py": "",
            "librosa/filters.py": "mel = None\n",
            "librosa/util.py": "pad_center = tiny = normalize = None\n",
            "unidecode.py": "unidecode = str\n",
            "inflect.py": "def engine():\n    return None\n",
        },
    ),
)  # fmt: skip


def main() -> int:
    """Runs the scripts that were named; 1 where one trains otherwise than before."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="those alone")
    parser.add_argument("--from", dest="clones", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    wrong = 0
    for script in SCRIPTS:
        if not given.names or script.name in given.names:
            lines = list(compare(script, given.folder.resolve() / script.name, given.clones))
            wrong += any(line.startswith("  not ") for line in lines)
            print(f"{script.name}: {'no' if any(line.startswith('  not ') for line in lines) else 'yes'}")
            print("\n".join(lines), flush=True)
    return 1 if wrong else 0


def compare(script: Script, folder: Path, clones: Path | None) -> Iterator[str]:
    """Runs a script before and after, and says how far their losses are from each other."""
    shutil.rmtree(folder, ignore_errors=True)
    checkout = fetched(script, folder, clones)
    versions = {"before": script.commit, "after": script.commit} | ({"theirs": script.theirs} if script.theirs else {})
    losses: dict[str, list[float]] = {}
    for name, commit in versions.items():
        file = laid_out(script, checkout, commit, folder / name)
        if name == "after":
            said = ampdbg("lint", "--fix", str(file))
            yield f"  ampdbg lint --fix: {said.stdout.splitlines()[0] if said.stdout else said.stderr}"
        losses[name] = run(script, file, folder)
        if name == "before":
            losses["rounded"] = run(script, file, folder, ROUNDED="1")
    before, after = losses["before"], losses["after"]
    yield f"  FP32 before: {told(before)}"
    yield f"  FP16 after:  {told(after)}"
    noise, far = distance(before, losses["rounded"]), distance(before, after)
    is_near = far <= max(3 * noise, LEAST_NOISE)
    yield (
        f"  {'within' if is_near else 'not within'} noise: at most {far:.4f} apart; "
        f"FP32 from weights that are rounded to FP16 at first is {noise:.4f} from FP32"
    )
    if "theirs" in losses:
        same = losses["theirs"] == after
        yield f"  {'as' if same else 'not as'} its maintainers' own version trains: {told(losses['theirs'])}"


def distance(one: list[float], other: list[float]) -> float:
    """How far losses are from each other, at most; infinitely where one has fewer."""
    if len(one) != len(other) or not one:
        return float("inf")
    return max(abs(loss - its) for loss, its in zip(one, other, strict=True))


def told(losses: list[float]) -> str:
    """Losses in a line; of many the first and the last."""
    shown = [f"{loss:.4f}" for loss in losses]
    return " ".join(shown if len(shown) <= 10 else [*shown[:5], "...", *shown[-4:]]) or "none"


def fetched(script: Script, folder: Path, clones: Path | None) -> Path:
    """A checkout of the repository, with its history."""
    owned = script.repository.replace("/", "+")
    places = [clones / owned, clones / owned / "repo"] if clones else []
    source = next((str(place) for place in reversed(places) if place.exists()), f"{GITHUB}/{script.repository}")
    checkout = folder / "checkout"
    folder.mkdir(parents=True)
    subprocess.run(["git", "clone", "--quiet", "--no-checkout", source, str(checkout)], check=True)
    return checkout


def laid_out(script: Script, checkout: Path, commit: str, folder: Path) -> Path:
    """The script of a commit in a folder of its own, with what it needs beside it."""
    folder.mkdir()
    wanted = [script.path, *(str(Path(script.path).parent / name) for name in script.beside)]
    archive = subprocess.run(["git", "archive", commit, *wanted], cwd=checkout, capture_output=True, check=True)
    subprocess.run(["tar", "x"], cwd=folder, input=archive.stdout, check=True)
    file = folder / script.path
    for name, text in script.stubs.items():
        place = file.parent / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(text)
    return file


def run(script: Script, file: Path, folder: Path, **variables: str) -> list[float]:
    """The losses that it prints, on the emulated GPU; what it said is kept beside it."""
    arguments = [str(images(folder / "data")) if one == "DATA" else one for one in script.arguments]
    done = ampdbg(
        "run", "--emulate", "--no-watch", __file__, "--start", str(file), *arguments, folder=file.parent, **variables
    )
    file.with_suffix(".".join(["", *variables, "txt"])).write_text(done.stdout + done.stderr)
    return [float(loss) for loss in LOSS.findall(done.stdout)]


def ampdbg(*words: str, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs ampdbg with the stand-in for apex in reach."""
    path = os.pathsep.join(map(str, (ROOT / "tests" / "lint" / "reference", ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **variables}
    command = [sys.executable, "-m", "ampdbg", *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env=environment, timeout=LIMIT
    )


def images(folder: Path) -> Path:
    """Two classes of noise, one dark and one light, as ImageFolder reads them."""
    import numpy as np
    from PIL import Image

    if not folder.exists():
        made = np.random.default_rng(0)
        for part, count in (("train", 16), ("val", 4)):
            for kind, mean in (("dark", 40), ("light", 200)):
                (folder / part / kind).mkdir(parents=True)
                for number in range(count):
                    noise = np.clip(made.normal(mean, 40, (256, 256, 3)), 0, 255).astype("uint8")
                    Image.fromarray(noise).save(folder / part / kind / f"{number}.png")
    return folder


def start(file: str, arguments: list[str]) -> None:
    """Runs a script as itself, where torchvision can be imported and old names of torch are there."""
    import torch

    import tests.models.torchvision_on_cpu  # noqa: F401

    vars(torch.cuda)["LongTensor"] = torch.LongTensor
    # Else the first steps are skipped while the scale falls from 65536, as apex's does too: its stand-in skips none.
    made = torch.amp.GradScaler.__init__

    def initialized(scaler: Any, device: str = "cuda", init_scale: float = FIRST_SCALE, **options: Any) -> None:
        made(scaler, device, init_scale, **options)

    torch.amp.GradScaler.__init__ = initialized  # type: ignore[method-assign, assignment]
    if "ROUNDED" in os.environ:
        add_group = torch.optim.Optimizer.add_param_group

        def rounded(optimizer: Any, group: dict[str, Any]) -> None:
            add_group(optimizer, group)
            with torch.no_grad():
                for parameter in optimizer.param_groups[-1]["params"]:
                    parameter.copy_(parameter.half())

        torch.optim.Optimizer.add_param_group = rounded  # type: ignore[method-assign, assignment]
    torch.manual_seed(0)
    sys.argv = [file, *arguments]
    sys.path.insert(0, str(Path(file).parent))
    runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--start"]:
        start(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main())

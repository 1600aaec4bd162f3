"""Whether ampdbg still says the right thing about public training codebases: one line each, exit code 1 where not.

    python scripts/public_codebases.py FOLDER                 # fetches from GitHub into FOLDER, then runs all
    python scripts/public_codebases.py FOLDER raft nerf       # those alone
    python scripts/public_codebases.py FOLDER --from CLONES   # CLONES/OWNER+NAME is a clone, bare or not

Each file of ``scripts/codebases/`` is a workload of a few seconds on one CPU core, built from the model code of one
repository, which is taken as it is. What is expected is said below, by hand: of a fault, the code, the line and the
pins. Everything is written under FOLDER, each case in a folder of its own, with its checkout, its config, its reports
and its patch. What the repositories import beside torch has to be there already: ``pip install`` what a case names.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKLOADS = ROOT / "scripts" / "codebases"
SHIM = ROOT / "tests" / "models" / "torchvision_on_cpu.py"
GITHUB = "https://github.com"
LIMIT = 600
CURE = "suggest-fp32"


@dataclass(frozen=True)
class Fault:
    """What ampdbg must say of a fault; a line is named by its text, so that it may move."""

    code: str
    file: str
    text: str
    pins: tuple[str, ...] | None = None  # None: no patch is asked for


@dataclass(frozen=True)
class Case:
    """One repository and what is expected of it; healthy where there is no fault."""

    name: str
    repository: str  # "" where the model code is a package's
    commit: str = "HEAD"
    paths: tuple[str, ...] = (".",)  # what of it its own scripts have on sys.path
    needs: tuple[str, ...] = ()
    steps: int = 8
    lr: float = 1e-3
    fault: Fault | None = None
    refused: str = ""  # what the message must hold where the code cannot run under autocast at all: exit code 2


@dataclass
class Found:
    """What ampdbg said of a case."""

    verdict: str = "?"
    code: str = ""
    file: str = ""
    line: int = 0
    text: str = ""
    pins: list[str] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)
    applies: bool | None = None
    seconds: float = 0.0
    error: str = ""


CASES = (
    Case(
        "t2t_vit",
        "yitu-opensource/T2T-ViT",
        needs=("timm",),
        steps=24,
        lr=1e-2,
        fault=Fault(
            "forward-overflow",
            "models/token_performer.py",
            "D = torch.einsum('bti,bi->bt', qp, kp.sum(dim=1))",
            ("tokens_to_token.attention1:own", "tokens_to_token.attention2:own"),
        ),
    ),
    Case(
        "loftr",
        "zju3dv/LoFTR",
        needs=("einops", "kornia<0.7", "yacs"),
        steps=12,
        fault=Fault("forward-overflow", "src/loftr/loftr_module/linear_attention.py", "Z = 1 / (torch.einsum(", None),
    ),
    Case(
        "deepspeech",
        "SeanNaren/deepspeech.pytorch",
        needs=("pytorch-lightning", "hydra-core", "levenshtein", "six"),
        steps=6,
    ),
    Case("raft", "princeton-vl/RAFT", paths=("core",), needs=("scipy",)),
    Case("effdet", "rwightman/efficientdet-pytorch", needs=("timm", "omegaconf", "pycocotools")),
    Case(
        "efficientdet_zylo",
        "zylo117/Yet-Another-EfficientDet-Pytorch",
        needs=("opencv-python-headless", "webcolors"),
        steps=120,
        lr=3e-2,
    ),
    Case("nerf", "yenchenlin/nerf-pytorch", needs=("imageio", "matplotlib", "opencv-python-headless"), lr=5e-4),
    Case(
        "inspyrenet",
        "plemeri/InSPyReNet",
        needs=("timm", "opencv-python-headless", "easydict"),
        steps=4,
        fault=Fault("misuse-bce", "lib/optim/losses.py", "bce = F.binary_cross_entropy(pred, mask"),
    ),
    Case(
        "linear_attention_transformer",
        "lucidrains/linear-attention-transformer",
        needs=("axial-positional-embedding", "linformer", "local-attention", "product-key-memory"),
    ),
    Case("monai_unet", "", needs=("monai",)),
    Case("opt", "", needs=("transformers",)),
    Case(
        "performer",
        "lucidrains/performer-pytorch",
        needs=("axial-positional-embedding", "local-attention"),
        fault=Fault(
            "silent-overflow",
            "performer_pytorch/performer_pytorch.py",
            "D_inv = 1. / torch.einsum(",
            ("performer.net.layers.0.0.fn.fast_attention:own",),
        ),
    ),
    Case("nystrom", "lucidrains/nystrom-attention", needs=("einops",)),
    Case(
        "msssim",
        "VainF/pytorch-msssim",
        fault=Fault(
            "forward-overflow", "pytorch_msssim/ssim.py", "out = conv(out, weight=win.transpose(", ("ssim.py",)
        ),
    ),
    Case("stcn", "hkchengrex/STCN"),
    Case(
        "centernet",
        "xingyizhou/CenterNet",
        paths=("src/lib",),
        steps=20,
        lr=3e-3,
        fault=Fault("eps-underflow", "src/lib/models/losses.py", "neg_loss = torch.log(1 - pred)", (":own",)),
    ),
    Case("pygat", "Diego999/pyGAT"),
    Case("pygcn", "tkipf/pygcn", needs=("scipy",), refused="or make the matrix CSR"),
    Case("dgcnn", "AnTao97/dgcnn.pytorch"),
    Case(
        "egnn",
        "vgsatorras/egnn",
        fault=Fault(
            "forward-overflow",
            "models/egnn_clean/egnn_clean.py",
            "out = self.edge_mlp(out)",
            ("egnn.gcl_0.edge_mlp.0", "egnn.gcl_1.edge_mlp.0"),
        ),
    ),
    Case("vicreg", "facebookresearch/vicreg", steps=24),
    Case("mingpt", "karpathy/minGPT"),
    Case(
        "vqvae2",
        "rosinality/vq-vae-2-pytorch",
        fault=Fault("forward-overflow", "vqvae.py", "- 2 * flatten @ self.embed", ("quantize_t", "quantize_b")),
    ),
    Case("reid", "michuanhaohao/reid-strong-baseline", refused="dist.addmm_(1, -2, x, y.t())"),
    Case("conv_tasnet", "kaituoxu/Conv-TasNet", paths=("src",), steps=24),
    Case("hifigan", "jik876/hifi-gan", needs=("matplotlib",)),
    Case("resa", "ZJULearning/resa", needs=("addict", "yapf"), steps=24),
    Case("cifar", "kuangliu/pytorch-cifar"),
    Case("dit", "facebookresearch/DiT", needs=("timm",), lr=1e-4),
    Case("glow", "rosinality/glow-pytorch", needs=("scipy",), lr=1e-4),
    Case("mae", "facebookresearch/mae", needs=("timm",)),
    Case("unet", "milesial/Pytorch-UNet"),
    Case(
        "transformer",
        "jadore801120/attention-is-all-you-need-pytorch",
        fault=Fault("mask-constant", "transformer/Modules.py", "attn = attn.masked_fill(mask == 0, -1e9)"),
    ),
    Case("vit_pytorch", "lucidrains/vit-pytorch", needs=("einops",)),
    Case("vits", "jaywalnut310/vits"),
    Case("vector_quantize", "lucidrains/vector-quantize-pytorch", needs=("einops", "einx")),
    Case("nanogpt", "karpathy/nanoGPT", commit="3adf61e154c3fe3fca428ad6bc3818b27a3b8291"),
    Case(
        "rwkv",
        "BlinkDL/RWKV-LM",
        commit="524481d5099b38d9bc8ef1e89209161b86c8011b",
        paths=("RWKV-v1",),
        fault=Fault(
            "forward-overflow",
            "RWKV-v1/src/model.py",
            "wkv = (torch.einsum('htu,buhc->bthc', w, kv))",
            ("blocks.1.attn:own",),
        ),
    ),
    Case(
        "supcon",
        "HobbitLong/SupContrast",
        commit="66a8fe53880d6a1084b2e4e0db0a019024d6d41a",
        steps=3,
        fault=Fault("true-nan", "losses.py", "log_prob = logits - torch.log(exp_logits.sum(1"),
    ),
    Case("mamba", "johnma2006/mamba-minimal", commit="03de542a36d873f6e6c4057ad687278cc6ae944d", needs=("einops",)),
    Case(
        "autoformer",
        "thuml/Autoformer",
        commit="51c7d416ae120b805fd5beef2f4ccf7de496a6ff",
        refused="as in torch.fft.rfft(x.float())",
    ),
    Case("informer", "zhouhaoyi/Informer2020", commit="29f2a739226a509202a092b464163da81fa74960"),
    Case(
        "crnn",
        "meijieru/crnn.pytorch",
        commit="3cc7904c5ba20b18fcdc2d02ac2b24a9be9eafaf",
        steps=3,
        fault=Fault("infinite-loss", "workload.py", "return F.ctc_loss("),
    ),
    Case(
        "wordlm",
        "pytorch/examples",
        commit="77f55b912142e11fcfdf5b530231fb9c52f181e8",
        paths=("word_language_model",),
    ),
)


def main() -> int:
    """Fetches, runs and compares; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="the cases to run; all without one")
    parser.add_argument("--from", dest="clones", type=Path, help="the folder of clones to fetch from")
    given = parser.parse_intermixed_args()
    if unknown := set(given.names) - {case.name for case in CASES}:
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(case.name for case in CASES)}")
    folder = given.folder.resolve()
    if folder.is_relative_to(ROOT):
        parser.error(f"{folder} is in ampdbg's own tree")
    failures = 0
    for case in CASES:
        if not given.names or case.name in given.names:
            differences = list(run(case, folder / case.name, given.clones and given.clones.resolve()))
            failures += bool(differences)
    return 1 if failures else 0


def run(case: Case, folder: Path, clones: Path | None) -> Iterator[str]:
    """Runs one case, prints its line, and yields what differs."""
    folder.mkdir(parents=True, exist_ok=True)
    found = Found()
    begin = time.monotonic()
    try:
        if case.repository:
            fetch(case, folder / "repo", clones)
        lay_out(case, folder)
        scan(case, folder, found)
        if case.fault is not None and case.fault.pins is not None:
            cure(case, folder, found)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        found.error = str(error).replace("\n", " ")
    found.seconds = time.monotonic() - begin
    differences = list(compare(case, found))
    mark = "FAIL" if differences else "PASS"
    print(f"{mark} {case.name:<28} expected {expected(case)}; found {in_words(found)}", flush=True)
    for difference in differences:
        print(f"     {difference}", flush=True)
    yield from differences


def fetch(case: Case, checkout: Path, clones: Path | None) -> None:
    """Clones the repository, without its images and weights, where it is not there yet."""
    if not checkout.exists():
        source = str(clones / case.repository.replace("/", "+")) if clones else f"{GITHUB}/{case.repository}"
        shallow = [] if clones else ["--depth", "1", "--filter=blob:none"]
        git(checkout.parent, "clone", "--quiet", "--no-checkout", *shallow, source, checkout.name)
        if not clones and case.commit != "HEAD":
            git(checkout, "fetch", "--quiet", *shallow, "origin", case.commit)
    git(checkout, "checkout", "--quiet", case.commit, "--", "*.py")


def git(folder: Path, *words: str) -> None:
    """Runs git there; what it says of a failure is the exception's."""
    ran = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise OSError(f"git {' '.join(words)}: {ran.stderr.strip()}")


def lay_out(case: Case, folder: Path) -> None:
    """Writes the workload and its config beside the checkout."""
    shutil.copy(WORKLOADS / f"{case.name}.py", folder / "workload.py")
    shutil.copy(SHIM, folder)
    config: dict[str, Any] = {
        key: {"target": f"workload.py:{name}"} for key, name in (("model", "build_model"), ("data", "build_data"))
    }
    text = (folder / "workload.py").read_text(encoding="utf-8")
    if "\ndef step(" in text:
        config["step"] = {"target": "workload.py:step"}
        config["optimizer"] = {"target": "torch.optim:AdamW", "args": {"lr": case.lr}}
    config["train"] = {"steps": case.steps}
    (folder / "run.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def scan(case: Case, folder: Path, found: Found) -> None:
    """What ``ampdbg scan`` says."""
    record = ampdbg(case, folder, "scan", found)
    found.verdict = record["verdict"]
    findings = [each for each in record["findings"] if each["root"] is None and each["severity"] != "info"]
    if findings:
        found.code = findings[0]["code"]
        source = findings[0]["source"] or {"file": "", "line": 0, "text": ""}
        file = Path(source["file"])
        inside = file.is_relative_to(folder / "repo")
        found.file = str(file.relative_to(folder / "repo")) if inside else file.name
        found.line, found.text = source["line"], source["text"]


def cure(case: Case, folder: Path, found: Found) -> None:
    """What ``ampdbg suggest-fp32`` pins, and whether git takes its patch."""
    record = ampdbg(case, folder, CURE, found)
    found.pins = [name_of(pin) for pin in record["pins"]]
    check = ["git", "-C", record["handover"]["folder"], "apply", "--check", folder / f"{CURE}.txt"]
    found.applies = subprocess.run(check, capture_output=True, check=False).returncode == 0


def name_of(pin: dict[str, Any]) -> str:
    """A pin as the config would name it; where it is lines outside every module, their file."""
    if not pin["module"] and not pin["own"] and pin["source"]:
        return Path(pin["source"]["file"]).name
    return str(pin["module"]) + (":own" if pin["own"] else "")


def ampdbg(case: Case, folder: Path, command: str, found: Found) -> dict[str, Any]:
    """Runs one command in the case's folder; returns its record."""
    record = folder / f"{command}.json"
    record.unlink(missing_ok=True)
    path = [*(str(folder / "repo" / path) for path in case.paths), os.environ.get("PYTHONPATH", ""), str(ROOT)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    line = [sys.executable, "-m", "ampdbg", command, "run.yaml", "--quiet", "--record", str(record)]
    out, err = folder / f"{command}.txt", folder / f"{command}.err"
    with out.open("wb") as stdout, err.open("wb") as stderr:  # bytes: a patch has its file's line endings
        ran = subprocess.run(
            line, cwd=folder, env=environment, stdout=stdout, stderr=stderr, timeout=LIMIT, check=False
        )
    found.exits.append(ran.returncode)
    if not record.exists():
        said = err.read_text(encoding="utf-8", errors="replace").strip()
        raise ValueError(f"no record; needs {', '.join(case.needs) or 'torch'}: {said[-600:]}")
    read: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    return read


def compare(case: Case, found: Found) -> Iterator[str]:
    """What differs from what is expected."""
    if case.refused:
        if found.exits != [2] or case.refused not in found.error:
            yield f"not refused with {case.refused!r}: exit code {found.exits}, {found.error}"
    elif found.error:
        yield found.error
    elif case.fault is not None:
        yield from compare_fault(case.fault, found)
    elif found.exits != [0] or found.code or found.verdict != "healthy":
        yield f"a healthy run: exit code {found.exits}, {found.code}, {found.text}"


def compare_fault(fault: Fault, found: Found) -> Iterator[str]:
    """What differs from the fault."""
    given = {"exit code": 1, "code": fault.code, "file": fault.file}
    got = {"exit code": found.exits[0], "code": found.code, "file": found.file}
    yield from (f"the {name} is {got[name]}, not {want}" for name, want in given.items() if got[name] != want)
    if fault.text not in found.text:
        yield f"the line is {found.text!r}, not {fault.text!r}"
    if fault.pins is not None:
        if set(fault.pins) != set(found.pins):
            yield f"the pins are {found.pins}, not {list(fault.pins)}"
        if found.exits[1:] != [0] or not found.applies:
            yield f"the patch: exit code {found.exits[1:]}, git apply takes it: {found.applies}"


def expected(case: Case) -> str:
    """The expectation, in words."""
    fault = case.fault
    if fault is None:
        return f"refused at {case.refused}" if case.refused else "healthy"
    return f"{fault.code} at {fault.file}" + (f" pins {','.join(fault.pins)}" if fault.pins is not None else "")


def in_words(found: Found) -> str:
    """What was found, in words."""
    at = f" {found.code} at {found.file}:{found.line}" if found.code else ""
    pins = f" pins {','.join(found.pins)}" if found.pins else ""
    return f"{found.verdict}{at}{pins} exit {found.exits} in {found.seconds:.0f} s"


if __name__ == "__main__":
    sys.exit(main())

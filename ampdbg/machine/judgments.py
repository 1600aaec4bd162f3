"""What the facts of a machine mean for mixed precision, and what to do about them: data to data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ampdbg.machine.facts import Gpu, Machine
from ampdbg.quantities import counted, listed

JudgmentTone = Literal["good", "bad", "doubtful", "plain"]


@dataclass(frozen=True)
class Judgment:
    """A fact with what it means, and what to do, if anything; ``tone`` is plain where nothing is good or bad."""

    topic: str
    tone: JudgmentTone
    says: str
    advice: str = ""


TENSOR_CORES, BFLOAT16 = "tensor cores", "bfloat16"
UNITS: Mapping[str, tuple[tuple[int, int], str, str, str]] = {
    TENSOR_CORES: (
        (7, 0),
        "yes: FP16 products, added in FP32",
        "FP16 saves memory here, but hardly any time",
        "stay in FP32 unless memory is short",
    ),
    BFLOAT16: (
        (8, 0),
        "native: FP32's range, so that no loss scale is needed",
        "torch.cuda.is_bf16_supported() is still True, because it counts emulation",
        "use FP16 with a GradScaler, or FP32",
    ),
}
"""From which compute capability on a GPU has it (NVIDIA, CUDA C++ Programming Guide), what it gives, what its lack
means, and what to do then."""

TF32 = (8, 0)

GTX_16 = "GTX 16"
"""In the names of GPUs of 7.5 without tensor cores, whose FP16 convolutions give NaN (PyTorch issues 58123, 77955)."""

SUMS = "cuda.matmul.allow_fp16_reduced_precision_reduction"


def judged(machine: Machine) -> tuple[Judgment, ...]:
    """All that there is to say, in the order of the page."""
    return tuple(judgment for judge in JUDGES for judgment in judge(machine))


def _torch(machine: Machine) -> Iterator[Judgment]:
    torch = machine.torch
    if not torch.version:
        yield Judgment("torch", "bad", "not installed; ampdbg needs it", "pip install torch")
    elif not torch.imported:
        says = f"{torch.version} cannot be imported: {torch.problem}"
        yield Judgment("torch", "bad", says, 'python -c "import torch" shows the full error')
    else:
        build = f"for CUDA {torch.cuda}" if torch.cuda else f"for ROCm {torch.hip}" if torch.hip else "for the CPU only"
        why = torch.problem or torch.problems.get("device", "no answer")
        on = f"ampdbg runs on {torch.device}" if torch.device else f"asked for its device: {why}"
        advice = "" if torch.device else "--device cpu needs no driver"
        yield Judgment("torch", "good" if torch.device else "bad", f"{torch.imported}, built {build}; {on}", advice)


def _gpu(machine: Machine) -> Iterator[Judgment]:
    torch, driver = machine.torch, machine.driver
    counts = Counter(torch.gpus or driver.gpus)
    names = listed(
        (f"{count} x {_described(gpu)}" if count > 1 else _described(gpu) for gpu, count in counts.items()), 8
    )
    if torch.gpus:
        yield Judgment("GPU", "good", f"{names}; torch sees {'it' if len(torch.gpus) == 1 else 'them'}")
    elif driver.problem:
        yield Judgment("GPU", "bad", f"nvidia-smi: {driver.problem}", "repair the driver: nvidia-smi must list the GPU")
    elif names:
        why, advice = _why_unseen(machine)
        yield Judgment("GPU", "bad", f"{names}; {why}", advice)
    elif torch.has_mps:
        yield Judgment("GPU", "plain", "Apple's, as torch's device mps; ampdbg does not use it, and runs on the CPU")
    else:
        raised = torch.problems.get("gpus", "")
        yield Judgment("GPU", "doubtful" if raised else "plain", raised or "torch and nvidia-smi find none")


def _why_unseen(machine: Machine) -> tuple[str, str]:
    """What keeps torch from a GPU that nvidia-smi lists, as far as it is known, and what to do."""
    torch = machine.torch
    if not torch.imported:
        return "torch could not say whether it sees it", ""
    if not torch.cuda:
        return "this torch is not built for CUDA", "install torch's CUDA build: https://pytorch.org/get-started"
    if machine.visible is not None:
        return f"CUDA_VISIBLE_DEVICES={machine.visible!r} decides what torch sees", "unset CUDA_VISIBLE_DEVICES"
    return torch.problems.get("gpus", "torch does not see it"), ""


def _described(gpu: Gpu) -> str:
    return f"{gpu.name} (compute capability {_dotted(gpu.capability)})" if gpu.capability else gpu.name


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _units(machine: Machine) -> Iterator[Judgment]:
    """What each kind of GPU computes with."""
    gpus = dict.fromkeys(machine.torch.gpus or machine.driver.gpus)
    for gpu in gpus:
        for unit in UNITS if gpu.capability else ():
            judgment = judged_unit(unit, gpu)
            yield replace(judgment, says=f"{gpu.name}: {judgment.says}") if len(gpus) > 1 else judgment


def judged_unit(unit: str, gpu: Gpu) -> Judgment:
    """The judgment of the GPU's unit; good where its capability is not known."""
    begins, has, lacks, advice = UNITS[unit]
    if unit is TENSOR_CORES and GTX_16 in gpu.name:
        says = "none in the GTX 16 series, and some of its FP16 kernels give NaN where nothing overflows"
        return Judgment(unit, "bad", says, "stay in FP32; --device cpu shows whether a NaN is the GPU's or the model's")
    if gpu.capability is None or gpu.capability >= begins:
        return Judgment(unit, "good", has)
    says = f"none: it starts at {_dotted(begins)}, this is {_dotted(gpu.capability)}; {lacks}"
    return Judgment(unit, "doubtful", says, advice)


def _cuda(machine: Machine) -> Iterator[Judgment]:
    torch, driver = machine.torch, machine.driver
    if driver.cuda and torch.cuda:
        fits = _major(torch.cuda) <= _major(driver.cuda)
        says = f"torch's is {torch.cuda}; driver {driver.version} serves up to {driver.cuda}"
        advice = "" if fits else f"update the driver, or install torch for CUDA {_major(driver.cuda)}"
        yield Judgment("CUDA", "good" if fits else "bad", says, advice)
    for gpu in dict.fromkeys(torch.gpus):
        if gpu.capability and torch.kernels and not any(_serves(kernel, gpu.capability) for kernel in torch.kernels):
            says = f"this torch has none for {_described(gpu)}: {' '.join(torch.kernels)}"
            yield Judgment("kernels", "bad", says, "install an older torch, or one for an older CUDA")
    if machine.nvcc_problem:
        yield Judgment("nvcc", "doubtful", machine.nvcc_problem)
    elif machine.nvcc and torch.cuda:
        fits = _major(machine.nvcc) == _major(torch.cuda)
        does = "compiles" if fits else "does not compile"
        says = f"{machine.nvcc}: torch {does} extensions for its CUDA {torch.cuda} with it"
        yield Judgment("nvcc", "good" if fits else "doubtful", says)


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _serves(kernel: str, capability: tuple[int, int]) -> bool:
    """``sm_80``, ``sm_90a`` or ``compute_90`` runs there: binaries in one major version, PTX on all later."""
    name = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", kernel)
    built = (int(name[2]), int(name[3])) if name else capability
    return built <= capability and (kernel.startswith("compute") or built[0] == capability[0])


def _arithmetic(machine: Machine) -> Iterator[Judgment]:
    """How torch multiplies as it starts; a script may set it otherwise."""
    torch = machine.torch
    tf32 = listed(name for name, is_on in torch.flags.items() if name.endswith("allow_tf32") and is_on) or "nowhere"
    if any(gpu.capability and gpu.capability >= TF32 for gpu in torch.gpus):
        says = f"torch's default: on in {tf32}, where FP32 has 10 bits, in FP32 replays too"
        yield Judgment("TF32", "plain", says, "set it to False to compare with true FP32")
    elif torch.flags:
        yield Judgment(
            "TF32", "plain", f"torch's default: on in {tf32}; no effect here, where it needs compute capability 8.0"
        )
    if SUMS in torch.flags:
        does = "may add parts of an FP16 product in FP16" if torch.flags[SUMS] else "adds FP16 products in FP32"
        says = f"torch's default: {SUMS} is {torch.flags[SUMS]}; a GPU {does}, the emulation adds in FP32"
        yield Judgment("FP16 sums", "plain", says)
    if torch.attention:
        says = f"{listed(torch.attention)} allowed" + "".join(f"; {note}" for note in torch.notes if not torch.gpus)
        yield Judgment("attention", "plain", says)


def _frameworks(machine: Machine) -> Iterator[Judgment]:
    """One line for all that do the same."""
    by_doing: dict[str, list[str]] = {}
    for name, (version, on_cpu, on_gpu) in machine.frameworks.items():
        does = on_gpu if machine.torch.gpus else on_cpu
        by_doing.setdefault(does, []).append(f"{name} {version}")
    loses = {on_cpu for _, on_cpu, on_gpu in machine.frameworks.values() if on_cpu != on_gpu}
    for does, names in by_doing.items():
        lacks = (
            ", which is not installed" if does.endswith("accelerate") and "accelerate" not in machine.frameworks else ""
        )
        says = (
            f"{does}{lacks} (read in the source)"
            if does
            else ("ampdbg did not find in its source what fp16 becomes here")
        )
        advice = "such a run says nothing about FP16" if does in loses else ""
        yield Judgment("framework", "doubtful" if advice else "plain", f"{listed(names)}: {says}", advice)


def _emulation(machine: Machine) -> Iterator[Judgment]:
    torch = machine.torch
    if torch.gpus:
        yield Judgment(
            "emulation", "plain", f"none on {torch.device}, which has CUDA's own autocast", "--device cpu emulates"
        )
    elif torch.imported:
        says = (
            "CUDA's autocast on the CPU: FP16 operands, products added in FP32, each result and gradient rounded "
            "once; a GPU adds in another order, so the last bits may differ"
        )
        yield Judgment("emulation", "good", says)
    if torch.op_lists:
        read, ours = (_told(torch.op_lists[origin]) for origin in ("header", "table"))
        says = f"{read} from torch's own autocast_mode.h" if read else "torch ships no autocast_mode.h that is known"
        rest = "" if read else ", as torch 2.13 has them"
        tone: JudgmentTone = "good" if read else "doubtful"
        yield Judgment(
            "op lists", tone, f"{says}; {ours} from ampdbg's tables{rest}", "ampdbg doctor --json names them"
        )


def _told(lists: Mapping[str, Sequence[str]]) -> str:
    return f"{counted(sum(map(len, lists.values())), 'op')} of {listed(lists, most=8)}" if lists else ""


JUDGES: tuple[Callable[[Machine], Iterator[Judgment]], ...] = (
    _torch,
    _gpu,
    _units,
    _cuda,
    _arithmetic,
    _frameworks,
    _emulation,
)

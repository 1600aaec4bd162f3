"""Judgments of a machine's facts for mixed precision, with advice. Pure functions on data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from ampdbg.machine.facts import Gpu, Machine
from ampdbg.quantities import counted, listed

JudgmentTone = Literal["good", "bad", "doubtful", "plain"]


@dataclass(frozen=True)
class Judgment:
    """A fact with its meaning and advice, if any; ``tone`` is plain if it is neither good nor bad."""

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
"""By unit: the first compute capability with it, its benefit, the effect of its lack, and advice for that case. The
capabilities are from NVIDIA's CUDA C++ Programming Guide."""

TF32 = (8, 0)

INSTALL = "install torch's CUDA build: https://pytorch.org/get-started"

GTX_16 = "GTX 16"
"""In names of capability 7.5 GPUs without tensor cores; FP16 convolutions yield NaN (PyTorch issues 58123, 77955)."""

SUMS = "cuda.matmul.allow_fp16_reduced_precision_reduction"


def judged(machine: Machine) -> tuple[Judgment, ...]:
    """Return all judgments, in the order of the page."""
    return tuple(judgment for judge in JUDGES for judgment in judge(machine))


def _of(topic: str, *rows: tuple[object, JudgmentTone, str, str]) -> Iterator[Judgment]:
    """Yield a judgment from the first row with a true condition, if any. A row is condition, tone, text and advice."""
    yield from islice((Judgment(topic, *judgment) for holds, *judgment in rows if holds), 1)  # type: ignore[arg-type]


def _torch(machine: Machine) -> Iterator[Judgment]:
    torch = machine.torch
    build = f"for CUDA {torch.cuda}" if torch.cuda else f"for ROCm {torch.hip}" if torch.hip else "for the CPU only"
    why = torch.problem or torch.problems.get("device", "no answer")
    begin, fails = f"{torch.imported}, built {build}", f"{torch.version} cannot be imported: {torch.problem}"
    yield from _of(
        "torch",
        (not torch.version, "bad", "not installed; ampdbg needs it", "pip install torch"),
        (not torch.imported, "bad", fails, 'python -c "import torch" shows the full error'),
        (torch.device, "good", f"{begin}; ampdbg runs on {torch.device}", ""),
        (True, "bad", f"{begin}; asked for its device: {why}", "--device cpu needs no driver"),
    )


def _gpu(machine: Machine) -> Iterator[Judgment]:
    torch, driver = machine.torch, machine.driver
    counts = Counter(torch.gpus or driver.gpus)
    names = listed((f"{count} x " * (count > 1) + _described(gpu) for gpu, count in counts.items()), 8)
    them, raised = "it" if len(torch.gpus) == 1 else "them", torch.problems.get("gpus", "")
    by_variable = f"CUDA_VISIBLE_DEVICES={machine.visible!r} decides what torch sees"
    yield from _of(
        "GPU",
        (torch.gpus, "good", f"{names}; torch sees {them}", ""),
        (driver.problem, "bad", f"nvidia-smi: {driver.problem}", "repair the driver: nvidia-smi must list the GPU"),
        # Reasons why torch does not see a GPU that nvidia-smi lists.
        (names and not torch.imported, "bad", f"{names}; torch could not say whether it sees it", ""),
        (names and not torch.cuda, "bad", f"{names}; this torch is not built for CUDA", INSTALL),
        (names and machine.visible is not None, "bad", f"{names}; {by_variable}", "unset CUDA_VISIBLE_DEVICES"),
        (names, "bad", f"{names}; {raised or 'torch does not see it'}", ""),
        (torch.has_mps, "plain", "Apple's, as torch's device mps; ampdbg does not use it, and runs on the CPU", ""),
        (raised, "doubtful", raised, ""),
        (True, "plain", "torch and nvidia-smi find none", ""),
    )


def _described(gpu: Gpu) -> str:
    return f"{gpu.name} (compute capability {_dotted(gpu.capability)})" if gpu.capability else gpu.name


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _units(machine: Machine) -> Iterator[Judgment]:
    """Judge the arithmetic units of each kind of GPU."""
    gpus = dict.fromkeys(machine.torch.gpus or machine.driver.gpus)
    for gpu in gpus:
        for unit in UNITS if gpu.capability else ():
            judgment = judged_unit(unit, gpu)
            yield replace(judgment, says=f"{gpu.name}: {judgment.says}") if len(gpus) > 1 else judgment


def judged_unit(unit: str, gpu: Gpu) -> Judgment:
    """Return the judgment of the GPU's unit, which is good if the capability is unknown."""
    begins, has, lacks, advice = UNITS[unit]
    is_gtx_16, capability = unit is TENSOR_CORES and GTX_16 in gpu.name, gpu.capability or begins
    gives_nan = "none in the GTX 16 series, and some of its FP16 kernels give NaN where nothing overflows"
    says = f"none: it starts at {_dotted(begins)}, this is {_dotted(capability)}; {lacks}"
    rows = _of(
        unit,
        (is_gtx_16, "bad", gives_nan, "stay in FP32; --device cpu shows whether a NaN is the GPU's or the model's"),
        (capability >= begins, "good", has, ""),
        (True, "doubtful", says, advice),
    )
    return next(rows)


def _cuda(machine: Machine) -> Iterator[Judgment]:
    torch, driver = machine.torch, machine.driver
    torchs, drivers, nvcc = torch.cuda or "", driver.cuda or "", machine.nvcc
    says = f"torch's is {torchs}; driver {driver.version} serves up to {drivers}"
    is_served = _major(torchs) <= _major(drivers)
    update = f"update the driver, or install torch for CUDA {_major(drivers)}"
    yield from _of(
        "CUDA",
        (torchs and drivers and is_served, "good", says, ""),
        (torchs and drivers, "bad", says, update),
    )
    for gpu in dict.fromkeys(torch.gpus):
        if gpu.capability and torch.kernels and not any(_serves(kernel, gpu.capability) for kernel in torch.kernels):
            none = f"this torch has none for {_described(gpu)}: {' '.join(torch.kernels)}"
            yield Judgment("kernels", "bad", none, "install an older torch, or one for an older CUDA")
    with_it = f"extensions for its CUDA {torchs} with it"
    yield from _of(
        "nvcc",
        (machine.nvcc_problem, "doubtful", machine.nvcc_problem, ""),
        (nvcc and torchs and _major(nvcc) == _major(torchs), "good", f"{nvcc}: torch compiles {with_it}", ""),
        (nvcc and torchs, "doubtful", f"{nvcc}: torch does not compile {with_it}", ""),
    )


def _major(version: str) -> int:
    return int(version.partition(".")[0] or 0)


def _serves(kernel: str, capability: tuple[int, int]) -> bool:
    """True if ``sm_80``, ``sm_90a`` or ``compute_90`` runs there: binaries in one major version, PTX in all later."""
    name = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", kernel)
    built = (int(name[2]), int(name[3])) if name else capability
    return built <= capability and (kernel.startswith("compute") or built[0] == capability[0])


def _arithmetic(machine: Machine) -> Iterator[Judgment]:
    """Judge torch's default settings for products; a script may change them."""
    torch = machine.torch
    tf32 = listed(name for name, is_on in torch.flags.items() if name.endswith("allow_tf32") and is_on) or "nowhere"
    has_tf32 = any(gpu.capability and gpu.capability >= TF32 for gpu in torch.gpus)
    on, advice = f"torch's default: on in {tf32}", "set it to False to compare with true FP32"
    yield from _of(
        "TF32",
        (has_tf32, "plain", f"{on}, where FP32 has 10 bits, in FP32 replays too", advice),
        (torch.flags, "plain", f"{on}; no effect here, where it needs compute capability 8.0", ""),
    )
    does = "may add parts of an FP16 product in FP16" if torch.flags.get(SUMS) else "adds FP16 products in FP32"
    sums = f"torch's default: {SUMS} is {torch.flags.get(SUMS)}; a GPU {does}, the emulation adds in FP32"
    allowed = "; ".join((f"{listed(torch.attention)} allowed", *torch.notes[: None if not torch.gpus else 0]))
    yield from _of("FP16 sums", (SUMS in torch.flags, "plain", sums, ""))
    yield from _of("attention", (torch.attention, "plain", allowed, ""))


def _frameworks(machine: Machine) -> Iterator[Judgment]:
    """Judge frameworks with the same behavior in one line."""
    by_doing: dict[str, list[str]] = {}
    for name, (version, on_cpu, on_gpu) in machine.frameworks.items():
        does = on_gpu if machine.torch.gpus else on_cpu
        by_doing.setdefault(does, []).append(f"{name} {version}")
    loses = {on_cpu for _, on_cpu, on_gpu in machine.frameworks.values() if on_cpu != on_gpu}
    for does, names in by_doing.items():
        is_without = does.endswith("accelerate") and "accelerate" not in machine.frameworks
        read = f"{does}{', which is not installed' * is_without} (read in the source)"
        says = f"{listed(names)}: {read if does else 'ampdbg did not find in its source what fp16 becomes here'}"
        yield from _of(
            "framework",
            (does in loses, "doubtful", says, "such a run says nothing about FP16"),
            (True, "plain", says, ""),
        )


def _emulation(machine: Machine) -> Iterator[Judgment]:
    torch = machine.torch
    on_cpu = (
        "CUDA's autocast on the CPU: FP16 operands, products added in FP32, each result and gradient rounded "
        "once; a GPU adds in another order, so the last bits may differ"
    )
    own = f"none on {torch.device}, which has CUDA's own autocast"
    yield from _of(
        "emulation",
        (torch.gpus, "plain", own, "--device cpu emulates"),
        (torch.imported, "good", on_cpu, ""),
    )
    lists = [torch.op_lists.get(origin, {}) for origin in ("header", "table")]
    read, ours = (f"{counted(sum(map(len, one.values())), 'op')} of {listed(one, most=8)}" * bool(one) for one in lists)
    by_header = f"{read} from torch's own autocast_mode.h; {ours} from ampdbg's tables"
    by_table = f"torch ships no autocast_mode.h that is known; {ours} from ampdbg's tables, as torch 2.13 has them"
    advice = "ampdbg doctor --json names them"
    yield from _of("op lists", (read, "good", by_header, advice), (torch.op_lists, "doubtful", by_table, advice))


JUDGES: tuple[Callable[[Machine], Iterator[Judgment]], ...] = (
    _torch,
    _gpu,
    _units,
    _cuda,
    _arithmetic,
    _frameworks,
    _emulation,
)

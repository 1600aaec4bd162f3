"""Judgments of faked machines: old and new GPUs, other vendors' GPUs, and drivers that do not fit torch."""

from dataclasses import replace

import pytest

from ampdbg.machine.facts import Driver, Gpu, InstalledTorch, Machine
from ampdbg.machine.judgments import judged
from ampdbg.report.doctor import page
from ampdbg.report.formats.text import draw
from ampdbg.report.view import Look

GTX_1080 = Gpu("NVIDIA GeForce GTX 1080", (6, 1))
GTX_1660 = Gpu("NVIDIA GeForce GTX 1660 Ti", (7, 5))
T4 = Gpu("Tesla T4", (7, 5))
V100 = Gpu("Tesla V100-SXM2-16GB", (7, 0))
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0))
MI250 = Gpu("AMD Instinct MI250X")

SUMS = "cuda.matmul.allow_fp16_reduced_precision_reduction"
CUDA_TORCH = InstalledTorch(
    version="2.13.0+cu126",
    imported="2.13.0+cu126",
    cuda="12.6",
    flags={"cuda.matmul.allow_tf32": False, "cudnn.allow_tf32": True, SUMS: True},
    attention=("flash", "memory-efficient", "cuDNN", "math"),
    op_lists={"header": {"FP32": ["exp", "pow"]}, "table": {"BANNED": ["binary_cross_entropy"]}},
    notes=("attention is fused",),
    kernels=("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"),
    device="cuda:0",
)
DRIVER = Driver("560.35", "12.6")
CPU_TORCH = replace(CUDA_TORCH, imported="2.13.0+cpu", cuda=None, kernels=(), device="cpu")


def with_gpus(*gpus: Gpu) -> Machine:
    return Machine(replace(CUDA_TORCH, gpus=gpus), replace(DRIVER, gpus=gpus))


def lines(machine: Machine) -> dict[str, str]:
    """Each topic's tone and text."""
    return {judgment.topic: f"{judgment.tone}: {judgment.says}" for judgment in judged(machine)}


def headline(machine: Machine) -> str:
    return draw(page(machine), Look(80, color=False, unicode=True)).partition("\n")[0]


@pytest.mark.parametrize(
    ("gpu", "cores", "bfloat16"),
    [
        (GTX_1080, "doubtful: none: it starts at 7.0, this is 6.1", "doubtful: none: it starts at 8.0"),
        (
            GTX_1660,
            "bad: none in the GTX 16 series, and some of its FP16 kernels give NaN",
            "doubtful: none: it starts at 8.0",
        ),
        (T4, "good: yes", "doubtful: none: it starts at 8.0, this is 7.5"),
        (V100, "good: yes", "doubtful: none: it starts at 8.0, this is 7.0"),
        (H100, "good: yes", "good: native"),
    ],
    ids=lambda value: value.name if isinstance(value, Gpu) else "",
)
def test_tensor_core_and_bfloat16_support_follow_the_compute_capability(gpu: Gpu, cores: str, bfloat16: str) -> None:
    said = lines(with_gpus(gpu))
    assert said["tensor cores"].startswith(cores)
    assert said["bfloat16"].startswith(bfloat16)
    assert said["GPU"] == (
        f"good: {gpu.name} (compute capability {'.'.join(map(str, gpu.capability or ()))}); torch sees it"
    )


def test_the_headline_states_whether_fp16_runs_on_the_machine() -> None:
    assert headline(with_gpus(H100)) == "✓ FP16 runs on this machine's GPU."
    assert headline(with_gpus(GTX_1080, H100)).startswith("? FP16 runs on this machine, but does not pay off")
    assert headline(Machine(CPU_TORCH)).startswith("✓ No GPU here; ampdbg emulates")
    assert headline(Machine(CPU_TORCH, replace(DRIVER, gpus=(H100,)))).startswith("? torch uses no GPU here")
    assert headline(Machine(InstalledTorch())) == "✗ ampdbg cannot run on this machine."


def test_equal_gpus_are_counted_and_each_gpu_model_is_judged() -> None:
    machine = with_gpus(H100, H100, T4)
    assert "2 x NVIDIA H100 80GB HBM3 (compute capability 9.0) and Tesla T4 (" in lines(machine)["GPU"]
    said = [judgment.says for judgment in judged(machine) if judgment.topic == "bfloat16"]
    assert [text.split(":")[:2] for text in said] == [[H100.name, " native"], ["Tesla T4", " none"]]


def test_an_amd_gpu_is_not_judged_by_nvidia_compute_capability() -> None:
    rocm = replace(CUDA_TORCH, imported="2.13.0+rocm6.4", cuda=None, hip="6.4", gpus=(MI250,), kernels=("gfx90a",))
    said = lines(Machine(rocm))
    assert said["torch"] == "good: 2.13.0+rocm6.4, built for ROCm 6.4; ampdbg runs on cuda:0"
    assert said["GPU"] == "good: AMD Instinct MI250X; torch sees it"
    assert not {"tensor cores", "bfloat16", "kernels", "CUDA"} & said.keys()
    assert said["TF32"].endswith("no effect here, where it needs compute capability 8.0")


def test_an_apple_gpu_is_reported_as_unused() -> None:
    assert "ampdbg does not use it" in lines(Machine(replace(CPU_TORCH, has_mps=True)))["GPU"]


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        (Machine(CPU_TORCH, replace(DRIVER, gpus=(H100,))), "this torch is not built for CUDA"),
        (Machine(CUDA_TORCH, replace(DRIVER, gpus=(H100,)), visible=""), "CUDA_VISIBLE_DEVICES='' decides"),
        (Machine(CUDA_TORCH, replace(DRIVER, gpus=(H100,))), "torch does not see it"),
        (Machine(CPU_TORCH, replace(DRIVER, gpus=(H100,)), visible="0"), "this torch is not built for CUDA"),
        (Machine(InstalledTorch(), replace(DRIVER, gpus=(H100,))), "torch could not say"),
        (
            Machine(replace(CUDA_TORCH, problems={"gpus": "driver too old"}), replace(DRIVER, gpus=(H100,))),
            "driver too old",
        ),
    ],
)
def test_the_gpu_line_gives_the_known_reason_why_torch_sees_no_gpu(machine: Machine, why: str) -> None:
    assert lines(machine)["GPU"].startswith(f"bad: NVIDIA H100 80GB HBM3 (compute capability 9.0); {why}")


@pytest.mark.parametrize(
    ("torchs", "drivers", "tone"),
    [("12.6", "12.4", "good"), ("12.6", "13.0", "good"), ("13.0", "12.8", "bad"), ("12.6", "11.4", "bad")],
)
def test_a_driver_serves_cuda_up_to_its_own_major_version(torchs: str, drivers: str, tone: str) -> None:
    said = lines(Machine(replace(CUDA_TORCH, cuda=torchs), Driver("1", drivers)))
    assert said["CUDA"].startswith(f"{tone}: torch's is {torchs}; driver 1 serves up to {drivers}")


@pytest.mark.parametrize(("nvcc", "tone"), [("12.1", "good"), ("13.0", "doubtful")])
def test_nvcc_must_have_the_major_version_of_torchs_cuda(nvcc: str, tone: str) -> None:
    assert lines(Machine(CUDA_TORCH, nvcc=nvcc))["nvcc"].startswith(tone)
    assert "nvcc" not in lines(Machine(CPU_TORCH, nvcc=nvcc))


@pytest.mark.parametrize(
    ("kernels", "fails"),
    [
        (("sm_75", "sm_80", "sm_100", "sm_120", "compute_120"), True),
        (("sm_60", "sm_80"), False),
        (("sm_80", "compute_50"), False),
        (("sm_62",), True),
        (("sm_90a", "compute_90a"), True),
        (("of a form that is not known",), False),
    ],
)
def test_a_gpu_without_torch_kernels_is_reported(kernels: tuple[str, ...], fails: bool) -> None:
    machine = Machine(replace(CUDA_TORCH, gpus=(GTX_1080,), kernels=kernels), DRIVER)
    assert ("kernels" in lines(machine)) is fails


def test_tf32_settings_have_no_effect_below_compute_capability_8() -> None:
    assert lines(with_gpus(H100))["TF32"] == (
        "plain: torch's default: on in cudnn.allow_tf32, where FP32 has 10 bits, in FP32 replays too"
    )
    assert lines(with_gpus(T4))["TF32"].endswith("no effect here, where it needs compute capability 8.0")


FRAMEWORKS = {
    "accelerate": ("1.15.0", "fp16 is dropped", "fp16 is scaled"),
    "lightning": ("2.6.6", "becomes bf16", "fp16 is scaled"),
    "lightning.fabric": ("2.6.6", "becomes bf16", "fp16 is scaled"),
    "transformers": ("6.0", "", ""),
}


def test_frameworks_with_equal_behavior_share_a_line_and_unread_ones_are_named() -> None:
    def said(torch: InstalledTorch) -> list[tuple[str, str]]:
        every = judged(Machine(torch, frameworks=FRAMEWORKS))
        return [(judgment.tone, judgment.says) for judgment in every if judgment.topic == "framework"]

    unknown = ("plain", "transformers 6.0: ampdbg did not find in its source what fp16 becomes here")
    assert said(CPU_TORCH) == [
        ("doubtful", "accelerate 1.15.0: fp16 is dropped (read in the source)"),
        ("doubtful", "lightning 2.6.6 and lightning.fabric 2.6.6: becomes bf16 (read in the source)"),
        unknown,
    ]
    together = "accelerate 1.15.0, lightning 2.6.6 and lightning.fabric 2.6.6: fp16 is scaled (read in the source)"
    assert said(replace(CUDA_TORCH, gpus=(H100,))) == [("plain", together), unknown]


def test_op_lists_come_from_the_tables_if_torch_ships_no_header() -> None:
    tables = replace(CPU_TORCH, op_lists={"header": {}, "table": {"FP32": ["exp"], "BANNED": ["b"]}})
    assert lines(Machine(tables))["op lists"].startswith("doubtful: torch ships no autocast_mode.h")
    assert lines(Machine(CPU_TORCH))["op lists"].startswith("good: 2 ops of FP32 from torch's own")


def test_nothing_is_emulated_on_a_gpu() -> None:
    assert lines(with_gpus(H100))["emulation"].startswith("plain: none on cuda:0")
    assert lines(Machine(CPU_TORCH))["emulation"].startswith("good: CUDA's autocast on the CPU")


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_doctor_page_fits_the_width_in_ascii(width: int) -> None:
    text = draw(
        page(replace(with_gpus(GTX_1080, H100), frameworks=FRAMEWORKS)), Look(width, color=False, unicode=False)
    )
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= width

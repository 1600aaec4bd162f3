"""The emulation of CUDA on a CPU leaves no trace: torch is the same before and after the context."""

import contextlib
import importlib
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.jit import _builtins
from torch.utils import checkpoint
from torch.utils._device import DeviceContext

from ampdbg.precision.autocast_policy import weight_casts
from ampdbg.precision.emulation import cuda_on_cpu

OWNERS = (
    torch,
    torch.Tensor,
    torch.nn.Module,
    torch.cuda,
    torch.cuda.nvtx,
    torch.amp.autocast_mode,
    torch.amp.autocast,
    torch.amp.grad_scaler,
    torch.amp.GradScaler,
    torch.cuda.amp,
    torch.cuda.amp.autocast,
    torch.cuda.amp.GradScaler,
    checkpoint,
    DeviceContext,
)
KEYS = ("BackendSelect", "AutocastCPU", "AutocastCUDA", "CPU", "AutogradCPU")


def attributes() -> dict[str, int]:
    """The identity of every attribute of torch that the emulation could touch."""
    return {f"{owner.__name__}.{name}": id(value) for owner in OWNERS for name, value in vars(owner).items()}


def registrations() -> dict[str, list[str]]:
    return {key: sorted(torch._C._dispatch_get_registrations_for_dispatch_key(key)) for key in KEYS}


def kernels() -> dict[str, bool]:
    """Whether each op with a kernel for any of KEYS has one for each: the dispatcher's own view."""
    names = {name for listed in registrations().values() for name in listed if name.startswith("aten::")}
    return {
        f"{name} {key}": torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for name in names for key in KEYS
    }


def autocast_state() -> tuple[object, ...]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
    )


def everything() -> tuple[object, ...]:
    return attributes(), registrations(), kernels(), autocast_state(), dict(_builtins._get_builtin_table())


def zeros_and_ones(n: int) -> Tensor:
    return torch.zeros(n) + torch.ones_like(torch.empty(n))


class PlannedError(Exception):
    """Raised by a test inside the context."""


def train_a_little() -> None:
    model = torch.nn.Sequential(torch.nn.Conv1d(2, 4, 3), torch.nn.Flatten(), torch.nn.Linear(32, 3)).cuda()
    scaler = torch.amp.GradScaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cuda"):
        loss = model(torch.randn(4, 2, 10, device="cuda")).pow(2).sum()
    (torch.fft.rfft(torch.randn(8, device="cuda").half()) / 2).abs()  # this registers kernels of its own
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def leave_normally() -> None:
    for _ in range(5):
        with cuda_on_cpu():
            train_a_little()


def leave_inside_autocast_by_an_error_of_torch() -> None:
    with contextlib.suppress(RuntimeError), cuda_on_cpu():
        train_a_little()
        with torch.autocast("cuda"):
            torch.randn(4, 4) @ torch.randn(4, 4)
            torch.randn(2, 3) @ torch.randn(2, 3)


def leave_nested() -> None:
    with cuda_on_cpu():
        with contextlib.suppress(PlannedError), cuda_on_cpu():
            train_a_little()
            raise PlannedError
        train_a_little()


def leave_after_scripting() -> None:
    with cuda_on_cpu():
        torch.jit.script(zeros_and_ones)
    assert torch.equal(torch.jit.script(zeros_and_ones)(2), torch.ones(2))


def leave_while_only_some_parts_were_entered() -> None:
    """The last part fails to start: the changes of the first parts must be undone too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim, "SGD", fail)  # the last part, the names of CUDA, starts by making an optimizer
        with contextlib.suppress(PlannedError), cuda_on_cpu():
            pytest.fail("the body must not be reached")


def fail(parameters: object) -> None:
    raise PlannedError


WAYS_OUT: tuple[Callable[[], None], ...] = (
    leave_normally,
    leave_inside_autocast_by_an_error_of_torch,
    leave_nested,
    leave_after_scripting,
    leave_while_only_some_parts_were_entered,
)


def native_answers() -> list[Tensor]:
    """Results that differ between the CPU's own policy and kernels and CUDA's."""
    random = torch.Generator().manual_seed(0)
    image, kernel = torch.randn(1, 3, 8, 8, generator=random), torch.randn(4, 3, 3, 3, generator=random)
    with torch.autocast("cpu", dtype=torch.float16):
        half = torch.nn.functional.conv2d(image, kernel)
        # These ops run in float16 on a CPU, in float32 on CUDA.
        return [half, half.exp(), half.sum(), half.pow(2), torch.nn.functional.conv_transpose2d(half, kernel)]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("leave", WAYS_OUT, ids=lambda way: way.__name__)
def test_the_emulation_leaves_torch_and_its_native_kernels_unchanged(leave: Callable[[], None]) -> None:
    train_on_cpu_once()
    before, answers = everything(), native_answers()
    leave()
    for now, then in zip(everything(), before, strict=True):
        assert now == then
    assert not weight_casts
    for answer, expected in zip(native_answers(), answers, strict=True):
        assert answer.dtype is expected.dtype
        assert torch.equal(answer, expected)


def train_on_cpu_once() -> None:
    """Lets torch do the work that it defers to its first use: lazy imports, schema caches."""
    with cuda_on_cpu():
        train_a_little()


def test_the_policy_of_cuda_applies_only_inside_the_context() -> None:
    outside = [answer.dtype for answer in native_answers()]
    with cuda_on_cpu():
        with cuda_on_cpu():
            pass  # the inner context does not end the outer one
        inside = [answer.dtype for answer in native_answers()]
    assert inside == [torch.float16, torch.float32, torch.float32, torch.float32, torch.float16]
    assert outside != inside


def test_the_emulation_prints_nothing_and_imports_no_compiler() -> None:
    """The program runs in a fresh process: torch warns of an overridden kernel only once per process.

    From the first optimizer on, torch 2.6 keeps a temporary folder until the interpreter ends.
    """
    program = """
import sys, warnings
warnings.simplefilter("error")
import torch
from ampdbg.precision.emulation import cuda_on_cpu
from ampdbg.probes.unfollowed import exclude_from_compile
exclude_from_compile()
assert "torch._dynamo" not in sys.modules
for _ in range(2):
    with cuda_on_cpu(), torch.autocast("cuda"):
        (torch.randn(4, 4, device="cuda") @ torch.randn(4, 4)).exp().sum()
        torch.amp.GradScaler()
with_a_folder = sys.modules.get("torch.distributed.nn.jit.instantiator")
if hasattr(with_a_folder, "_TEMP_DIR"):
    with_a_folder._TEMP_DIR.cleanup()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_torch_compile_may_be_called_first_while_a_gpu_is_emulated() -> None:
    trace_rules = importlib.import_module("torch._dynamo.trace_rules")
    with cuda_on_cpu():
        assert trace_rules.get_torch_obj_rule_map.__wrapped__()


def test_the_emulation_leaves_the_warning_filters_of_the_user_unchanged() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", category=ResourceWarning)
        before = list(warnings.filters)
        with cuda_on_cpu():
            assert list(warnings.filters) == before
        assert list(warnings.filters) == before


def of_a_product(x: Tensor) -> Tensor:
    c = x * x
    return torch.tanh(c * 1e-4) + torch.mm(x, x) + c.sum()


def scripted_ops(x: Tensor) -> list[str]:
    """The ops that TorchScript makes of the function under the current autocast state, including casts."""
    scripted: Any = torch.jit.script(of_a_product)
    graph = scripted.graph_for(x)
    return [node.kind() for node in graph.nodes() if node.kind().startswith("aten::")]


class Latent(torch.Tensor):
    """As in BigGAN-PyTorch: its ``to`` needs an attribute that derived tensors lack."""

    kind: str

    def to(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError(self.kind)


def test_a_cast_does_not_call_the_to_method_of_a_tensor_subclass() -> None:
    latent = torch.randn(4, 8).as_subclass(Latent)
    with cuda_on_cpu(), torch.autocast("cuda"):
        assert torch.nn.Linear(8, 2)(latent[:3]).dtype is torch.float16


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
def test_scripted_code_is_cast_as_on_cuda() -> None:
    """TorchScript makes a product float32, on CUDA too, if it does not know the dtype of a factor."""
    x = torch.full((4, 4), 300.0, dtype=torch.float16)
    without = scripted_ops(x)
    torch.set_autocast_enabled("cuda", True)  # TorchScript reads only this flag, and needs no GPU
    try:
        on_cuda = scripted_ops(x)
    finally:
        torch.set_autocast_enabled("cuda", False)
    with cuda_on_cpu(), torch.autocast("cuda"):
        emulated, dtypes = scripted_ops(x), (torch.jit.script(of_a_product)(x).dtype, (x * x).dtype)
    assert emulated == on_cuda != without
    assert {"aten::_autocast_to_full_precision", "aten::_autocast_to_reduced_precision"} < set(on_cuda)
    assert dtypes == (torch.float32, torch.float16)

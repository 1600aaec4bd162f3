"""The emulated GPU: code for one GPU runs on a CPU."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from ampdbg.errors import ScriptError
from ampdbg.script.gpu import emulated_capability, emulated_gpu
from ampdbg.script.launch import processes_here
from tests.commands.program import start
from tests.script.test_run import run_with_page


@pytest.fixture(autouse=True)
def _gpu() -> Iterator[None]:
    with emulated_gpu():
        yield


def test_code_may_use_cuda_streams() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.cuda.stream(None), torch.cuda.StreamContext(torch.cuda.Stream(priority=-1)):
        x = torch.ones(2, device="cuda")
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.set_stream(torch.cuda.default_stream())
    assert x.sum().item() == 2


def test_accelerator_calls_and_an_optimizer_step_do_not_reach_the_driver() -> None:
    torch.accelerator.synchronize()
    assert torch.accelerator.current_stream().query()
    # From torch 2.15 on the optimizer asks whether a graph is captured.
    weight = torch.ones(2, device="cuda", requires_grad=True)
    weight.sum().backward()
    torch.optim.AdamW([weight], lr=0.5, weight_decay=0.0).step()
    assert weight.tolist() == pytest.approx([0.5, 0.5])


def test_code_may_limit_and_query_gpu_memory() -> None:
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert isinstance(torch.cuda.memory_summary(), str)
    assert list(torch.cuda.memory_snapshot()) == []


@pytest.mark.parametrize("ids", [None, [0]])
def test_data_parallel_on_one_device_computes_the_same_as_its_module(ids: list[int] | None) -> None:
    inner = nn.Linear(4, 2).cuda()
    model = nn.DataParallel(inner, device_ids=ids)
    x = torch.ones(3, 4, device="cuda")
    with torch.autocast("cuda"):
        assert model(x).dtype is torch.float16
    model(x).sum().backward()
    assert torch.equal(model(x), inner(x))
    assert inner.weight.grad is not None
    assert list(model.state_dict()) == ["module.weight", "module.bias"]


def test_the_current_stream_is_not_captured() -> None:
    assert not torch.cuda.is_current_stream_capturing()  # the optimizers of torch before 2.15 ask this


def test_the_current_accelerator_is_a_gpu_whose_autocast_uses_float16() -> None:
    assert torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator()
    assert device is not None
    assert device.type == "cuda"
    data = torch.utils.data.TensorDataset(torch.arange(4))
    batches = torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True)
    with torch.autocast(device.type):
        assert [
            torch.mm(batch[0][:, None].float().to(device), torch.ones(1, 1, device=device)).dtype for batch in batches
        ] == [torch.float16, torch.float16]


@pytest.mark.parametrize(("told", "count"), [("2", 2), ("", 1), ("many", 1)])
def test_there_is_one_gpu_for_each_local_process_of_the_launcher(
    monkeypatch: pytest.MonkeyPatch, told: str, count: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    assert processes_here() == count
    with patch.object(torch.cuda, "is_available", lambda: False), emulated_gpu():
        assert torch.cuda.device_count() == torch.accelerator.device_count() == count


def test_compiled_code_runs_and_the_stream_lookup_of_dynamo_is_restored() -> None:
    compiler = vars(torch._C._dynamo).get("utils")
    before = getattr(compiler, "get_current_stream", None)  # torch 2.15 has it
    with emulated_gpu():
        double = torch.compile(lambda x: x * 2, backend="eager")
        assert double(torch.ones(2).cuda()).tolist() == [2.0, 2.0]
    assert getattr(compiler, "get_current_stream", None) is before
    assert before is None or vars(torch._dynamo.utils)["get_current_stream"] is before


def test_the_cuda_version_is_a_dotted_string_of_at_least_12_0() -> None:
    assert torch.version.cuda is not None
    assert tuple(map(int, torch.version.cuda.split("."))) >= (12, 0)


@pytest.mark.parametrize("asked", ["7", "sm_75", "A100"])
def test_an_invalid_compute_capability_is_an_error(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPDBG_CAPABILITY", asked)
    with pytest.raises(ScriptError, match=r"such as 7\.5 or 8\.0"):
        emulated_capability()


IN_NAME = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, whose capability is its own")
BFLOAT16 = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="bf16")
net = torch.nn.Linear(8, 8)
net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
for step in range(3):
    with accelerator.autocast():
        loss = net(torch.randn(4, 8).to(accelerator.device)).float().square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
print(accelerator.device.type, accelerator.mixed_precision)
"""


@pytest.mark.parametrize(("capability", "code"), [("", 0), ("9.0", 0), pytest.param("7.5", 1, marks=IN_NAME)])
def test_accelerate_trains_in_bfloat16_only_if_the_gpu_supports_bfloat16(
    capability: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(BFLOAT16)
    result = start(tmp_path, "run", "--emulate", "train.py", AMPDBG_CAPABILITY=capability)
    assert (result.code, result.stdout) == (code, "" if code else "cuda bf16\n"), result.stderr
    assert ("bf16 mixed precision requires" if code else "No fault found: none of 3 steps skipped") in result.stderr


BY_DEVICE = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
for step in range(12):
    x = torch.randn(4, 8, device="cuda")
    dtype = torch.float16 if CONDITION else torch.float32
    optimizer.zero_grad()
    nn.functional.linear(x.to(dtype), net.weight.to(dtype)).float().square().mean().backward()
    optimizer.step()
"""
"""Lowers its ops itself, without autocast and without a loss scale."""


@pytest.mark.parametrize("condition", ["x.device.type == 'cuda'", "torch.cuda.is_available()"])
def test_a_note_says_that_code_which_asks_a_tensor_for_its_device_runs_in_fp32(tmp_path: Path, condition: str) -> None:
    record, page, code = run_with_page(tmp_path, BY_DEVICE.replace("CONDITION", condition))
    is_of_tensor = "device.type" in condition
    assert ("where code asks for tensor.device.type == 'cuda' before it lowers ops, they run in FP32" in page) is (
        is_of_tensor
    )
    assert (code, [found.code for found in record.findings]) == ((0, []) if is_of_tensor else (1, ["misuse-no-scaler"]))
    assert ("✗ FP16 ops run without a loss scale" in page) is not is_of_tensor

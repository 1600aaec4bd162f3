"""Tests of the dtypes in which a run stores, computes, reduces and steps, against the requested precision."""

import contextlib
import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import device_mesh
from torch.optim.swa_utils import AveragedModel

from ampdbg.commands.output import PLAIN
from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.probes.watch import Watch, watch
from ampdbg.record.file import from_json, to_json
from ampdbg.record.run import KindDtypes, Record
from ampdbg.report.formats import written as text_of
from ampdbg.report.view import CommandContext
from tests.script.test_run import run_with_page

HALF = torch.bfloat16
BF16, FP32 = ("bfloat16",), ("float32",)


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.outer = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(self.norm(self.inner(x.to(self.inner.weight.dtype))))
        return out


Made = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, *, lowers: bool = False, count: int = 3) -> Iterator[int]:
    for step in range(count):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=HALF, enabled=lowers):
            out = net(torch.randn(4, 8))
        out.float().square().mean().backward()
        optimizer.step()
        yield step


def trained(net: nn.Module, make: Made = adamw, **options: Any) -> Record:
    optimizer = make(net)
    with watch(net, optimizer) as watched:
        for _ in steps(net, optimizer, **options):
            pass
    return diagnose(watched.record())


def by_kind(record: Record) -> dict[str, KindDtypes]:
    return {one.kind: one for one in record.dtypes}


def codes(record: Record) -> list[tuple[str, str]]:
    return [(found.code, found.severity) for found in record.findings]


def contract_findings(record: Record) -> list[tuple[str, str]]:
    return [found for found in codes(record) if found[0] in ("half-weights", "rounded-buffer", "not-half")]


# The table


def test_float32_weights_under_autocast_are_computed_in_half() -> None:
    record = trained(Net(), lowers=True)
    linears = by_kind(record)["linears"]
    assert (linears.stored, linears.computed, linears.gradients, linears.states) == (FP32, BF16, FP32, FP32)
    assert (linears.accumulated, linears.masters, linears.reduced, linears.averages) == (FP32, (), (), ())
    assert (codes(record), record.cast_buffers) == ([], ())
    assert from_json(to_json(record)) == record


def test_half_weights_that_the_code_upcasts_are_also_computed_in_float32() -> None:
    class Wide(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = nn.functional.linear(x, self.inner.weight.float(), self.inner.bias.float())
            out: torch.Tensor = self.outer(self.norm(hidden.to(HALF)))
            return out

    kinds = by_kind(trained(Wide().to(HALF)))
    assert kinds["linears"].computed == ("bfloat16", "float32")
    assert kinds["norms"].computed == BF16


class WithState(torch.optim.SGD):
    """Keeps a float32 master of each parameter in its state, as TransformerEngine's FusedAdam does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["master_param"] = parameter.detach().float()
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        return super().step(closure)


class WithAttribute(torch.optim.SGD):
    """Keeps masters in lists of its own, as apex's FusedAdam does."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.param_groups_master = [{"params": [one.detach().float() for one in self.param_groups[0]["params"]]}]


@pytest.mark.parametrize("kind", [WithState, WithAttribute])
def test_masters_are_found_in_the_state_and_in_the_attributes_of_an_optimizer(kind: Any) -> None:
    record = trained(Net().to(HALF), lambda net: kind(net.parameters(), lr=1e-2))
    linears = by_kind(record)["linears"]
    assert (linears.stored, linears.masters) == (BF16, FP32)
    assert linears.states == (BF16 if kind is WithState else ())


def test_float32_copies_that_the_optimizer_steps_are_the_masters_of_half_weights() -> None:
    net = Net().to(HALF)
    masters = [parameter.detach().float().requires_grad_() for parameter in net.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    with watch(net, optimizer) as watched:
        net(torch.randn(4, 8)).float().square().mean().backward()
        for master, parameter in zip(masters, net.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        optimizer.step()
    kinds = by_kind(diagnose(watched.record()))
    assert {(one.stored, one.masters, one.states) for one in kinds.values()} == {(BF16, FP32, FP32)}


class Outer(torch.optim.AdamW):
    """Keeps float32 masters in an inner optimizer, or steps the same weights with it."""

    def __init__(self, params: Any, *, masters: bool) -> None:
        super().__init__(params, lr=1e-2)
        own = [one for group in self.param_groups for one in group["params"]]
        self.copies = {one: one.detach().float().clone().requires_grad_() if masters else one for one in own}
        self.inner = torch.optim.AdamW([*self.copies.values()], lr=1e-2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for own, copy in self.copies.items():
            assert own.grad is not None
            copy.grad = own.grad.to(copy.dtype)
        self.inner.step()
        for own, copy in self.copies.items():
            own.copy_(copy)


@pytest.mark.parametrize("masters", [True, False])
def test_masters_of_an_inner_optimizer_are_found_and_each_kind_has_one_row(*, masters: bool) -> None:
    net = Net().to(HALF)
    record = trained(net, lambda net: Outer(net.parameters(), masters=masters))
    assert [one.kind for one in record.dtypes] == ["linears", "biases", "norms"]
    assert {one.optimizer for one in record.dtypes} == {f"{__name__}.Outer"}
    own = FP32 if masters else BF16
    for kind in record.dtypes:
        assert (kind.stored, kind.states, kind.masters) == (BF16, own, FP32 if masters else ())
    assert len(record.steps) == 3


def test_the_dtype_of_an_averaged_model_is_recorded() -> None:
    net = Net()
    optimizer, averaged = adamw(net), AveragedModel(Net().to(HALF))
    with watch(net, optimizer) as watched:
        for _ in steps(net, optimizer):
            averaged.update_parameters(net)
    assert {one.averages for one in watched.record().dtypes} == {BF16}
    assert {one.averages for one in trained(Net()).dtypes} == {()}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("compresses", [False, True])
def test_ddp_reduces_gradients_in_their_dtype_unless_a_hook_compresses_them(*, compresses: bool) -> None:
    def bf16_compress_hook() -> None:
        """torch's hook of this name needs a GPU."""

    net = nn.parallel.DistributedDataParallel(Net())
    if compresses:
        net._comm_hooks.append((bf16_compress_hook, None))
    assert by_kind(trained(net))["linears"].reduced == (BF16 if compresses else FP32)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("stored", [torch.float32, HALF])
def test_the_mixed_precision_policy_of_fsdp_gives_the_computed_and_reduced_dtype(stored: torch.dtype) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard") or not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("this torch has it elsewhere, or not for a CPU")
    mesh, net = device_mesh.init_device_mesh("cpu", (1,)), Net().to(stored)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32)
    fsdp.fully_shard(net.inner, mesh=mesh, mp_policy=policy)
    fsdp.fully_shard(net, mesh=mesh, mp_policy=policy)
    record = trained(net)
    linears = by_kind(record)["linears"]
    assert (linears.stored, linears.computed, linears.gradients) == ((str(stored)[6:],), BF16, BF16)
    assert (linears.accumulated, linears.reduced) == ((str(stored)[6:],), FP32)
    assert record.asked == {"MixedPrecisionPolicy": "param_dtype=bfloat16"}
    assert ("half-weights" in [code for code, _ in codes(record)]) is (stored is HALF)


# The requested precision


def asked_of_accelerate(net: nn.Module, precision: str) -> None:
    state = pytest.importorskip("accelerate.state").AcceleratorState
    state._reset_state(reset_partial_state=True)
    pytest.importorskip("accelerate").Accelerator(mixed_precision=precision, cpu=True).prepare(net)


@pytest.mark.parametrize(
    ("stored", "precision", "found"),
    [
        (HALF, "bf16", [("half-weights", "warning")]),
        (HALF, "no", [("half-weights", "info")]),
        (torch.float32, "bf16", []),
        (torch.float32, "no", []),
    ],
)
def test_half_weights_are_a_warning_under_mixed_precision_and_an_info_without(
    stored: torch.dtype, precision: str, found: list[tuple[str, str]]
) -> None:
    net = Net().to(stored)
    asked_of_accelerate(net, precision)
    record = trained(net, lambda net: torch.optim.SGD(net.parameters(), lr=0.5))
    assert record.asked == {"Accelerate's mixed_precision": precision}
    assert contract_findings(record) == found
    if precision == "bf16" and found:
        said = record.findings[[code for code, _ in codes(record)].index("half-weights")].message
        assert said == (
            "Accelerate's mixed_precision 'bf16' asks for half ops on float32 weights, but the trained weights are "
            "stored in bfloat16 (linears, biases and norms), without float32 masters"
        )


def test_half_weights_with_masters_or_a_custom_step_are_accepted_in_mixed_precision() -> None:
    class Kahan(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    def with_a_step_of_its_own(net: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        vars(optimizer)["step"] = partial(optimizer.step)
        return optimizer

    others: list[Made] = [
        lambda net: WithState(net.parameters(), lr=0.5),
        lambda net: Kahan(net.parameters(), lr=0.5),
        with_a_step_of_its_own,
    ]
    for make in others:
        net = Net().to(HALF)
        asked_of_accelerate(net, "bf16")
        assert contract_findings(trained(net, make)) == []


@pytest.mark.parametrize(
    ("precision", "found"), [("bf16-mixed", [("half-weights", "warning")]), ("32-true", [("half-weights", "info")])]
)
def test_the_precision_of_lightning_is_read_from_its_module(precision: str, found: list[tuple[str, str]]) -> None:
    net = Net().to(HALF)
    object.__setattr__(net, "_trainer", SimpleNamespace(precision=precision))
    record = trained(net, lambda net: torch.optim.SGD(net.parameters(), lr=0.5))
    assert (contract_findings(record), record.asked) == (found, {"Lightning's precision": precision})
    object.__setattr__(net, "_trainer", SimpleNamespace(precision="bf16-true"))
    assert contract_findings(trained(net, lambda net: torch.optim.SGD(net.parameters(), lr=0.5))) == []


def test_half_precision_that_a_framework_does_not_apply_is_reported() -> None:
    net = Net()
    asked_of_accelerate(net, "fp16")
    record = trained(net)
    assert (codes(record), record.verdict) == ([("not-half", "warning")], "inconclusive")
    assert "although Accelerate's mixed_precision 'fp16' asks for it" in record.findings[0].message
    assert codes(trained(net, lowers=True)) == []


# Buffers that are cast with their model


class Rotary(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1e4 ** -(torch.arange(0, 64, 2) / 64), persistent=False)


def cast(net: nn.Module) -> None:
    net.to(HALF)


def cast_parameters_alone(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data.to(HALF)


def recomputed(net: nn.Module) -> None:
    net.half().to(HALF)
    net.inv_freq = 1e4 ** -(torch.arange(0, 64, 2) / 64)


def trained_after(change: Callable[[nn.Module], object], net: nn.Module, each: Callable[[], object] = int) -> Record:
    """A record of a loop whose model is cast while it is watched."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    with watch(net, optimizer) as watched:
        change(net)
        for _ in steps(net, optimizer):
            each()
    return diagnose(watched.record())


def test_rotary_frequencies_cast_with_the_model_are_reported_with_the_angle_error() -> None:
    record = trained_after(cast, Rotary())
    assert contract_findings(record) == [("rounded-buffer", "warning")]
    found = record.findings[[code for code, _ in codes(record)].index("rounded-buffer")]
    assert found.source is not None
    assert found.source.text == "net.to(HALF)"
    frequencies = 1e4 ** -(torch.arange(0, 64, 2) / 64)
    off = 1000 * float((frequencies.to(HALF).float() - frequencies).abs().max())
    assert f"rounded inv_freq to bfloat16: at position 1,000 angles are up to {off:.4g} rad off" in found.message


def test_rotary_frequencies_of_few_positions_may_be_rounded() -> None:
    net = Rotary()
    object.__setattr__(net, "max_seq_len_cached", 64)  # as transformers keeps config.max_position_embeddings
    assert contract_findings(trained_after(cast, net)) == []


@pytest.mark.parametrize("change", [cast_parameters_alone, recomputed])
def test_rotary_frequencies_kept_or_recomputed_in_float32_are_healthy(change: Callable[[nn.Module], None]) -> None:
    assert contract_findings(trained_after(change, Rotary())) == []


@pytest.mark.parametrize(("dtype", "found"), [(HALF, [("rounded-buffer", "warning")]), (torch.float16, [])])
def test_batchnorm_averages_are_reported_when_cast_to_bfloat16_but_not_to_float16(
    dtype: torch.dtype, found: list[tuple[str, str]]
) -> None:
    net = Net()
    net.norm = nn.BatchNorm1d(8)  # type: ignore[assignment]
    assert contract_findings(trained_after(lambda net: net.to(dtype), net)) == found
    net.eval().float()
    assert contract_findings(trained_after(lambda net: net.to(dtype), net)) == []


@pytest.mark.parametrize("is_written", [True, False])
def test_a_rounded_router_bias_is_reported_only_if_the_loop_adds_to_it(*, is_written: bool) -> None:
    net = Net()
    net.register_buffer("expert_bias", torch.zeros(4))
    record = trained_after(cast, net, lambda: is_written and net.get_buffer("expert_bias").add_(1e-3))
    assert contract_findings(record) == [("rounded-buffer", "warning")] * is_written


def test_casts_of_scripted_lazy_and_meta_modules_work_while_watched() -> None:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", torch.full((3,), 0.3))
            self.register_buffer("expert_bias", torch.zeros(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    net, scripted, lazy = Net(), torch.jit.script(Scripted()), nn.LazyBatchNorm1d()
    with watch(net, adamw(net)) as watched:
        for module in (scripted, lazy, nn.LSTM(2, 2), nn.BatchNorm1d(3, device="meta")):
            module.to(HALF)
    cast = scripted.inv_freq.dtype, lazy.get_buffer("running_mean").dtype
    assert (*cast, watched.failure) == (HALF, HALF, "")


def test_the_patches_that_note_casts_are_removed_after_an_error() -> None:
    original, net = nn.Module._apply, Rotary()
    with pytest.raises(ZeroDivisionError), watch(net, adamw(net)):
        raise ZeroDivisionError
    assert nn.Module._apply is original
    assert "update_parameters" in vars(AveragedModel)
    assert AveragedModel.update_parameters.__module__ == "torch.optim.swa_utils"


def test_the_watch_keeps_no_model_alive() -> None:
    watched = Watch(None, ()).start()
    with contextlib.closing(SimpleNamespace(close=watched.stop)):
        net = Rotary()
        optimizer = adamw(net)
        net.to(HALF)
        for _ in steps(net, optimizer):
            pass
        alive = weakref.ref(net)
        assert [one.name for one in watched.record().cast_buffers] == ["inv_freq"]
        del net, optimizer
        gc.collect()
        assert alive() is None


SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("inv_freq", 1e4 ** -(torch.arange(0, 16, 2) / 16))

    def forward(self, x):
        angles = torch.arange(x.shape[-2])[:, None].float() * self.inv_freq.float()
        return self.layer(x) * torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype)

def main():
    torch.manual_seed(0)
    net = Net()
    {cast}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(5):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled={lowers}):
            loss = net(torch.randn(8, 16, dtype=net.layer.weight.dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

main()
"""


def test_run_names_the_line_that_cast_a_buffer_and_shows_the_dtypes_in_one_line(tmp_path: Path) -> None:
    record, page, code = run_with_page(tmp_path, SCRIPT.format(cast="net.bfloat16()", lowers=False), options=())
    assert (contract_findings(record), code) == ([("rounded-buffer", "warning")], 1)
    assert "net.bfloat16()" in page
    assert "Weights: stored, computed, gradients and states" not in page  # SGD has no states
    assert "Weights: stored, computed and gradients bfloat16; no FP32 masters found" in page


def test_run_shows_the_dtypes_of_float32_weights_only_in_verbose_output(tmp_path: Path) -> None:
    record, page, code = run_with_page(tmp_path, SCRIPT.format(cast="", lowers=True), options=())
    assert (codes(record), code, record.asked) == ([], 0, {"autocast": "bfloat16"})
    assert "Weights:" not in page
    full = text_of(record, CommandContext("", "", verbose=True), PLAIN, "text")
    assert "\nWeights: stored and gradients FP32; computed bfloat16\n" in full
    assert len(full.splitlines()) == len(text_of(record, CommandContext("", ""), PLAIN, "text").splitlines()) + 1


def test_a_page_has_a_dtype_table_if_weights_are_in_half() -> None:
    net = Net().to(HALF)
    net.norm.float()
    net.norm.register_forward_pre_hook(lambda module, given: (given[0].float(),))
    net.norm.register_forward_hook(lambda module, given, out: out.to(HALF))
    record = trained(net)
    page = text_of(record, CommandContext("", ""), PLAIN, "markdown")
    assert "Weights: stored, computed, gradients and states FP32/bfloat16; no FP32 masters found" in page
    assert "| kind | stored | computed | gradients | states |" in page
    assert "| linears | bfloat16 | bfloat16 | bfloat16 | bfloat16 |" in page
    assert "| norms | FP32 | FP32 | FP32 | FP32 |" in page
    assert ">computed</th>" in text_of(record, CommandContext("", ""), PLAIN, "html")


MASTERS = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).bfloat16()
masters = [p.detach().float().requires_grad_() for p in net.parameters()]
optimizer = torch.optim.AdamW(masters, lr=1e-3)
for _ in range(5):
    net(torch.randn(4, 8).bfloat16()).float().square().mean().backward()
    for master, p in zip(masters, net.parameters()):
        master.grad, p.grad = p.grad.float(), None
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, net.parameters()):
            p.copy_(master)
"""


@pytest.mark.slow
def test_run_finds_the_half_weights_whose_masters_the_optimizer_steps(tmp_path: Path) -> None:
    record, page, code = run_with_page(tmp_path, MASTERS, options=())
    assert {one.kind: (one.stored, one.masters) for one in record.dtypes} == dict.fromkeys(
        ("linears", "biases", "norms"), (BF16, FP32)
    )
    assert (codes(record), code) == ([], 0)
    assert "Weights: stored and computed bfloat16; states and masters FP32" in page


LIGHTNING = """
import torch, tests.models.torchvision_on_cpu, lightning as L
from torch import nn

class M(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 8).to(torch.{dtype})

    def training_step(self, batch, i):
        return self.net(batch[0]).float().square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 8)), batch_size=4)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
L.Trainer(max_epochs=1, precision="bf16-mixed", accelerator="cpu", devices=1, **quiet).fit(M(), data)
"""

FABRIC = """
import torch, tests.models.torchvision_on_cpu
from torch import nn
from lightning.fabric import Fabric

fabric = Fabric(precision="bf16-mixed", devices=1, accelerator="cpu")
net = nn.Linear(8, 8).to(torch.{dtype})
net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
for _ in range(5):
    fabric.backward(net(torch.randn(4, 8)).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("text", "who"), [(LIGHTNING, "Lightning's precision"), (FABRIC, "Fabric's precision")])
@pytest.mark.parametrize(("dtype", "found"), [("bfloat16", [("half-weights", "warning")]), ("float32", [])])
def test_run_knows_the_requested_precision_of_lightning_and_fabric(
    text: str, who: str, dtype: str, found: list[tuple[str, str]], tmp_path: Path
) -> None:
    importlib.import_module("tests.models.torchvision_on_cpu")  # lightning imports it
    pytest.importorskip("lightning")
    record, _, code = run_with_page(tmp_path, text.format(dtype=dtype), options=())
    assert (contract_findings(record), code, record.asked[who]) == (found, len(found), "bf16-mixed")

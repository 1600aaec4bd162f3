"""The promises of native AMP in "Automatic Mixed Precision examples" of PyTorch's notes.

This file tests sparse gradients, gradients of gradients, several losses and optimizers, and replicas in threads.
Elsewhere: clipping, unscaling, accumulation, the order of all calls, and every example loop as a healthy one in
tests/zoo_misuse; custom_fwd and custom_bwd, checkpointing, regions and code that says ``cuda`` in
tests/precision/test_code_for_cuda.py; the cache of weights in tests/precision/test_autocast_values.py; PyTorch's own
scaler tests while watched in tests/probes/test_scaling_parity.py.
"""

import contextlib
import copy
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ampdbg
from ampdbg.config.schema import Config
from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.errors import WorkloadError
from ampdbg.precision.emulation import cuda_on_cpu
from ampdbg.probes.watch import watch
from ampdbg.record.run import Record, Step
from ampdbg.training.loop import train
from tests.written import written

HEAD = """
import torch
from torch import nn

def data():
    return list(torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(1)))
"""


def config_of(folder: Path, code: str, **keys: Any) -> Config:
    """The config of code that defines ``Net``, ``step``, and ``data`` if it does not use the default."""
    return written(folder, HEAD + code, **{"model": "Net", "data": "data", "step": "step", **keys})


def scanned(folder: Path, code: str, **keys: Any) -> Record:
    """The record of a scan of the code."""
    return diagnose(train(config_of(folder, code, **keys)))


def nonfinite(step: Step) -> dict[str, tuple[int, int]]:
    """The numbers of inf and NaN in the gradient of each parameter."""
    return {counts.name: (counts.inf, counts.nan) for group in step.groups for counts in group.parameters}


SPARSE = """
class Net(nn.Module):
    def __init__(self, spread=1.0):
        super().__init__()
        self.words, self.head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)
        self.spread = spread
        nn.init.constant_(self.head.weight, 1.0)

    def forward(self, words):
        return self.head(self.words(words).sum(1) * self.spread)

def data():
    return [torch.tensor([[1, 3, 1], [3, 5, 5]])] * 2

def step(model, batch):
    return model(batch).float().square().mean()

def optimizers(model):
    rest = torch.optim.SGD(model.head.parameters(), lr=0.01)
    return [torch.optim.SparseAdam(model.words.parameters(), lr=0.01), rest]
"""


def sparse(folder: Path, level: str, scale: float = 65536.0, **keys: Any) -> Record:
    precision = {"level": level, "loss_scale": {"init": scale}}
    return scanned(folder, SPARSE, optimizer="optimizers", precision=precision, train={"steps": 4}, **keys)


@pytest.mark.parametrize("level", [pytest.param("O1", marks=pytest.mark.slow), "O2"])
def test_a_scan_of_a_sparse_embedding_is_healthy(level: str, tmp_path: Path) -> None:
    record = sparse(tmp_path, level, scale=1024)
    assert (record.verdict, record.findings) == ("healthy", ())
    assert [step.skipped for step in record.steps] == [False] * 4


@pytest.mark.parametrize("level", ["O1", pytest.param("O2", marks=pytest.mark.slow)])
def test_an_overflow_after_a_sparse_embedding_is_named(level: str, tmp_path: Path) -> None:
    record = sparse(tmp_path, level, model=("Net", {"spread": 60000.0}))
    assert record.findings[0].code == "forward-overflow"
    assert record.findings[0].source is not None
    assert record.findings[0].source.function == "forward"
    assert all(step.skipped for step in record.steps)
    # Only the looked-up rows 1, 3 and 5 of ten have a gradient.
    assert sum(nonfinite(record.steps[0])["words.weight"]) <= 3 * 4


def test_clip_grad_norm_with_sparse_gradients_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        WorkloadError, match=r"^train\.clip_grad_norm: torch clips no sparse gradients; leave the key out"
    ):
        scanned(tmp_path, SPARSE, optimizer="optimizers", train={"steps": 2, "clip_grad_norm": 1.0})


def trained_sparsely(bad: int | None) -> tuple[Any, list[torch.Tensor]]:
    """The record, and the embedding after each of four steps of SparseAdam with AdamW. Row 7 overflows in ``bad``."""
    torch.manual_seed(0)
    words, head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)
    optimizers = [torch.optim.SparseAdam(words.parameters(), lr=0.01), torch.optim.AdamW(head.parameters(), lr=0.01)]
    scaler, after = torch.amp.GradScaler("cuda", init_scale=1024.0), [words.weight.detach().clone()]
    with watch(nn.ModuleDict({"words": words, "head": head}), optimizers) as watcher:
        for number in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = head(words(torch.tensor([1, 3, 1]))).float().square().mean()
            if number == bad:
                loss = loss + words(torch.tensor([7, 7])).square().sum() * 1e36
            scaler.scale(loss).backward()
            assert words.weight.grad is not None
            scaled = words.weight.grad.coalesce()
            scaler.unscale_(optimizers[0])
            unscaled = words.weight.grad.coalesce()
            assert torch.equal(unscaled.values(), scaled.values() / scaler.get_scale())
            assert unscaled.indices().tolist() == [[1, 3, 7] if number == bad else [1, 3]]
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            after.append(words.weight.detach().clone())
    return diagnose(watcher.record()), after


def test_sparse_adam_steps_on_unscaled_rows() -> None:
    with cuda_on_cpu():
        record, after = trained_sparsely(bad=None)
    assert (record.verdict, [step.skipped for step in record.steps]) == ("healthy", [False] * 4)
    moved = [(now != before).any(1).nonzero().flatten().tolist() for before, now in itertools.pairwise(after)]
    assert moved == [[1, 3]] * 4
    # Adam's first step has the size of the learning rate at any loss scale.
    torch.testing.assert_close((after[1] - after[0])[[1, 3]].abs(), torch.full((2, 4), 0.01))


def test_sparse_adam_skips_on_inf_and_the_overflowing_row_is_counted() -> None:
    with cuda_on_cpu():
        record, after = trained_sparsely(bad=2)
    assert [step.skipped for step in record.steps] == [False, False, True, False]
    assert nonfinite(record.steps[2]) == {"words.weight": (4, 0)}
    assert [torch.equal(now, before) for before, now in itertools.pairwise(after)] == [False, False, True, False]
    assert [(finding.code, finding.severity) for finding in record.findings] == [("scale-calibration", "info")]


LOW = {"loss_scale": {"init": 1024.0}}
"""A loss scale at which these models train from the first step on."""

PENALTY = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.outer(self.inner(x).tanh())

def step(model, batch):
    x = batch.requires_grad_()
    out = model(x)
    with torch.autocast("cuda", enabled=False):
        [scaled] = torch.autograd.grad(out.float().sum() * SCALE, x, create_graph=True)
    return out.float().square().mean() + (scaled.float() / SCALE).square().sum()
"""


def test_a_gradient_penalty_unscaled_by_hand_is_healthy(tmp_path: Path) -> None:
    record = scanned(tmp_path, PENALTY.replace("SCALE", "1024.0"), train={"steps": 6}, precision=LOW)
    assert (record.verdict, record.findings) == ("healthy", ())


@pytest.mark.slow
@pytest.mark.parametrize("scale", [3e6, -3e6])
def test_an_overflow_in_the_gradient_of_a_penalty_is_named_and_cured(scale: float, tmp_path: Path) -> None:
    config_of(tmp_path, PENALTY.replace("SCALE", f"({scale})"), train={"steps": 6})
    record = ampdbg.bisect(tmp_path / "config.yaml")
    finding = record.findings[0]
    assert (finding.code, finding.phase, record.verdict) == ("forward-overflow", "forward", "precision")
    # The value contains no loss scale: it is the factor in the code.
    assert finding.evidence["value"] == 3e6
    assert finding.source is not None
    assert finding.source.text.startswith("[scaled] = torch.autograd.grad(out.float().sum()")
    assert {pin.module for pin in record.pins} == {"inner", "outer"}


@pytest.mark.parametrize(("scale", "starts"), [("3e6", 1), ("300.0", 0)])
def test_the_range_site_of_a_penalty_gradient_is_in_the_forward_phase(scale: str, starts: int, tmp_path: Path) -> None:
    config_of(tmp_path, PENALTY.replace("SCALE", scale))
    record = ampdbg.ranges(tmp_path / "config.yaml")
    inner = [site for site in record.sites if site.source and "torch.autograd.grad(" in site.source.text]
    assert [(site.phase, site.op, site.overflow) for site in inner] == [
        ("forward", "aten._to_copy.default", "starts" if starts else "")
    ]
    assert inner[0].abs_max == pytest.approx(float(scale), rel=2**-8)
    assert [finding.code for finding in record.findings if finding.source == inner[0].source] == (
        ["forward-overflow"] * starts
    )


def dtypes_in_nested_regions(device: str, *, caches: bool) -> list[torch.dtype]:
    """The dtypes of a weight's products in a region, in a nested region of another dtype, and in the first again."""
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(2, 4)
    with torch.autocast(device, dtype=torch.float16, cache_enabled=caches):
        first = x @ weight
        with torch.autocast(device, dtype=torch.bfloat16, cache_enabled=caches):
            second = x @ weight
        return [first.dtype, second.dtype, (x @ weight).dtype]


def test_a_cached_weight_cast_fails_in_a_nested_region_of_another_dtype() -> None:
    """CUDA and the CPU's own autocast reuse a region's cached casts in nested regions of any dtype."""
    for emulated, device in ((contextlib.nullcontext, "cpu"), (cuda_on_cpu, "cuda")):
        with emulated(), pytest.raises(RuntimeError, match=r"same dtype.*BFloat16 != c10::Half"):
            dtypes_in_nested_regions(device, caches=True)
    with cuda_on_cpu():
        half, bfloat16 = torch.float16, torch.bfloat16
        assert dtypes_in_nested_regions("cuda", caches=False) == [half, bfloat16, half]


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in module.parameters()])


def two_models(bad: int | None) -> tuple[Record, list[tuple[bool, bool]]]:
    """Two losses over two models, two optimizers, one scaler. In step ``bad`` the second loss overflows.

    Returns the record, and for each step whether the first and the second model moved.
    """
    torch.manual_seed(0)
    models = nn.ModuleDict({"calm": nn.Linear(4, 4), "steep": nn.Linear(4, 1)})
    calm, steep = models["calm"], models["steep"]
    optimizers = [torch.optim.SGD(calm.parameters(), lr=0.01), torch.optim.AdamW(steep.parameters(), lr=0.01)]
    moved = []
    with cuda_on_cpu(), watch(models, optimizers) as watcher:
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        for number, x in enumerate(torch.randn(4, 8, 4)):
            before = [flat(calm), flat(steep)]
            for optimizer in optimizers:
                optimizer.zero_grad()
            with torch.autocast("cuda"):
                first = 2 * calm(x).float().square().mean()
                second = steep(calm(x).detach()).float().square().mean()
            scaler.scale(first).backward()
            scaler.scale(second * (1e36 if number == bad else 1.0)).backward()
            scaler.unscale_(optimizers[0])
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            losses = [step.loss for step in watcher.steps[-2:]]
            assert losses == pytest.approx([first.item(), second.item()]) or number == bad
            after = [flat(calm), flat(steep)]
            moved.append((not torch.equal(before[0], after[0]), not torch.equal(before[1], after[1])))
    return diagnose(watcher.record()), moved


def test_each_optimizer_decides_for_itself_whether_to_skip() -> None:
    healthy, moved = two_models(bad=None)
    assert (healthy.verdict, healthy.findings, moved) == ("healthy", (), [(True, True)] * 4)
    record, moved = two_models(bad=2)
    assert moved == [(True, True), (True, True), (True, False), (True, True)]
    assert [step.skipped for step in record.steps] == [False] * 5 + [True, False, False]
    assert [step.scale for step in record.steps] == [1024.0] * 6 + [512.0] * 2
    assert record.groups == ("group 0", "group 1")
    assert [group.index for group in record.steps[5].groups] == [1]
    assert nonfinite(record.steps[5]).keys() == {"steep.weight", "steep.bias"}
    assert record.misuses == ()


TWO_LOSSES = """
class Net(nn.Module):
    def __init__(self, gain=1.0):
        super().__init__()
        self.calm, self.steep, self.gain = nn.Linear(4, 1), nn.Linear(4, 1), gain

    def forward(self, x):
        return self.calm(x), self.steep(x) * self.gain

def step(model, batch):
    calm, steep = model(batch)
    return {"calm": calm.float().square().mean(), "steep": steep.float().abs().mean()}

def optimizers(model):
    return [torch.optim.SGD(model.calm.parameters(), lr=0.1), torch.optim.AdamW(model.steep.parameters(), lr=0.01)]
"""


@pytest.mark.parametrize("gain", [1.0, 60000.0])
def test_a_scan_names_the_loss_that_overflows_and_the_other_loss_trains_on(gain: float, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"optimizer": "optimizers", "train": {"steps": 4}}
    record = scanned(
        tmp_path, TWO_LOSSES, model=("Net", {"gain": gain}), precision={"loss_scale": {"init": 1024.0}}, **keys
    )
    calm = [step.losses["calm"] for step in record.steps]
    assert len(set(calm)) == 4
    if gain == 1.0:
        assert (record.verdict, record.findings) == ("healthy", ())
        return
    assert record.findings[0].code == "forward-overflow"
    assert record.findings[0].source is not None
    assert record.findings[0].source.text == "return self.calm(x), self.steep(x) * self.gain"
    assert [set(nonfinite(step)) for step in record.steps] == [{"steep.weight", "steep.bias"}] * 4


class Noting(nn.Module):
    """Records the dtype of the forward pass of each thread."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)
        self.seen: dict[int, torch.dtype] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        self.seen[threading.get_ident()] = y.dtype
        return y.float()


def replica_of(model: Noting) -> Noting:
    """As ``replicate`` makes it: its weights are not leaves, so their gradients add up in those of the model."""
    replica = copy.copy(model)
    replica._modules = {"body": copy.deepcopy(model.body)}
    for name, weight in model.body.named_parameters():
        del replica.body._parameters[name]
        setattr(replica.body, name, weight.clone())
    return replica


def on_replicas(model: Noting, chunks: list[torch.Tensor]) -> torch.Tensor:
    """Does what DataParallel does, without its devices: a replica and a thread for each chunk.

    ``replicate`` copies only to GPUs, and ``parallel_apply`` needs their streams: neither runs on a CPU. As there,
    each thread enters autocast if its caller has.
    """
    enabled = torch.is_autocast_enabled("cuda")

    def run(replica: Noting, chunk: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", enabled=enabled):
            return replica(chunk)

    with ThreadPoolExecutor(len(chunks)) as threads:
        return torch.cat(list(threads.map(run, [replica_of(model) for _ in chunks], chunks)))


def test_replicas_in_threads_compute_in_float16_and_add_gradients_in_float32() -> None:
    torch.manual_seed(0)
    model, chunks = Noting(), list(torch.randn(2, 8, 4))
    alone: list[torch.Tensor] = []
    with cuda_on_cpu():
        for chunk in chunks:
            with torch.autocast("cuda"):
                loss = model(chunk).square().sum()
            alone += torch.autograd.grad(loss, model.body.weight)
        model.seen.clear()
        with torch.autocast("cuda"):
            output = on_replicas(model, chunks)
        output.square().sum().backward()
    assert set(model.seen.values()) == {torch.float16}
    assert model.body.weight.grad is not None
    assert all(torch.equal(gradient, gradient.half().float()) for gradient in alone)
    assert torch.equal(model.body.weight.grad, alone[0] + alone[1])


def test_autocast_does_not_apply_in_a_new_thread() -> None:
    model = Noting()
    with cuda_on_cpu(), torch.autocast("cuda"):
        thread = threading.Thread(target=model, args=(torch.randn(2, 4),))
        thread.start()
        thread.join()
        model(torch.randn(2, 4))
    assert set(model.seen.values()) == {torch.float32, torch.float16}
    assert model.seen[threading.get_ident()] is torch.float16


@pytest.mark.parametrize("bad", [None, 1])
def test_an_overflow_on_one_replica_skips_the_step(bad: int | None) -> None:
    torch.manual_seed(0)
    model = Noting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with cuda_on_cpu(), watch(model, optimizer) as watcher:
        scaler, chunks = torch.amp.GradScaler("cuda", init_scale=128.0), list(torch.randn(2, 8, 4))
        if bad is not None:
            chunks[bad][0] = 60000.0
            torch.nn.init.constant_(model.body.weight[1], 1.0)
        before = flat(model)
        with torch.autocast("cuda"):
            loss = on_replicas(model, chunks).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    [step] = watcher.steps
    assert (step.skipped, torch.equal(flat(model), before)) == (bad is not None, bad is not None)
    assert nonfinite(step).keys() == ({"body.weight", "body.bias"} if bad is not None else set())


def test_data_parallel_on_one_device_is_scanned_like_its_module(tmp_path: Path) -> None:
    code = f"{TWO_LOSSES}\ndef build():\n    return nn.DataParallel(Net(60000.0))\n"
    record = scanned(tmp_path, code, model="build", train={"steps": 2})
    assert (record.findings[0].code, record.findings[0].module) == ("forward-overflow", "module")

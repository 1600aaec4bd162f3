"""A run is scanned, measured and searched with every kind of tensor in its model or batch: no kind stops a replay."""

from pathlib import Path

import pytest
import torch

from ampdbg.config.schema import Config
from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.pinning.bisection import bisect_run
from ampdbg.replay.replay import Manner, replay_step
from ampdbg.replay.run import prepared
from ampdbg.replay.snapshot import take_snapshot
from ampdbg.training.loop import profile_ranges, train
from tests.written import written

WORKLOAD = """
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

class Meshed(TwoTensor):
    mesh = object()  # as DTensor's
    def __tensor_flatten__(self):
        return ["mesh", "a"], None

class Refusing(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
    def __init__(self, inner):
        self.inner = inner
    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if op in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            return cls(args[0].inner)
        raise NotImplementedError(str(op))

class Refused(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in ("isfinite", "abs", "amax", "max", "aminmax", "detach", "sum"):
            raise TypeError(str(function))
        return super().__torch_function__(function, types, args, kwargs or {})

def emptied():
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor

def made(kind):
    ones = torch.ones(3, 2)
    return {
        "repeated": lambda: torch.ones(1, 2).expand(3, 2),
        "overlapping": lambda: torch.arange(6.0).as_strided((3, 3), (1, 1)),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        "jagged": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        "sparse": lambda: ones.to_sparse(),
        "sparse rows": lambda: ones.to_sparse_csr(),
        "mkldnn": lambda: ones.to_mkldnn(),
        "quantized": lambda: torch.quantize_per_tensor(ones, 0.1, 0, torch.quint8),
        "quantized by channel": lambda: torch.quantize_per_channel(ones, torch.ones(3), torch.zeros(3), 0, torch.qint8),
        "masked": lambda: masked_tensor(torch.ones(3), torch.tensor([True, False, True])),
        "fake": lambda: FakeTensorMode().from_tensor(ones),
        "meta": lambda: torch.ones(3, device="meta"),
        "complex": lambda: torch.ones(3, dtype=torch.complex64).conj(),
        "float8": lambda: ones.to(torch.float8_e4m3fn),
        "repeated without end": lambda: torch.ones(1).expand(10**7, 10**7),
        "float4": lambda: torch.ones(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "of a mesh": lambda: Meshed(torch.ones(3), torch.ones(3)),
        "of two": lambda: TwoTensor(torch.ones(3), torch.ones(3)),
        "refusing ops": lambda: Refusing(torch.ones(3)),
        "refusing functions": lambda: torch.ones(3).as_subclass(Refused),
        "emptied": emptied,
        "inference": lambda: torch.inference_mode()(torch.ones)(3),
    }[kind]()

class Net(nn.Module):
    def __init__(self, kinds, factor, place):
        super().__init__()
        self.body, self.head, self.factor, self.steps = nn.Linear(4, 8), nn.Linear(8, 1), factor, 0
        for number, kind in enumerate(kinds):
            if place in ("buffer", "everywhere"):
                self.register_buffer(f"held{number}", made(kind))
            if place in ("attribute", "everywhere"):
                held = made(kind)
                setattr(self, f"kept{number}", held)
                setattr(self, f"more{number}", [held, {"again": made(kind)}])
    def _apply(self, fn, recurse=True):
        return self  # not every kind can be moved
    def forward(self, x):
        self.steps += 1
        return self.head(self.body(x) * self.factor)

IN_NO_BATCH = ("meta", "emptied")

def data(kinds, place):
    generator = torch.Generator().manual_seed(0)
    in_batches = [kind for kind in kinds if place == "batch" or (place == "everywhere" and kind not in IN_NO_BATCH)]
    held = [made(kind) for kind in in_batches]
    return [(torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator), held) for _ in range(2)]

def step(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()
"""

PLACES = ("buffer", "attribute", "batch")
KINDS = (
    "repeated,overlapping,nested,jagged,sparse,sparse rows,mkldnn,quantized,quantized by channel,masked,fake,meta,"
    "complex,float8,repeated without end,of two,of a mesh,refusing ops,refusing functions,emptied,inference"
).split(",") + ["float4"] * hasattr(torch, "float4_e2m1fn_x2")  # which torch 2.6 does not have

IN_NO_BATCH = ("meta", "emptied")
"""Kinds that no batch can hold: torch refuses to move such a batch to a device."""

CASES = {place: [kind for kind in KINDS if place != "batch" or kind not in IN_NO_BATCH] for place in PLACES}
TOGETHER = [pytest.param("everywhere", KINDS, id="every kind in every place")]
ALONE = [
    pytest.param(place, [kind], id=f"{kind} as a {place}", marks=pytest.mark.slow)
    for place, kinds in CASES.items()
    for kind in kinds
]

FAILING, HEALTHY = 1e6, 1.0


def config(folder: Path, kinds: list[str], factor: float, place: str) -> Config:
    arguments = {"kinds": kinds, "place": place}
    model, train = ("Net", {**arguments, "factor": factor}), {"steps": 2, "device": "cpu"}
    return written(folder, WORKLOAD, model=model, data=("data", arguments), step="step", train=train)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("place", "kinds"), TOGETHER + ALONE)
def test_scan_ranges_and_bisect_work_with_every_kind_of_tensor(place: str, kinds: list[str], tmp_path: Path) -> None:
    healthy = config(tmp_path, kinds, HEALTHY, place)
    record = diagnose(train(healthy))
    assert record.verdict == "healthy"
    assert [made.why for made in record.investigations] == ["end"]
    assert not any(replay.error for made in record.investigations for replay in made.replays)
    assert profile_ranges(healthy).sites
    failing = bisect_run(config(tmp_path, kinds, FAILING, place))
    assert failing.findings[0].code == "forward-overflow"
    assert not any(replay.error for made in failing.investigations for replay in made.replays)
    assert failing.search is not None
    assert failing.search.outcome == "found"


COMPLEX = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2, dtype=torch.complex64))
    def forward(self, x):
        made = torch.view_as_real(x.to(torch.complex64) @ self.weight)
        return made[..., 0].mean() + 3 * made[..., 1].mean()

def data():
    return [torch.ones(8, 4)] * 2
"""


@pytest.mark.parametrize(("scale", "is_finite"), [(1.0, True), (1e39, False)])
def test_the_gradient_of_complex_weights_keeps_its_imaginary_part(
    scale: float, is_finite: bool, tmp_path: Path
) -> None:
    with prepared(written(tmp_path, COMPLEX, model="Net", data="data")) as run:
        snapshot = take_snapshot(run.workload.model, 0, (next(run.workload.batches()),))
        replayed = replay_step(run, snapshot, Manner("float32", scale), keep_gradients=True)
    [gradient] = replayed.gradients.values()
    assert gradient.shape == (4, 2, 2)
    assert gradient[..., 1].isfinite().all() == is_finite
    assert gradient[..., 1].max() == 1.5 or not is_finite
    assert replayed.replay.gradients == (() if is_finite else ("weight",))

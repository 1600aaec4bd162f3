"""The training loop on small real workloads: what it records, and that it changes nothing."""

import math
import random
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from ampdbg import api
from ampdbg.config.schema import Config
from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.errors import AmpdbgError, UserCodeError, WorkloadError
from ampdbg.observer import UNOBSERVED, Observer
from ampdbg.record.run import Record, Step
from ampdbg.replay.run import prepared
from ampdbg.training.loop import profile_ranges, train, train_prepared
from tests.observing import observing
from tests.siblings import slow_except
from tests.written import written

WORKLOAD = """
import itertools
import math
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.body = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(width, 1)
    def forward(self, x):
        return self.head(F.dropout(self.norm(self.body(x)).relu(), 0.3, self.training)).squeeze(-1)

def compiled():
    net = Net()
    net.body.compile(backend="eager")
    net.unused = torch.jit.script(net.unused)
    return net

class Loud(Net):
    def forward(self, x):
        return self.head(self.norm(self.body(x)) * 60000 * 60000).squeeze(-1)

def scripted(kind=Net):
    return torch.jit.script(kind())

def loud():
    return scripted(Loud)

def data(bad=-1, value=math.nan):
    generator = torch.Generator().manual_seed(3)
    batches = [(torch.randn(16, 4, generator=generator), torch.randn(16, generator=generator)) for _ in range(6)]
    if bad >= 0:
        batches[bad][0][7, 2] = value
    return batches

def two_losses(model, batch):
    x, y = batch
    out = model(x)
    return {"first": F.mse_loss(out, y), "second": out.square().mean()}

class Widened(nn.Module):
    def __init__(self, factor=1e6):
        super().__init__()
        self.factor, self.body, self.head = factor, nn.Linear(4, 8), nn.Linear(8, 1)
    def forward(self, x):
        return self.head((self.body(x).half() * self.factor).float()).squeeze(-1)

def two(model, fused=False, groups=None):
    return [torch.optim.AdamW(part.parameters(), fused=fused) for part in (model.body, model.head)]

def fit(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])

def overflowing(model, batch):
    return (model.body(batch[0]) * 60000 * 2).float().mean()

def overflowing_at_60000(model, batch):
    return (model.body(batch[0]) * batch[0].amax()).float().square().mean()

def hunted(model, batch):
    torch.autograd.set_detect_anomaly(True)
    h = model.body(batch[0]) * 900
    return ((h @ h.t() / 1e6).softmax(-1) @ h).float().square().mean()

def says_cuda(model, batch):
    model.cuda()
    x, y = batch[0].cuda(), batch[1].to("cuda")
    with torch.cuda.amp.autocast(enabled=False):
        return F.mse_loss(model(x.float()), y)

def bce(model, batch):
    return F.binary_cross_entropy(model(batch[0]).sigmoid(), (batch[1] > 0).float())

def fails(model, batch):
    return model(batch[0][:, :3]).mean()

def distances(model, batch):
    features = model.body(batch[0])
    squares = features.float().square().sum(1, keepdim=True)
    return (squares + squares.t()).addmm_(features, features.t(), alpha=-2).mean()

def sparse():
    return nn.Embedding(10, 3, sparse=True)

def tokens():
    return [torch.arange(6).view(2, 3)] * 3

def embed_loss(model, batch):
    return model(batch).square().sum()

def sparse_product(model, batch):
    return torch.sparse.mm(torch.eye(16).to_sparse(), model.body(batch[0])).mean()

def transformed(model, batch):
    return torch.fft.rfft(model.body(batch[0]), dim=-1).abs().square().mean()

def root_of_zero(model, batch):
    h = model.body(batch[0])
    gone = h * (batch[0][:, 2:3] != 0)
    return F.mse_loss(model.head(h / (1 + (gone * gone).sum(-1, keepdim=True).sqrt())).squeeze(-1), batch[1])

CALLS = itertools.count()  # nobody can wind it back

def drawing(model, batch):
    return F.mse_loss(model.head(model.body(batch[0])).squeeze(-1), batch[1]) * (1.0 + next(CALLS) % 7 / 10)

class Checked(nn.Module):
    def __init__(self, gain, check):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.gain, self.check, self.calls = gain, check, 0

    def forward(self, x):
        self.calls += self.training
        h = self.body(x) * (self.gain if self.calls > 3 else 1.0)
        scores = h @ h.T
        out = self.head((scores - scores.mean(-1, keepdim=True)).softmax(-1) @ h)
        if self.check == "finite":
            assert torch.isfinite(out).all(), "what comes out is wrong"
        if self.check == "always" and self.calls > 3:
            raise ValueError("it is time")
        if self.check == "half" and self.calls > 3:
            assert out.dtype is torch.float32, "this is no float32"
        if self.check == "dtypes" and self.calls > 3:
            out = out @ torch.ones(2, 2).double()
        return out

def checked_loss(model, batch):
    return (model(batch[0]).float() - batch[1][:, None]).pow(2).mean()

class GAN(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.discriminator = nn.Linear(2, 4), nn.Linear(4, 1)

    def configure_optimizers(self):
        sides = (self.generator, self.discriminator)
        return [torch.optim.SGD(side.parameters(), lr=0.1) for side in sides]

    def training_step(self, batch, index):
        real = batch[0]
        fake = self.generator(real[:, :2])
        judged = self.discriminator(torch.cat([real, fake.detach()])).squeeze(-1)
        truth = (torch.arange(2 * len(real), device=real.device) < len(real)).float()
        return {
            "generator": F.softplus(-self.discriminator(fake)).mean(),
            "discriminator": F.binary_cross_entropy_with_logits(judged, truth),
        }
"""

LOSS = "torch.nn.functional:mse_loss"
NOT_COMPARED = "was not compared with FP32"


def run(folder: Path, *, observer: Observer = UNOBSERVED, loop: Callable[..., Record] = train, **keys: Any) -> Record:
    keys = {"model": "Net", "data": "data", "loss": LOSS, **keys}
    return diagnose(loop(written(folder, WORKLOAD, **keys), observer=observer))


def step_function(name: str) -> dict[str, Any]:
    return {"loss": None, "step": name}


def test_a_healthy_run_is_recorded_step_by_step_with_its_unused_modules(tmp_path: Path) -> None:
    seen: list[Step] = []
    record = run(tmp_path, observer=observing(step=seen.append), train={"steps": 12})
    assert record.verdict == "healthy"
    assert not any(NOT_COMPARED in note for note in record.unseen.notes)
    assert tuple(seen) == record.steps
    assert [step.step for step in record.steps] == list(range(12))
    assert record.environment.emulated is not torch.cuda.is_available()
    assert record.groups[:2] == ("body.weight", "body.bias")
    assert record.unseen.modules_never_called == ("unused",)
    assert record.unseen.parameters_without_gradient == ("unused.weight", "unused.bias")
    assert all(
        step.grad_norm is not None and math.isfinite(step.grad_norm) for step in record.steps if not step.skipped
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_wholly_scripted_model_is_treated_as_one_module(level: str, tmp_path: Path) -> None:
    precision = {"level": level, "dtype": "bfloat16"}
    whole = run(tmp_path, model="scripted", precision=precision, train={"steps": 2})
    assert (whole.error, len(whole.steps)) == ("", 2)
    assert whole.groups[:2] == ("body.weight", "body.bias")
    assert whole.unseen.notes == ("module '' is scripted and cannot be watched inside",)
    bad = run(tmp_path, model="loud", precision={"level": level}, train={"steps": 2})
    assert [(finding.code, finding.module) for finding in bad.findings[:1]] == [("forward-overflow", "")]


def test_a_run_leaves_the_random_state_of_the_process_unchanged(tmp_path: Path) -> None:
    torch.manual_seed(5)
    random.seed(5)
    expected = (torch.rand(1), random.random())
    torch.manual_seed(5)
    random.seed(5)
    run(tmp_path, train={"steps": 2})
    assert (torch.rand(1), random.random()) == expected


DYNAMIC = {"init": 64, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2}
SCALES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "O0": ({"level": "O0"}, [1.0] * 5),
    "float32": ({"dtype": "float32"}, [1.0] * 5),
    "bfloat16": ({"dtype": "bfloat16"}, [1.0] * 5),
    "a static scale": ({"loss_scale": 128}, [128.0] * 5),
    "a dynamic scale": ({"loss_scale": DYNAMIC}, [64.0, 64.0, 256.0, 256.0, 1024.0]),
}


@pytest.mark.parametrize("what", slow_except(["O0", "bfloat16"], SCALES))
def test_the_loss_scale_of_each_precision_follows_the_config(what: str, tmp_path: Path) -> None:
    precision, scales = SCALES[what]
    record = run(tmp_path, precision=precision, train={"steps": 5})
    assert [(step.scale, step.skipped) for step in record.steps] == [(scale, False) for scale in scales]
    assert record.verdict == "healthy"
    assert what not in ("O0", "float32") or not record.environment.emulated


SPARSE: dict[str, Any] = {"model": "sparse", "data": "tokens", "optimizer": ("torch.optim:SGD", {"lr": 0.1})}


@pytest.mark.slow
def test_accumulated_micro_batches_average_their_gradients(tmp_path: Path) -> None:
    # All batches of `tokens` are equal, so the mean over three equals one.
    one, three = (
        run(tmp_path, **SPARSE, **step_function("embed_loss"), train={"steps": 2, "accumulate": accumulate})
        for accumulate in (1, 3)
    )
    for alone, together in zip(one.steps, three.steps, strict=True):
        assert together.loss == pytest.approx(alone.loss)
        assert together.grad_norm == pytest.approx(alone.grad_norm)


def test_clip_grad_norm_limits_the_unscaled_gradients(tmp_path: Path) -> None:
    keys = {"precision": {"loss_scale": 1024}, "train": {"steps": 1, "clip_grad_norm": 1e-2}}
    optimizer = ("torch.optim:SGD", {"lr": 1.0})
    with prepared(written(tmp_path, WORKLOAD, model="Net", data="data", loss=LOSS, optimizer=optimizer, **keys)) as run:
        parameters = list(run.workload.model.parameters())
        before = [parameter.detach().clone() for parameter in parameters]
        record = train_prepared(run, observer=UNOBSERVED, command="scan", replays=0)
        change = torch.nn.utils.get_total_norm(
            [new.detach() - old for new, old in zip(parameters, before, strict=True)]
        )
    assert (record.steps[0].grad_norm or 0.0) > 0.1
    assert change.item() == pytest.approx(1e-2, rel=1e-3)


def test_several_losses_are_scaled_and_recorded_by_name(tmp_path: Path) -> None:
    record = run(tmp_path, **step_function("two_losses"), train={"steps": 3})
    first = record.steps[0]
    assert set(first.losses) == {"first", "second"}
    assert first.loss == pytest.approx(sum(first.losses.values()))


@pytest.mark.slow
def test_compiled_and_scripted_modules_are_analysed_and_noted(tmp_path: Path) -> None:
    record = run(tmp_path, model="compiled", **step_function("overflowing"), train={"steps": 2})
    assert record.findings[0].code == "forward-overflow"
    assert record.unseen.notes == (
        "module 'unused' is scripted and cannot be watched inside",
        "module 'body' is compiled; its eager code was analysed",
    )


def test_a_pin_cures_an_overflow_and_a_pin_of_an_unknown_module_is_refused(tmp_path: Path) -> None:
    pinned: dict[str, Any] = {"precision": {"pins": ["bo*"]}, "train": {"steps": 8}}
    assert run(tmp_path, **step_function("overflowing"), **pinned).verdict == "healthy"
    with pytest.raises(WorkloadError, match=r"no module is named 'boddy'.*'body'"):
        run(tmp_path, precision={"pins": ["boddy"]})


def test_a_batch_with_nan_is_named_with_its_sample_and_the_poisoned_buffer(tmp_path: Path) -> None:
    record = run(tmp_path, data=("data", {"bad": 3}), train={"steps": 6})
    assert (record.findings[0].code, record.findings[0].step) == ("data-nonfinite", 3)
    assert record.findings[0].evidence["first_index"] == [7, 2]
    assert record.verdict == "other"
    # BatchNorm keeps the NaN: one skipped step makes evaluation NaN for good.
    assert "buffer-poisoned" in [finding.code for finding in record.findings]


def test_an_error_caused_by_autocast_names_its_line(tmp_path: Path) -> None:
    record = run(tmp_path, **step_function("bce"), train={"steps": 3})
    [finding] = record.findings
    assert finding.code == "misuse-bce"
    assert finding.source is not None
    assert (Path(finding.source.file).name, finding.source.function) == ("work.py", "bce")
    assert finding.source.text.startswith("return ")


UNWATCHED = (
    "^from step 2 on ampdbg noted nothing, because it failed itself: ZeroDivisionError: a fault of the watcher "
    r"\(test_loop.py, line \d+\); please report it$"
)


@pytest.mark.parametrize("loop", [train, profile_ranges])
def test_a_run_whose_watcher_fails_raises_an_error_with_the_record_so_far(
    loop: Callable[..., Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError("a fault of the watcher")

    seen: list[Step] = []

    def step(one: Step) -> None:
        seen.append(one)
        if one.step == 1:
            monkeypatch.setattr("ampdbg.probes.gradients.gradient_norm", broken)

    with pytest.raises(AmpdbgError, match=UNWATCHED) as raised:
        run(tmp_path, loop=loop, observer=observing(step=step))
    assert not isinstance(raised.value, UserCodeError)
    record = raised.value.record
    assert isinstance(record, Record)
    assert [one.step for one in record.steps] == [one.step for one in seen] == [0, 1]


def test_only_a_dtype_mismatch_caused_by_autocast_is_explained_by_autocast(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match="same dtype, but got") as raised:
        run(tmp_path, **step_function("distances"))
    assert str(raised.value).endswith("this op takes only one dtype: cast its inputs to one, as with x.float()")
    assert "in distances" in raised.value.user_traceback
    assert run(tmp_path, **step_function("distances"), precision={"level": "O0"}).verdict == "healthy"
    with pytest.raises(UserCodeError, match="raised RuntimeError") as raised:
        run(tmp_path, **step_function("fails"))
    assert "autocast" not in str(raised.value)


@pytest.mark.slow
def test_anomaly_detection_enabled_by_the_user_does_not_end_the_run(tmp_path: Path) -> None:
    try:
        record = run(tmp_path, **step_function("hunted"), train={"steps": 2})
        assert torch.is_anomaly_enabled()
    finally:
        torch.autograd.set_detect_anomaly(False)
    assert [step.skipped for step in record.steps] == [True, True]
    assert record.findings[0].code == "forward-overflow"


def test_user_code_that_says_cuda_runs_on_a_cpu(tmp_path: Path) -> None:
    assert run(tmp_path, **step_function("says_cuda"), train={"steps": 3}).verdict == "healthy"


def test_a_missing_gpu_is_refused(tmp_path: Path) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    with pytest.raises(WorkloadError, match=rf"cuda:{count} was asked for"):
        run(tmp_path, train={"device": f"cuda:{count}"})


def test_an_interrupted_run_keeps_the_steps_before_the_interrupt(tmp_path: Path) -> None:
    def interrupt(step: Step) -> None:
        if step.step == 4:
            raise KeyboardInterrupt

    record = run(tmp_path, observer=observing(step=interrupt))
    assert record.interrupted
    assert [step.step for step in record.steps] == [0, 1, 2, 3, 4]


COMMANDS: dict[str, Any] = {"scan": api.scan, "bisect": api.bisect, "suggest-fp32": api.suggest_fp32}
INTERRUPTED = [(command, at) for command in COMMANDS for at in (1, 2, 3)]


@pytest.mark.parametrize("case", slow_except([("scan", 1), ("bisect", 2), ("suggest-fp32", 3)], INTERRUPTED), ids=str)
def test_a_run_interrupted_in_a_replay_keeps_its_steps(case: tuple[str, int], tmp_path: Path) -> None:
    command, at = case
    data = ("data", {"bad": 3, "value": 60000.0})
    train = {"steps": 6, "device": "cpu"}
    written(tmp_path, WORKLOAD, model="Net", data=data, step="overflowing_at_60000", train=train)
    replays: list[int] = []

    def interrupt(step: int, doing: str) -> None:
        replays.append(step)
        if len(replays) == at:
            raise KeyboardInterrupt

    def ask(step: Step) -> None:  # as the display of a command does if user code swallowed the signal
        if len(replays) >= at:
            raise KeyboardInterrupt

    try:
        record = COMMANDS[command](tmp_path / "config.yaml", observer=observing(replay=interrupt, step=ask))
    except KeyboardInterrupt:  # it would end the test run
        pytest.fail("nothing was kept")
    assert record.interrupted
    assert [step.step for step in record.steps] == [0, 1, 2, 3]
    assert replays == [3] * at


ON_A_CPU: dict[str, Any] = {"steps": 2, "device": "cpu"}


def test_a_sparse_product_without_a_cuda_kernel_is_explained(tmp_path: Path) -> None:
    keys: dict[str, Any] = {**step_function("sparse_product"), "train": ON_A_CPU}
    with pytest.raises(UserCodeError, match="addmm_sparse_cuda") as raised:
        run(tmp_path, **keys)
    assert str(raised.value).endswith("or make the matrix CSR, as with matrix.to_sparse_csr()")
    assert len(run(tmp_path, **keys, precision={"level": "O0"}).steps) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_a_half_transform_of_a_size_that_is_not_a_power_of_two_is_explained(tmp_path: Path) -> None:
    keys: dict[str, Any] = {**step_function("transformed"), "train": ON_A_CPU}
    odd = ("Net", {"width": 12})
    with pytest.raises(UserCodeError, match=r"got a signal size of\[12\]; under autocast .* cast it up first"):
        run(tmp_path, **keys, model=odd)
    for healthy in (
        run(tmp_path, **keys, model=("Net", {"width": 16}), precision={"loss_scale": {"init": 256.0}}),
        run(tmp_path, **keys, model=odd, precision={"level": "O0"}),
    ):
        assert [step.skipped for step in healthy.steps] == [False, False]


@pytest.mark.parametrize("bad", slow_except([0, -1], [0, 3, -1]))
def test_nan_gradients_without_overflow_are_named_as_true_nan_in_any_step(tmp_path: Path, bad: int) -> None:
    keys: dict[str, Any] = {"precision": {"loss_scale": 256.0}, "train": {"steps": 6}}
    record = run(tmp_path, data=("data", {"bad": bad, "value": 0.0}), **step_function("root_of_zero"), **keys)
    assert [(one.code, one.step) for one in record.findings] == ([("true-nan", bad)] if bad >= 0 else [])
    assert [step.step for step in record.steps if step.skipped] == ([bad] if bad >= 0 else [])


def test_a_step_that_no_replay_can_repeat_is_noted_as_not_compared_with_fp32(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"optimizer": {"args": {"lr": 1e-9}}, "train": {"steps": 3, "device": "cpu"}}
    record = run(tmp_path, **step_function("drawing"), **keys)
    (note,) = (note for note in record.unseen.notes if NOT_COMPARED in note)
    assert [finding.code for finding in record.findings if finding.severity != "info"] == []
    assert note.startswith("step 2 was not compared with FP32: its replay has a loss of ")


def checked(folder: Path, gain: float, check: str, dtype: str = "float16", replays: int = 2) -> Record:
    """The record of a model that checks its own output, and applies ``gain`` from step 3."""

    def loop(config: Config, observer: Observer) -> Record:
        return train(config, observer=observer, replays=replays)

    keys = {"precision": {"dtype": dtype}, "train": {"steps": 6}, **step_function("checked_loss")}
    return run(folder, loop=loop, model=("Checked", {"gain": gain, "check": check}), **keys)


def test_an_overflow_that_makes_user_code_raise_is_named(tmp_path: Path) -> None:
    record = checked(tmp_path, 600.0, "finite")
    found = record.findings[0]
    assert (record.verdict, record.steps_run, found.code, found.step) == ("precision", 4, "forward-overflow", 3)
    assert found.source is not None
    assert found.source.text == "scores = h @ h.T"
    assert record.error.splitlines()[0].endswith("raised AssertionError: what comes out is wrong")


OTHER: dict[str, tuple[Any, ...]] = {
    "in FP32 too": (1.0, "always"),
    "only in FP16, and no op goes wrong": (1.0, "half"),
    "torch itself says what is wrong": (600.0, "dtypes"),
    "nothing is half": (1e30, "finite", "float32"),
    "FP32 is not finite either": (1e30, "finite"),
    "nothing is run again": (600.0, "finite", "float16", 0),
}


@pytest.mark.parametrize(
    "case", slow_except(["in FP32 too", "FP32 is not finite either", "nothing is run again"], OTHER)
)
def test_an_error_not_traced_to_overflow_is_a_user_code_error_with_earlier_steps(tmp_path: Path, case: str) -> None:
    with pytest.raises(UserCodeError) as raised:
        checked(tmp_path, *OTHER[case])
    record = raised.value.record
    assert isinstance(record, Record)
    assert [step.step for step in record.steps] == [0, 1, 2]
    assert record.investigations == ()


def test_a_model_whose_own_check_passes_is_healthy(tmp_path: Path) -> None:
    assert checked(tmp_path, 1.0, "finite").verdict == "healthy"


def test_each_loss_of_a_gan_trains_only_its_own_side(tmp_path: Path) -> None:
    """The reference is a hand-written loop."""
    config = written(
        tmp_path, WORKLOAD, model="GAN", data="data", precision={"level": "O0"}, train={"steps": 3, "device": "cpu"}
    )
    with prepared(config) as prepared_run:
        record = train_prepared(prepared_run, observer=UNOBSERVED, command="scan", replays=2)
        trained = [parameter.detach().clone() for parameter in prepared_run.workload.model.parameters()]
    assert set(record.steps[0].losses) == {"generator", "discriminator"}

    scope: dict[str, Any] = {}
    exec(WORKLOAD, scope)
    gan = scope["GAN"]()
    sides, optimizers = (gan.generator, gan.discriminator), gan.configure_optimizers()
    for batch in scope["data"]()[:3]:
        losses = gan.training_step(batch, 0).values()
        gradients = [
            torch.autograd.grad(loss, list(side.parameters())) for loss, side in zip(losses, sides, strict=True)
        ]
        for side, own, optimizer in zip(sides, gradients, optimizers, strict=True):
            for parameter, gradient in zip(side.parameters(), own, strict=True):
                parameter.grad = gradient
            optimizer.step()
    assert all(map(torch.equal, trained, gan.parameters()))


OPTIONS = {
    "accumulate": "train.accumulate=2",
    "clip": "train.clip_grad_norm=1.0",
    "several losses": "step.target=work.py:two_losses",
    "two optimizers": "optimizer.target=work.py:two",
    "fused": "optimizer.args.fused=true",
    "static scale": "precision.loss_scale=128",
    "bfloat16": "precision.dtype=bfloat16",
    "O0": "precision.level=O0",
    "native": "precision.policy=native",
    "groups": "optimizer.groups=module",
    "pins": "precision.pins=[body]",
    "healthy": "model.args.factor=1.0",
}


PAIRS = list(combinations(OPTIONS, 2))
TWO_BY_TWO = list(zip(*[iter(OPTIONS)] * 2, strict=True))
"""Pairs that cover each option once."""


@pytest.mark.parametrize("names", slow_except(TWO_BY_TWO, PAIRS), ids=" and ".join)
def test_any_two_config_options_work_together(names: tuple[str, str], tmp_path: Path) -> None:
    train_keys = {"steps": 2, "device": "cpu"}
    overrides = [OPTIONS[name] for name in names]
    config = written(tmp_path, WORKLOAD, *overrides, model="Widened", data="data", step="fit", train=train_keys)
    record = diagnose(train(config))
    assert len(record.steps) == 2
    assert not any(replay.error for made in record.investigations for replay in made.replays)
    assert (record.verdict == "healthy") == ("healthy" in names)
    ranges = profile_ranges(config)
    assert {site.phase for site in ranges.sites} == {"forward", "backward"}

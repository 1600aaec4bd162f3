"""Precision modes: what each level lowers, scales and leaves alone, and how half models of Apex's O2 and O3 step."""

import contextlib
from pathlib import Path

import pytest
import torch

import ampdbg.precision.modes
from ampdbg.config.schema import Precision
from ampdbg.errors import WorkloadError
from ampdbg.formats import FLOAT16, FLOAT32
from ampdbg.levels import LEVELS, Level, format_of_config, levels_of
from ampdbg.precision.emulation import cuda_on_cpu
from ampdbg.precision.modes import PrecisionMode, clip, mode_of

CPU = torch.device("cpu")


def mode(level: str = "O1", **more: object) -> PrecisionMode:
    return mode_of(Precision.model_validate({"level": level, **more}), CPU)


def test_every_level_has_a_mode_and_every_mode_has_a_level() -> None:
    assert {type(mode(level)).__module__.rpartition(".")[2] for level in LEVELS} == {
        path.stem for path in Path(str(ampdbg.precision.modes.__file__)).parent.glob("*.py")
    } - {"__init__"}


def test_levels_are_read_from_mode_files_without_running_them(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text('import nothing\n\nLEVEL = {"name": "O3", "words": "all half"}\nMODE = None\n')
    assert list(levels_of(tmp_path)) == [Level("O3", "all half", mode="half")]


@pytest.mark.parametrize(
    ("level", "dtype", "computes_in"),
    [
        ("O0", "float16", "float32"),
        ("O0", "bfloat16", "float32"),
        ("O1", "float32", "float32"),
        ("O1", "float16", "float16"),
        ("O1", "bfloat16", "bfloat16"),
    ],
)
def test_forward_computes_in_the_dtype_of_the_mode_and_only_float16_has_a_scaler(
    level: str, dtype: str, computes_in: str
) -> None:
    made = mode(level, dtype=dtype)
    with made.forward():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert str(product.dtype) == f"torch.{computes_in}"
    assert (str(made.dtype), made.format.name) == (f"torch.{computes_in}", computes_in)
    assert made.scaler().is_enabled() is (computes_in == "float16")


def test_gradients_are_clipped_after_they_are_unscaled() -> None:
    made = mode()
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = made.scaler()
    scaler.scale((weight * 4.0).sum()).backward()
    made.step(scaler, [optimizer], clip_grad_norm=2.0)
    assert weight.item() == pytest.approx(-2.0)


def test_gradients_of_several_optimizers_are_clipped_together() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    weights[0].grad, weights[1].grad = torch.tensor([3.0]), torch.tensor([4.0])
    clip(optimizers, None)
    assert [weight.grad for weight in weights] == [3.0, 4.0]
    clip(optimizers, 1.0)
    assert [float(weight.grad) for weight in weights if weight.grad is not None] == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, FLOAT16),
        ({"precision": None}, FLOAT16),
        ({"precision": {"level": "O0", "dtype": "float16"}}, FLOAT32),
        ({"precision": {"level": "O1", "dtype": "float32"}}, FLOAT32),
        ({"precision": {"level": "of a later version"}}, FLOAT16),
    ],
)
def test_the_format_of_a_record_is_read_from_its_config(config: dict[str, object], expected: object) -> None:
    assert format_of_config(config) is expected


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)
    )


def dtypes(model: torch.nn.Module) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in model.state_dict().items() if value.is_floating_point()}


def are_half(model: torch.nn.Module) -> set[str]:
    return {name.partition(".")[0] for name, dtype in dtypes(model).items() if dtype is torch.float16}


@pytest.mark.parametrize(
    ("level", "more", "half"),
    [
        ("O0", {}, ""),
        ("O1", {}, ""),
        ("O2", {}, "023"),
        ("O2", {"keep_norms_fp32": False}, "0123"),
        ("O3", {}, "0123"),
        ("O3", {"keep_norms_fp32": True}, "023"),
        ("O3", {"dtype": "float32"}, ""),
        ("O2", {"pins": ["3"]}, "02"),
        ("O3", {"pins": ["*"]}, ""),
    ],
)
def test_a_level_makes_only_its_modules_float16(level: str, more: dict[str, object], half: str) -> None:
    model, made = network(), mode(level, **more)
    with made.converted(model):
        assert are_half(model) == set(half)


def test_a_batch_norm_without_weights_becomes_float16_as_in_apex() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(8, affine=False))
    with mode("O2").converted(model):
        assert dtypes(model) == {"0.running_mean": torch.float16, "0.running_var": torch.float16}


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_inputs_become_float16_and_outputs_float32_until_the_mode_ends(level: str) -> None:
    model, seen = network(), []
    model[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    with contextlib.suppress(ZeroDivisionError), cuda_on_cpu(), mode(level).converted(model):
        assert model(torch.ones(3, 4)).dtype is torch.float32
        raise ZeroDivisionError
    model.float()
    model(torch.ones(3, 4))
    assert seen == [torch.float16, torch.float32]


def trained(level: str, steps: int, **more: object) -> float:
    """A weight of 1 after that many updates of -2**-13 each: a quarter of what float16 resolves there."""
    made, model = mode(level, **more), torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-13)
    with cuda_on_cpu(), made.converted(model):
        scaler = made.scaler()
        for _ in range(steps):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 1)).sum()).backward()
            made.step(scaler, [optimizer])
        assert model.weight.grad is None or model.weight.grad.dtype is model.weight.dtype
        return model.weight.item()


@pytest.mark.parametrize("scale", [1.0, 128.0, {"init": 128.0}])
@pytest.mark.parametrize(
    ("level", "more", "weight"),
    [
        ("O0", {}, 1 - 2.0**-9),
        ("O2", {}, 1 - 2.0**-9),
        ("O2", {"master_weights": False}, 1.0),
        ("O3", {}, 1.0),
        ("O3", {"master_weights": True}, 1 - 2.0**-9),
        ("O3", {"pins": ["*"]}, 1 - 2.0**-9),
    ],
)
def test_small_updates_move_master_weights_but_not_float16_weights(
    level: str, more: dict[str, object], weight: float, scale: object
) -> None:
    assert trained(level, 16, loss_scale=scale, **more) == weight


def test_the_optimizer_state_is_that_of_the_master_weights() -> None:
    made, model = mode("O2", loss_scale={"init": 8.0}), torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with cuda_on_cpu(), made.converted(model):
        scaler = made.scaler()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        made.step(scaler, [optimizer])
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}
    assert set(optimizer.state) == set(model.parameters())
    assert model.weight.dtype is torch.float16


@pytest.mark.parametrize(("level", "limit"), [("O2", 2.0**24), ("O3", 2.0**24), ("O1", 2.0**30)])
def test_the_loss_scale_stops_at_the_limit_of_apex_in_o2_and_o3_but_not_in_o1(level: str, limit: float) -> None:
    given = {"init": 2.0**20, "growth_interval": 1} | ({"max": 2.0**24} if level == "O3" else {})
    made, weight = mode(level, loss_scale=given), torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.0), made.scaler()
    scales = []
    for _ in range(10):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        made.step(scaler, [optimizer])
        scales.append(scaler.get_scale())
    assert scales[:3] == [2.0**21, 2.0**22, 2.0**23]
    assert scales[-1] == limit


def test_the_loss_scale_falls_down_to_its_minimum_only() -> None:
    made, weight = mode("O1", loss_scale={"init": 16.0, "min": 4.0}), torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), made.scaler()
    for expected in (8.0, 4.0, 4.0):
        optimizer.zero_grad()
        scaler.scale((weight * torch.inf).sum()).backward()
        made.step(scaler, [optimizer])
        assert (scaler.get_scale(), weight.item()) == (expected, 1.0)


@pytest.mark.parametrize(
    ("level", "scale", "is_taken"),
    [("O1", 8.0, False), ("O2", {"init": 8.0}, False), ("O2", 8.0, True), ("O3", 8.0, True), ("O3", None, True)],
)
def test_a_static_scale_of_a_float16_model_never_skips_as_in_apex(level: str, scale: object, is_taken: bool) -> None:
    made, model = mode(level, loss_scale=scale), torch.nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with made.converted(model):
        scaler = made.scaler()
        scaler.scale(model(torch.ones(1, 1)).sum() * torch.inf).backward()
        made.step(scaler, [optimizer])
    assert (model.weight.item() != pytest.approx(before, rel=1e-3)) is is_taken
    assert not isinstance(scale, float) or scaler.get_scale() == scale


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_buffer_that_torch_cannot_convert_to_float16_is_refused_by_name(level: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].register_buffer("held", torch.ones(2, 2).to_mkldnn())
    refused = rf"^precision\.level: {level} makes the whole model float16, and torch cannot make a buffer of 0 that: "
    with pytest.raises(WorkloadError, match=refused), mode(level).converted(model):
        pass
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("pin", ["3", "0", "1"])
def test_a_pin_widens_the_weights_of_a_float16_model_while_active(pin: str) -> None:
    made, model = mode("O3"), network()
    with cuda_on_cpu(), made.converted(model):
        model(torch.ones(3, 4)).sum().backward()
        before = {name: (value.data_ptr(), value.grad) for name, value in model.named_parameters()}
        with contextlib.suppress(ZeroDivisionError), made.pinned(model, [pin]):
            assert are_half(model) == set("0123") - {pin}
            assert model(torch.ones(3, 4)).dtype is torch.float32
            raise ZeroDivisionError
        assert are_half(model) == set("0123")
        after = {name: (value.data_ptr(), value.grad) for name, value in model.named_parameters()}
        assert {name: (at, id(grad)) for name, (at, grad) in after.items()} == {
            name: (at, id(grad)) for name, (at, grad) in before.items()
        }


class Squared(torch.nn.Module):
    """300 squared is beyond float16: the module's own line overflows. Its child accepts only float16 inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.scale = torch.nn.Parameter(torch.full((4,), 300.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.scale * self.scale / 90000.0)


def test_pinned_own_lines_run_in_fp32_and_the_modules_they_call_in_float16() -> None:
    made, model = mode("O3"), torch.nn.Sequential(Squared(), torch.nn.Linear(4, 1))
    with cuda_on_cpu(), made.converted(model):
        assert not model(torch.ones(2, 4)).isfinite().all()
        with made.pinned(model, ["0:own"]):
            assert dtypes(model)["0.inner.weight"] is torch.float16
            assert model(torch.ones(2, 4)).isfinite().all()


class Tied(torch.nn.Module):
    """The embedding and the head share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 5)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(x)))


@pytest.mark.parametrize(("pin", "widened"), [("embedding", {"embedding", "head"}), ("body", {"body"})])
def test_modules_that_share_a_weight_with_a_pinned_module_are_pinned_too(pin: str, widened: set[str]) -> None:
    made, model = mode("O3"), Tied()
    with cuda_on_cpu(), made.converted(model), made.pinned(model, [pin]):
        assert {name for name, module in model.named_children() if module.weight.dtype is torch.float32} == widened
        model(torch.arange(5)).sum().backward()
        assert model.embedding.weight.grad is not None

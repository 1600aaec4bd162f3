"""User code that says ``cuda`` runs on a CPU, with every feature of PyTorch."""

import contextlib
import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from ampdbg.precision.emulation import cuda_on_cpu


@pytest.fixture(autouse=True)
def _emulation() -> Iterator[None]:
    torch.manual_seed(0)
    with cuda_on_cpu():
        yield


AUTOCASTS: dict[str, Callable[[], Any]] = {
    'torch.autocast("cuda")': lambda: torch.autocast("cuda"),
    "device_type=": lambda: torch.autocast(device_type="cuda", dtype=torch.float16),
    'torch.amp.autocast("cuda")': lambda: torch.amp.autocast("cuda"),
    "torch.cuda.amp.autocast()": torch.cuda.amp.autocast,
    "torch.cuda.amp.autocast(True)": lambda: torch.cuda.amp.autocast(True),
    "dtype given by position": lambda: torch.autocast("cuda", torch.float16),
}


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("autocast", AUTOCASTS.values(), ids=AUTOCASTS.keys())
def test_every_spelling_of_cuda_autocast_casts_on_a_cpu(autocast: Callable[[], Any]) -> None:
    x = torch.randn(4, 4)
    assert not torch.is_autocast_enabled()
    with autocast():
        assert torch.is_autocast_enabled()
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") is torch.float16
        product = x @ x
        assert (product.dtype, product.exp().dtype) == (torch.float16, torch.float32)
    assert (x @ x).dtype is torch.float32

    @autocast()  # type: ignore[untyped-decorator]
    def decorated() -> Tensor:
        return x @ x

    assert decorated().dtype is torch.float16


def product_dtype(region: Any) -> torch.dtype:
    x = torch.randn(4, 4)
    with region:
        return (x @ x).dtype


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_a_region_inherits_the_dtype_around_and_a_disabled_region_stays_disabled() -> None:
    for around in ("cuda", "cpu"):
        with torch.autocast(around, dtype=torch.bfloat16):
            assert product_dtype(torch.autocast("cuda")) is torch.bfloat16
            assert product_dtype(torch.autocast("cuda:0", dtype=torch.float16)) is torch.float16
            assert product_dtype(torch.cuda.amp.autocast(enabled=False)) is torch.float32
            with torch.autocast("cuda", enabled=False):
                assert product_dtype(contextlib.nullcontext()) is torch.float32
                assert product_dtype(torch.autocast("cuda")) is torch.bfloat16
        assert product_dtype(torch.autocast("cuda")) is torch.float16


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_the_autocast_dtype_outside_regions_is_the_cuda_default_or_the_set_dtype() -> None:
    def defaults() -> list[torch.dtype]:
        device_of_the_data = torch.zeros(1, device="cuda").device.type
        regions = [torch.autocast(device) for device in ("cuda", "cuda:0", device_of_the_data)]
        said = [torch.get_autocast_dtype("cuda"), torch.get_autocast_gpu_dtype()]
        return [*said, *(product_dtype(region) for region in regions)]

    assert set(defaults()) == {torch.float16}
    elsewhere: list[torch.dtype] = []
    in_a_thread(lambda: elsewhere.extend(defaults()))
    assert set(elsewhere) == {torch.float16}
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    assert set(defaults()) == {torch.bfloat16}
    torch.set_autocast_gpu_dtype(torch.float16)
    assert set(defaults()) == {torch.float16}


DEVICES: dict[str, Callable[[], Tensor | nn.Module]] = {
    "Tensor.cuda()": lambda: torch.ones(2).cuda(),
    "Tensor.cuda(0)": lambda: torch.ones(2).cuda(0, non_blocking=True),
    'Tensor.to("cuda")': lambda: torch.ones(2).to("cuda"),
    'Tensor.to("cuda:0")': lambda: torch.ones(2).to("cuda:0", non_blocking=True),
    "Tensor.to(device=)": lambda: torch.ones(2).to(device="cuda"),
    "Tensor.to(torch.device)": lambda: torch.ones(2).to(torch.device("cuda")),
    "Module.cuda()": lambda: nn.Linear(2, 2).cuda(),
    'Module.to("cuda")': lambda: nn.Linear(2, 2).to("cuda"),
    "Module.to(device=)": lambda: nn.Linear(2, 2).to(device=torch.device("cuda", 0)),
    "torch.zeros(device=)": lambda: torch.zeros(2, device="cuda"),
    "torch.randn(device=)": lambda: torch.randn(2, 2, device=torch.device("cuda")),
    "torch.arange(device=)": lambda: torch.arange(2, device="cuda:0"),
    "torch.tensor(device=)": lambda: torch.tensor([1.0], device="cuda"),
    "torch.full(device=)": lambda: torch.full((2,), 1.0, device="cuda"),
    "torch.ones_like(device=)": lambda: torch.ones_like(torch.ones(2), device="cuda"),
    "torch.randn_like(device=)": lambda: torch.randn_like(torch.ones(2), device="cuda"),
    "Tensor.new_zeros(device=)": lambda: torch.ones(2).new_zeros(2, device="cuda"),
    "nn.Linear(device=)": lambda: nn.Linear(2, 2, device="cuda"),
    "nn.Conv2d(device=)": lambda: nn.Conv2d(2, 2, 1, device="cuda"),
    "nn.Embedding(device=)": lambda: nn.Embedding(2, 2, device="cuda"),
    "nn.LayerNorm(device=)": lambda: nn.LayerNorm(2, device="cuda"),
    "nn.BatchNorm1d(device=)": lambda: nn.BatchNorm1d(2, device="cuda"),
    "nn.LSTM(device=)": lambda: nn.LSTM(2, 2, device="cuda"),
    "Tensor.to(0)": lambda: torch.ones(2).to(0),
    "Tensor.to(device=0)": lambda: torch.ones(2).to(device=0),
    "Module.to(0)": lambda: nn.Linear(2, 2).to(0),
    "torch.ones(device=0)": lambda: torch.ones(2, device=0),
    "nn.Linear(device=0)": lambda: nn.Linear(2, 2, device=0),
    "torch.empty(pin_memory=)": lambda: torch.empty(2, pin_memory=True),
    "Tensor.pin_memory()": lambda: torch.ones(2).pin_memory(),
    "Tensor.type()": lambda: torch.ones(2).long().type("torch.cuda.FloatTensor"),
    "torch.cuda.FloatTensor()": lambda: torch.cuda.FloatTensor([1.0]),  # type: ignore[attr-defined]
    "torch.cuda.LongTensor()": lambda: torch.cuda.LongTensor([1]),  # type: ignore[attr-defined]
    "torch.randn(generator=)": lambda: torch.randn(2, generator=torch.Generator("cuda"), device="cuda"),
    "Module.to_empty(device=)": lambda: nn.Linear(2, 2, device="meta").to_empty(device="cuda"),
}


@pytest.mark.parametrize("make", DEVICES.values(), ids=DEVICES.keys())
def test_tensors_and_modules_moved_to_cuda_are_on_the_cpu(make: Callable[[], Tensor | nn.Module]) -> None:
    made = make()
    tensors = [made] if isinstance(made, Tensor) else list(made.parameters())
    assert tensors
    assert {tensor.device.type for tensor in tensors} == {"cpu"}


def test_a_dtype_given_with_the_device_is_applied() -> None:
    assert torch.ones(2).to("cuda", torch.float16).dtype is torch.float16
    assert nn.Linear(2, 2).to("cuda", torch.float16).weight.dtype is torch.float16


SCALERS: dict[str, Callable[[], torch.amp.GradScaler]] = {
    "torch.amp.GradScaler()": torch.amp.GradScaler,
    'torch.amp.GradScaler("cuda")': lambda: torch.amp.GradScaler("cuda", init_scale=1024.0),
    "torch.GradScaler(device=)": lambda: torch.GradScaler(device="cuda"),
    "torch.cuda.amp.GradScaler()": torch.cuda.amp.GradScaler,
}


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("make", SCALERS.values(), ids=SCALERS.keys())
def test_every_cuda_scaler_is_enabled_and_skips_on_overflow(make: Callable[[], torch.amp.GradScaler]) -> None:
    scaler = make()
    assert scaler.is_enabled()
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler.scale((weight * torch.tensor([1.0, torch.inf])).sum()).backward()
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, torch.ones(2))
    assert scaler.get_scale() == scale / 2
    assert not type(scaler)(enabled=False).is_enabled()


class Square(torch.autograd.Function):
    """A user's autograd function that asks for FP32 with the documented pair of decorators."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert not torch.is_autocast_enabled("cuda")
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert not torch.is_autocast_enabled("cuda")
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def test_custom_fwd_and_custom_bwd_cast_inputs_and_switch_autocast_off() -> None:
    x = torch.full((2,), 300.0).half().requires_grad_()
    with torch.autocast("cuda"):
        y = Square.apply(x)
    assert y.dtype is torch.float32
    assert y.isfinite().all()
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2,), 600.0).half())


class MatMul(torch.autograd.Function):
    """A user's autograd function whose backward keeps the autocast state of its forward."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        assert torch.is_autocast_enabled("cuda")
        # Outside autocast half @ float32 raises.
        return gradient @ w.mT, x.mT @ gradient


def test_custom_bwd_runs_in_the_autocast_state_of_the_forward() -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    with torch.autocast("cuda"):
        y = MatMul.apply(x, w)
    y.sum().backward()
    assert w.grad is not None
    assert torch.equal(w.grad, (x.detach().half().mT @ torch.ones_like(y)).float())


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True))


def assert_same_gradients(one: nn.Module, other: nn.Module) -> None:
    pairs = [(left.grad, right.grad) for left, right in zip(one.parameters(), other.parameters(), strict=True)]
    assert all(left is not None and right is not None and torch.equal(left, right) for left, right in pairs)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside_autocast_does_not_change_gradients(reentrant: bool) -> None:
    model, x = mlp(), torch.randn(4, 8, requires_grad=True)
    plain, checkpointed = copy.deepcopy(model), copy.deepcopy(model)
    with torch.autocast("cuda"):
        plain(x).sum().backward()
    with torch.autocast("cuda"):
        loss = checkpoint(checkpointed, x, use_reentrant=reentrant).sum()
    loss.backward()
    assert_same_gradients(plain, checkpointed)


TWICE: dict[str, Callable[[], tuple[nn.Module, Tensor, float]]] = {
    "a perceptron": lambda: (mlp(), torch.randn(4, 8, requires_grad=True), 1.0),
    "a convolution": lambda: (nn.Conv2d(2, 3, 3), torch.randn(1, 2, 6, 6, requires_grad=True), 2.0),
}
"""A model, its input, and the power of its output that is summed."""


@pytest.mark.parametrize("make", TWICE.values(), ids=TWICE.keys())
def test_a_gradient_penalty_under_autocast_matches_float32(make: Callable[[], tuple[nn.Module, Tensor, float]]) -> None:
    model, x, power = make()

    def penalty() -> Tensor:
        (inner,) = torch.autograd.grad(model(x).float().pow(power).sum(), x, create_graph=True)
        return inner.pow(2).sum()

    with torch.autocast("cuda"):
        emulated = penalty()
    for half, full in zip(gradients(model, emulated), gradients(model, penalty()), strict=True):
        torch.testing.assert_close(half, full, rtol=2e-2, atol=2e-2)


def test_sparse_products_run_or_are_refused_as_on_cuda() -> None:
    eye, x = torch.eye(4), torch.randn(4, 4)
    with torch.autocast("cuda"):
        for coo in (lambda m: torch.sparse.mm(m, x), lambda m: m @ x, lambda m: torch.addmm(x, m, x)):
            with pytest.raises(NotImplementedError, match="\"addmm_sparse_cuda\" not implemented for 'Half'"):
                coo(eye.to_sparse())
            assert coo(eye.to_sparse_csr()).dtype is torch.float16
        assert torch.sparse.mm(eye.to_sparse(), eye.to_sparse()).dtype is torch.float32  # autocast does not lower it
    assert (eye.to_sparse() @ x).dtype is torch.float32


def test_modules_optimizers_and_scalers_can_be_saved_copied_and_pickled() -> None:
    model = nn.Sequential(nn.Linear(4, 4, device="cuda"), nn.LSTM(4, 2)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    pickle.loads(pickle.dumps((optimizer, scaler)))
    for duplicate in copies:
        x = torch.randn(3, 4)
        assert torch.equal(duplicate(x)[0], model(x)[0])


def test_a_data_loader_with_worker_processes_runs() -> None:
    dataset = TensorDataset(torch.arange(8.0).reshape(8, 1))
    batches = [batch.cuda() for (batch,) in DataLoader(dataset, batch_size=2, num_workers=2)]
    assert torch.equal(torch.cat(batches).flatten(), torch.arange(8.0))


def test_per_sample_gradients_by_vmap_match_autograd() -> None:
    w, xs = torch.randn(4, 5), torch.randn(6, 4)

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        with torch.autocast("cuda"):
            return (x @ weight).float().pow(2).sum()

    leaf = w.clone().requires_grad_()
    expected = torch.stack([torch.autograd.grad(loss(leaf, x), leaf)[0] for x in xs])
    assert torch.equal(torch.func.grad(loss)(w, xs[0]), expected[0])
    mapped = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(w, xs)
    torch.testing.assert_close(mapped, expected, rtol=1e-3, atol=1e-3)
    half = xs.half()
    assert torch.func.vmap(lambda x: x @ w.half())(half).dtype is torch.float16


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
def test_jvp_and_hessian_work_despite_their_scripting_at_first_use() -> None:
    x = torch.randn(3)
    assert torch.equal(torch.func.jvp(torch.sin, (x,), (torch.ones(3),))[1], x.cos())
    hessian = torch.func.hessian(lambda t: (t * t).sum())(x)
    assert torch.equal(hessian, 2 * torch.eye(3))


def relative_positions(n: int) -> Tensor:
    steps = torch.arange(n)
    return (steps[:, None] - steps[None, :]).float() + torch.zeros(n, n) + torch.zeros_like(steps)


def in_a_region_of_its_own(x: Tensor) -> tuple[Tensor, torch.dtype]:
    with torch.autocast("cpu", dtype=torch.float16):
        y = torch.mm(x, x)
    return y, torch.get_autocast_dtype("cpu")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
def test_scripted_code_may_call_replaced_functions_and_open_an_autocast_region() -> None:
    scripted = torch.jit.script(relative_positions)
    assert torch.equal(scripted(3), relative_positions(3))
    assert "aten::arange" in str(scripted.graph)
    x = torch.randn(2, 2)
    product, _ = torch.jit.script(in_a_region_of_its_own)(x)
    assert torch.equal(product, in_a_region_of_its_own(x)[0])


def test_compiled_code_may_call_replaced_functions() -> None:
    def step(x: Tensor) -> Tensor:
        with torch.autocast("cuda"):
            return torch.ones_like(x) @ x.to("cuda") + torch.zeros(2, device="cuda", dtype=torch.float16)

    x = torch.randn(2, 2)
    compiled = torch.compile(step, backend="eager")
    assert compiled(x).dtype is torch.float16
    assert torch.equal(compiled(x), step(x))


def in_a_thread(work: Callable[[], None]) -> None:
    """Runs ``work`` in another thread and raises its error here."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_backward_may_run_in_another_thread() -> None:
    here, there = mlp(), mlp()
    there.load_state_dict(here.state_dict())
    x = torch.randn(4, 8)
    losses = []
    for model in (here, there):
        with torch.autocast("cuda"):
            losses.append(model(x).float().sum())
    losses[0].backward()
    in_a_thread(losses[1].backward)
    assert_same_gradients(here, there)


@pytest.mark.filterwarnings("ignore:.*set_default_tensor_type.. is deprecated")
def test_the_default_device_and_tensor_type_may_be_of_cuda() -> None:
    torch.set_default_device("cuda")
    try:
        assert torch.ones(2).device.type == "cpu"
    finally:
        torch.set_default_device(None)
    with torch.device("cuda"):
        assert nn.Linear(2, 2).weight.device.type == "cpu"
    torch.set_default_tensor_type("torch.cuda.DoubleTensor")
    try:
        assert torch.ones(2).dtype is torch.float64
    finally:
        torch.set_default_tensor_type("torch.FloatTensor")


def test_a_checkpoint_is_loaded_onto_cuda(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    for place in ("cuda", "cuda:0", torch.device("cuda"), None):
        assert torch.equal(torch.load(tmp_path / "w.pt", map_location=place)["w"], torch.ones(2))


def test_calls_that_manage_the_device_do_nothing() -> None:
    torch.cuda.set_device(torch.cuda.current_device())
    with torch.cuda.device(0), torch.cuda.nvtx.range("step"):
        torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.nvtx.range_push("backward")
    torch.cuda.nvtx.range_pop()
    assert torch.cuda.memory_reserved() == 0


def test_streams_are_always_done_and_events_measure_time() -> None:
    stream, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(stream):
        x = torch.ones(2, device="cuda")
        x.record_stream(stream)
    torch.cuda.current_stream().wait_stream(stream)
    end.record(stream)
    end.synchronize()
    assert stream.query()
    assert end.query()
    assert stream.record_event().elapsed_time(start) < 0 < start.elapsed_time(end) < 60_000


def test_a_cuda_generator_is_a_cpu_generator_with_its_own_seed() -> None:
    made = [torch.Generator("cuda"), torch.Generator(device=torch.device("cuda", 0)), torch.Generator()]
    drawn = [torch.randn(2, generator=generator.manual_seed(3), device="cuda") for generator in made]
    assert all(torch.equal(one, drawn[0]) for one in drawn)
    assert all(isinstance(generator, torch.Generator) for generator in (*made, torch.default_generator))
    assert not isinstance(3, torch.Generator)


def test_the_random_state_of_cuda_is_that_of_the_cpu() -> None:
    state = torch.cuda.get_rng_state()
    first = torch.randn(2, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.randn(2, device="cuda"), first)
    with torch.random.fork_rng(devices=[0], device_type="cuda"):
        torch.randn(2)
    assert torch.cuda.initial_seed() == torch.initial_seed()

"""Tests of op tracing: every op with its phase, module, call and exact line, and nothing left in the model."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from ampdbg.probes.module_calls import compiled_notes
from ampdbg.probes.op_trace import OpSeen, OpTrace, placed, storage_of
from ampdbg.record.findings import CodeLine


def line_of(code: Any, text: str) -> int:
    """The number of the line of a function or class that contains ``text``."""
    lines, first = inspect.getsourcelines(code)
    (number,) = [first + i for i, line in enumerate(lines) if text in line]
    return number


def traced(model: nn.Module, x: torch.Tensor) -> list[OpSeen]:
    """The ops of one forward and backward pass."""
    with placed(model, OpTrace) as trace:
        model(x).sum().backward()
    return trace.ops


def seen(ops: list[OpSeen], op: str, phase: str = "forward") -> list[tuple[str, int, int | None]]:
    """Module, call and line of each run of an op."""
    return [
        (one.place.module, one.place.call, one.place.line[1] if one.place.line else None)
        for one in ops
        if one.op == f"aten.{op}" and one.place.phase == phase
    ]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return torch.sin(y) + x


class Twice(nn.Module):
    """One block called twice, and the same block under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.alias = self.block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.alias(x))


def test_two_calls_of_a_module_are_told_apart_in_both_passes() -> None:
    ops = traced(Twice(), torch.randn(2, 4))
    product, sine = line_of(Block, "self.inner(x)"), line_of(Block, "torch.sin")
    assert seen(ops, "addmm.default") == [("block.inner", 0, product), ("block.inner", 1, product)]
    assert seen(ops, "sin.default") == [("block", 0, sine), ("block", 1, sine)]
    assert seen(ops, "cos.default", "backward") == [("block", 1, sine), ("block", 0, sine)]
    assert {(module, call) for module, call, _ in seen(ops, "mm.default", "backward")} == {
        ("block.inner", 0),
        ("block.inner", 1),
    }


def test_products_of_tied_weights_belong_to_the_module_that_runs_them() -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    ops = traced(nn.Sequential(first, nn.ReLU(), second), torch.randn(2, 4, requires_grad=True))
    assert [module for module, _, _ in seen(ops, "mm.default")] == ["0", "2"]
    assert [module for module, _, _ in seen(ops, "mm.default", "backward")] == ["2", "2", "0", "0"]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        y[:, 0].mul_(3.0)
        return torch.exp(y)


def test_an_in_place_write_into_a_view_has_its_own_line_in_both_passes() -> None:
    ops = traced(InPlace(), torch.ones(2, 4))
    write, first, last = line_of(InPlace, "mul_(3.0)"), line_of(InPlace, "x * self"), line_of(InPlace, "torch.exp")
    assert [line for _, _, line in seen(ops, "mul_.Tensor")] == [write]
    # exp, then the write into the view, then the product
    assert [line for _, _, line in seen(ops, "mul.Tensor", "backward")] == [last, write, first]


def test_inputs_of_an_in_place_op_are_measured_before_the_write() -> None:
    (one,) = [one for one in traced(InPlace(), torch.ones(2, 4)) if one.op == "aten.mul_.Tensor"]
    assert (one.inputs.largest, one.output.largest) == (3.0, 3.0)
    with placed(nn.Identity(), OpTrace) as trace:
        torch.full((2,), 2.0).mul_(1000.0).fill_(1.0)
    assert [(op.inputs.largest, op.output.largest) for op in trace.ops] == [(2.0, 2.0), (1000.0, 2000.0), (1.0, 1.0)]


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.block = Block()
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return checkpoint(self.tail, x, use_reentrant=self.use_reentrant)

    def tail(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tan(x).exp()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_recomputes_the_same_call_in_the_forward_phase(use_reentrant: bool) -> None:
    ops = traced(Checkpointed(use_reentrant), torch.randn(2, 4, requires_grad=True))
    sine, product = line_of(Block, "torch.sin"), line_of(Block, "self.inner(x)")
    tail = line_of(Checkpointed, "torch.tan")
    again = [("block.inner", 1, product), ("block.inner", 0, product)]
    assert seen(ops, "addmm.default") == [("block.inner", 0, product), ("block.inner", 1, product), *again]
    assert seen(ops, "cos.default", "backward") == [("block", 1, sine), ("block", 0, sine)]
    assert seen(ops, "tan.default") == [("", 0, tail), ("", 0, tail)]
    assert seen(ops, "addmm.default", "backward") == seen(ops, "tan.default", "backward") == []


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.pow(2)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0].mul(x).neg()


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squared: torch.Tensor = Square.apply(self.inner(x))
        return squared.add(1.0).sqrt()


def test_ops_of_a_custom_function_have_the_lines_of_its_forward_and_backward() -> None:
    ops = traced(Custom(), torch.randn(2, 4))
    assert seen(ops, "pow.Tensor_Scalar") == [("", 0, line_of(Square, "x.pow(2)"))]
    assert seen(ops, "neg.default", "backward") == [("", 0, line_of(Square, ".neg()"))]
    assert {line for _, _, line in seen(ops, "mm.default", "backward")} == {line_of(Custom, "self.inner(x)")}


def test_ops_outside_any_module_have_their_line() -> None:
    w = torch.randn(3, requires_grad=True)
    with placed(nn.Identity(), OpTrace) as trace:
        torch.cosh(w).sum().backward()
    here = line_of(test_ops_outside_any_module_have_their_line, ".sum().back" + "ward()")
    assert seen(trace.ops, "cosh.default") == [("", 0, here)]
    assert seen(trace.ops, "sinh.default", "backward") == [("", 0, here)]


def test_a_double_backward_has_the_line_of_the_forward() -> None:
    model, x = Block(), torch.randn(2, 4, requires_grad=True)
    with placed(model, OpTrace) as trace:
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        first = len(trace.ops)
        gradient.square().sum().backward()
    sine = line_of(Block, "torch.sin")
    # cos is the derivative of sin; the backward pass through cos gives its own derivative. The first pass counts as
    # forward: the loss is computed from its result, so the loss scale is not in it.
    assert seen(trace.ops[:first], "cos.default") == [("", 0, sine)]
    assert seen(trace.ops[:first], "cos.default", "backward") == []
    assert ("", 0, sine) in seen(trace.ops[first:], "sin.default", "backward")


def test_the_producer_is_the_op_with_finite_inputs_and_an_infinite_output() -> None:
    with placed(nn.Identity(), OpTrace) as trace:
        x = torch.full((3,), 60000.0).half()
        y = x + x
        y - y
    assert [(one.op, one.produces) for one in trace.ops[-2:]] == [("aten.add.Tensor", True), ("aten.sub.Tensor", False)]
    total = trace.ops[-2].output
    assert (total.inf, total.nan, total.size, total.dtype) == (3, 0, 3, "float16")
    assert (trace.ops[-1].output.nan, trace.ops[-1].inputs.inf) == (3, 6)


def test_a_scalar_counts_as_an_input_and_a_size_does_not() -> None:
    with placed(nn.Identity(), OpTrace) as trace:
        torch.zeros(2).masked_fill(torch.tensor([True, False]), -1e9)
        torch.ones(2) * 100_000
        torch.ones(70_000).sum(0)
    assert [one.inputs.largest for one in trace.ops if "ones" not in one.op][-3:] == [1e9, 100_000.0, 1.0]


def test_memory_that_is_only_allocated_is_not_measured() -> None:
    with placed(nn.Identity(), OpTrace) as trace:
        torch.empty(1000).copy_(torch.ones(1000))
        torch.empty_like(torch.ones(3))
    assert [one.op for one in trace.ops] == ["aten.ones.default", "aten.copy_.default", "aten.ones.default"]
    assert trace.ops[1].inputs.size == 1000


def test_an_accumulated_gradient_names_its_parameter() -> None:
    model = Twice()
    traced(model, torch.randn(2, 4))
    ops = traced(model, torch.randn(2, 4))
    assert {one.parameter for one in ops if one.parameter} == {"block.inner.weight", "block.inner.bias"}
    assert {one.place.module for one in ops if one.parameter} == {"block.inner"}


def test_a_compiled_model_is_traced_eagerly_and_named() -> None:
    calls = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        calls.append(graph)
        return graph.forward

    model = Block()
    compiled = torch.compile(model, backend=backend)
    assert isinstance(compiled, nn.Module)
    assert compiled_notes(compiled) == ("module '' is compiled; its eager code was analysed",)
    assert compiled_notes(Block()) == ()
    ops = traced(compiled, torch.randn(2, 4))
    assert calls == []
    assert [line for _, _, line in seen(ops, "sin.default")] == [line_of(Block, "torch.sin")]
    compiled(torch.randn(2, 4))
    assert len(calls) == 1, "it is compiled again afterwards"


def test_ops_of_a_scripted_module_belong_to_the_module_that_calls_it() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), Block())
    ops = traced(model, torch.randn(2, 4))
    assert [module for module, _, _ in seen(ops, "addmm.default")] == ["", "1.inner"]


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_hooks_are_removed_after_an_exception() -> None:
    model = Twice()
    with pytest.raises(ValueError, match="planted"), placed(model, OpTrace):
        raise ValueError("planted")
    assert hooks_of(model) == 0
    with placed(model, OpTrace) as trace, pytest.raises(RuntimeError):
        model(torch.randn(2, 5))
    assert hooks_of(model) == 0
    count = len(trace.ops)
    model(torch.randn(2, 4))
    assert len(trace.ops) == count


def test_the_module_is_right_after_the_model_catches_an_exception() -> None:
    class Catching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.broken = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.broken(x)
            except RuntimeError:
                return torch.sin(x)

    ops = traced(Catching(), torch.randn(2, 4, requires_grad=True))
    assert [module for module, _, _ in seen(ops, "sin.default")] == [""]


def test_tracing_changes_no_bit_of_gradients_and_buffers() -> None:
    def gradients(trace: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(Twice(), nn.BatchNorm1d(4), nn.Dropout(0.5), Checkpointed(False), Custom())
        x = torch.randn(8, 4)
        if trace:
            traced(model, x)
        else:
            model(x).sum().backward()
        return [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]

    plain, watched = gradients(False), gradients(True)
    for one, other in zip(plain, watched, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.filterwarnings("error")
def test_a_fake_tensor_has_no_storage_and_causes_no_warning() -> None:
    with FakeTensorMode():
        assert storage_of(torch.ones(2)) == 0
    assert storage_of(torch.ones(2)) != 0


PACKAGES = {
    "maths/__init__.py": "def product(a, b):\n    return a @ b\n",
    "blocks/__init__.py": "from blocks.parts import Block\n",
    "blocks/losses.py": "from maths import product\n\ndef squared(x):\n    return product(x, x.mT) / 3\n",
    "blocks/parts.py": "import torch\nfrom blocks.losses import squared\n\nclass Block(torch.nn.Module):\n"
    "    def forward(self, x):\n        return squared(x.abs())\n",
    "loops/__init__.py": "def prepared(model):\n    inner = model.forward\n\n    def forward(*args):\n"
    "        return inner(*args) * 1.0\n\n    model.forward = forward\n    return model\n",
}


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports modules from a folder of installed packages."""
    folder = tmp_path / "site-packages"
    for name, text in PACKAGES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module
    for name in [name for name in sys.modules if name.partition(".")[0] in ("maths", "blocks", "loops")]:
        del sys.modules[name]


def lines_of(code: Callable[[], object], model: torch.nn.Module) -> dict[str, tuple[str, int, str]]:
    """For each op, the file with its folder, the line and the function of the last run."""
    with placed(model, OpTrace) as trace:
        code()
    lines = {seen.op: seen.place.line for seen in trace.ops}
    return {op: ("/".join(Path(line[0]).parts[-2:]), *line[1:]) for op, line in lines.items() if line is not None}


@pytest.mark.parametrize("is_prepared", [False, True], ids=["as it is", "wrapped by a library of loops"])
def test_an_op_in_a_library_module_has_the_librarys_line(is_prepared: bool, libraries: Callable[[str], Any]) -> None:
    model = libraries("blocks").Block()
    if is_prepared:
        model = libraries("loops").prepared(model)
    lines = lines_of(lambda: model(torch.ones(2, 2)), model)
    assert lines["aten.abs.default"] == ("blocks/parts.py", 6, "forward")
    assert lines["aten.mm.default"] == lines["aten.div.Tensor"] == ("blocks/losses.py", 4, "squared")


def test_a_library_line_names_the_call_of_the_user_that_led_there(libraries: Callable[[str], Any]) -> None:
    model = libraries("loops").prepared(libraries("blocks").Block())

    def call() -> torch.Tensor:
        made: torch.Tensor = model(torch.ones(2, 2))
        return made

    with placed(model, OpTrace) as trace:
        call()
        model(torch.ones(2, 2))
    first, again = (seen.site[-1] for seen in trace.ops if seen.op == "aten.mm.default")
    assert first is not None
    assert first.called_from == CodeLine(
        __file__, line_of(call, "model(torch"), "call", "made: torch.Tensor = model(torch.ones(2, 2))"
    )
    assert again == first
    assert again is not None
    assert again.called_from != first.called_from


def test_an_op_that_a_user_module_runs_in_a_library_has_the_line_of_the_user(libraries: Callable[[str], Any]) -> None:
    product = libraries("maths").product

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = product(x, x.mT)
            return made

    net, x = Net(), torch.ones(2, 2)
    own = ("probes/test_op_trace.py", Net.forward.__code__.co_firstlineno + 1, "forward")
    assert lines_of(lambda: net(x), net)["aten.mm.default"] == own
    assert lines_of(lambda: product(x, x), net)["aten.mm.default"][0] == "maths/__init__.py"

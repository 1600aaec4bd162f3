"""The use of a pass: bytes by hand and by plain ``saved_tensors_hooks``, under CUDA's and the native policy."""

import contextlib
from pathlib import Path

import pytest
import torch
import yaml
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from ampdbg.config.file import load_config
from ampdbg.costs.step import PassUse, bytes_of, use_of_a_pass
from ampdbg.errors import UserCodeError
from ampdbg.precision.emulation import is_emulating
from ampdbg.replay.run import Run, prepared
from ampdbg.training.loop import batches_of_steps
from tests.commands.program import ROOT
from tests.costs.perceptron import BATCH, CLASSES, HIDDEN, NET, WIDTH, activations, written
from tests.models.runs import SIGHT_AND_SOUND


def used(run: Run) -> PassUse:
    return use_of_a_pass(run.workload, next(batches_of_steps(run))[0], run.mode.forward)


def counted(run: Run) -> int:
    """The same by hooks that only count: every storage that autograd keeps, except those of the model."""
    model, kept = run.workload.model, dict[int, torch.UntypedStorage]()
    batch = [leaf.clone() for leaf in next(batches_of_steps(run))[0]]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with run.mode.forward(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = run.workload.losses(batch)
    for weight in (*model.parameters(), *model.buffers()):
        kept.pop(weight.untyped_storage().data_ptr(), None)
    assert losses
    return sum(storage.nbytes() for storage in kept.values())


CAST = HIDDEN * CLASSES * 2
"""The gradient of the second layer's input needs that layer's weight; no gradient needs the first layer's."""

LEVELS = {
    "O0": (activations(4), 0),
    "O1": (activations(2), CAST),
    "O2": (activations(2), 0),
    "O3": (activations(2), 0),
}


@pytest.mark.parametrize("policy", ["cuda", "native"])
@pytest.mark.parametrize("level", LEVELS)
def test_activation_and_cast_bytes_match_a_hand_count_and_plain_hooks(level: str, policy: str, tmp_path: Path) -> None:
    settings = (f"precision.level={level}", f"precision.policy={policy}")
    with prepared(load_config(written(tmp_path), settings)) as run:
        use = used(run)
        assert (use.activations, use.casts) == LEVELS[level]
        assert counted(run) == sum(LEVELS[level])


@pytest.mark.parametrize("level", ["O1", "bfloat16"])
def test_flops_are_counted_by_the_dtype_of_the_operands(level: str, tmp_path: Path) -> None:
    dtype = "float16" if level == "O1" else level
    with prepared(load_config(written(tmp_path), (f"precision.dtype={dtype}",))) as run:
        flops = used(run).flops
    # Once forward and twice backward, but the input needs no gradient.
    first, second = 2 * BATCH * WIDTH * HIDDEN, 2 * BATCH * HIDDEN * CLASSES
    assert flops == {dtype: 2 * first + 3 * second}


def test_a_pinned_module_is_counted_in_fp32(tmp_path: Path) -> None:
    with prepared(load_config(written(tmp_path), ("precision.pins=[second]",))) as run:
        use = used(run)
    assert set(use.flops) == {"float16", "float32"}
    assert use.casts == 0
    # The ReLU's result in half, and its FP32 copy for the pinned layer.
    assert use.activations == activations(2) + BATCH * HIDDEN * 4


SDPA = NET.replace("self.second(torch.relu(self.first(x)))", "self.second(attend(self.first(x)))").replace(
    "class Net",
    "def attend(h):\n    h = h.view(2, 4, 2, 16).transpose(1, 2)\n"
    "    return nn.functional.scaled_dot_product_attention(h, h, h).transpose(1, 2).reshape(8, 32)\n\n\nclass Net",
)


def test_fused_attention_on_the_cpu_has_the_flops_of_gpu_attention(tmp_path: Path) -> None:
    with prepared(load_config(written(tmp_path, SDPA))) as run:
        flops = used(run).flops["float16"]
    with prepared(load_config(written(tmp_path))) as run:
        without = used(run).flops["float16"]
    product = 2 * (2 * 2) * 4 * 4 * 16  # batch times heads, length, length, head's width
    assert flops - without == 2 * product + 5 * product  # the backward pass computes the scores again


def test_an_op_whose_flop_formula_raises_has_no_flops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampdbg.costs.step.FORMULAS", {torch.ops.aten.addmm: lambda *args, **kwargs: args[99]})
    with prepared(load_config(written(tmp_path))) as run:
        assert used(run).flops == {}


DISCARDED = NET.replace(
    "return self.second(", "self.second(x.new_zeros(99, 32).requires_grad_()).exp()\n        return self.second("
)
CHECKPOINTED = NET.replace(
    "return self.second(torch.relu(self.first(x)))",
    "return self.second(torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False))\n\n"
    "    def inner(self, x):\n        return torch.relu(self.first(x)).exp().exp()",
)


@pytest.mark.parametrize(
    ("net", "level", "size"),
    [
        pytest.param(DISCARDED, "O1", 2, id="what belongs to no part of the graph"),
        # The checkpoint keeps its input; the next layer keeps its result.
        pytest.param(CHECKPOINTED, "O0", 4, id="what a checkpoint computes again"),
    ],
)
def test_tensors_that_autograd_does_not_keep_are_not_counted(net: str, level: str, size: int, tmp_path: Path) -> None:
    with prepared(load_config(written(tmp_path, net), (f"precision.level={level}",))) as run:
        assert used(run).activations == activations(size)


CHECKPOINTED_LAYERS = NET.replace(
    "return self.second(torch.relu(self.first(x)))",
    "h = self.first(x)\n        for part in self.parts:\n"
    "            h = torch.utils.checkpoint.checkpoint(part, h, use_reentrant=False)\n        return self.second(h)",
).replace(
    "        self.first", "        self.parts = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))\n        self.first"
)


def test_recomputed_casts_of_a_checkpoint_are_not_kept_casts(tmp_path: Path) -> None:
    with prepared(load_config(written(tmp_path, CHECKPOINTED_LAYERS))) as run:
        # Freed memory is reused at random, so a single pass may miss the error.
        assert {used(run).casts for _ in range(20)} == {CAST}


def test_an_error_in_user_code_removes_hooks_modes_and_emulation(tmp_path: Path) -> None:
    seen = list[torch.Tensor]()
    net = NET.replace("return self.second(", "h = self.first(x)\n        raise ValueError\n        return self.second(")
    with prepared(load_config(written(tmp_path, net))) as run, contextlib.suppress(UserCodeError):
        used(run)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        (torch.ones(2, requires_grad=True) * 2.0).square().sum().backward()
    assert seen
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not is_emulating()


def test_shared_memory_counts_once_and_composite_tensors_count_their_parts() -> None:
    dense = torch.zeros(4, 8)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2, 5), (3, 5), check_invariants=True)
    assert bytes_of([dense, dense[0], dense.t(), 3, None]) == 4 * 8 * 4
    assert bytes_of([sparse]) == 2 * 8 + 2 * 5 * 4
    jagged = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    assert bytes_of([jagged]) == 5 * 4 * 4 + 3 * 8  # and the offset of each row
    with FakeTensorMode():
        assert bytes_of([torch.ones(3), torch.ones(3, device="meta")]) == 0


class Meshed(TwoTensor):
    """Like a DTensor: one of its parts is not a tensor."""

    mesh = object()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["mesh", "a"], None


def test_a_tensor_subclass_counts_only_its_parts_that_are_tensors() -> None:
    part = torch.ones(3)
    assert bytes_of([Meshed(part, part)]) == 3 * 4


def verified_use(config: Path, level: str) -> PassUse:
    with prepared(load_config(config, (f"precision.level={level}", "train.device=cpu"))) as run:
        use = used(run)
        assert use.activations + use.casts == counted(run)
        return use


def timm_vit(folder: Path) -> Path:
    shape = {"img_size": 32, "patch_size": 4, "depth": 4}
    config = {
        "model": {"target": f"{SIGHT_AND_SOUND}:timm_model", "args": {"name": "vit_tiny_patch16_224", **shape}},
        "data": {"target": f"{SIGHT_AND_SOUND}:picture_pairs"},
        "loss": {"target": "torch.nn.functional:cross_entropy"},
    }
    (folder / "c.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder / "c.yaml"


@pytest.mark.slow
def test_o1_keeps_at_most_60_percent_of_the_fp32_activations_of_a_timm_vit(tmp_path: Path) -> None:
    fp32, o1 = (verified_use(timm_vit(tmp_path), level) for level in ("O0", "O1"))
    assert 0.5 < o1.activations / fp32.activations <= 0.6
    assert o1.flops["float16"] == sum(fp32.flops.values())


def test_activation_and_cast_bytes_of_the_vit_example_are_exact(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    kept = {level: verified_use(ROOT / "configs" / "vit.yaml", level) for level in ("O0", "O1", "O2")}
    # Autocast does not halve attention's share: it keeps the softmax in FP32 and a copy of it in half.
    assert [use.activations for use in kept.values()] == [5_206_532, 3_418_244, 2_604_036]
    assert [use.casts for use in kept.values()] == [0, 173_312, 0]

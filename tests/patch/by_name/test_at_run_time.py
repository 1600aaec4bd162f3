"""The helper at run time: the pinned op runs in FP32, and the rest of the model is unchanged."""

import copy
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampdbg.precision.pins import pin_fp32
from tests.patch.by_name.pinned_models import Model, Scores, autocast_as_on_cuda, dtypes_of_outputs, pinned
from tests.siblings import slow_except

HALF, WIDE = torch.float16, torch.float32

SETS = {
    "a layer": ("first",),
    "a module with children": ("attn",),
    "own lines": ("attn:own",),
    "own lines and a layer in them": ("attn:own", "attn.query"),
    "own lines within own lines": ("attn.inner:own", "attn:own"),
    "a module within own lines": ("attn:own", "attn.inner"),
    "own lines of the root": (":own",),
    "the root": ("",),
}


def model() -> Model:
    torch.manual_seed(0)
    return Model(inner=Scores())


def batch() -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=list(SETS.values()), ids=list(SETS))
def names(request: pytest.FixtureRequest) -> tuple[str, ...]:
    assert isinstance(request.param, tuple)
    return request.param


def test_the_helper_gives_the_outputs_dtypes_and_gradients_of_pin_fp32(names: tuple[str, ...], tmp_path: Path) -> None:
    tried, plain = model(), model()
    kept = pinned(model(), names, tmp_path)
    with autocast_as_on_cuda(), pin_fp32(tried, names):
        expected, seen, unpinned = tried(batch()), kept(batch()), plain(batch())
        assert torch.equal(seen, expected)
        assert dtypes_of_outputs(kept, batch()) == dtypes_of_outputs(tried, batch())
        assert seen.dtype is not unpinned.dtype or not torch.equal(seen, unpinned)
    for output in (expected, seen):
        output.float().sum().backward()
    for (name, one), two in zip(tried.named_parameters(), kept.parameters(), strict=True):
        assert one.grad is not None, name
        assert two.grad is not None, name
        assert torch.equal(one.grad, two.grad), name


def test_a_pinned_layer_returns_float32_and_the_other_layers_return_half(tmp_path: Path) -> None:
    with autocast_as_on_cuda():
        assert dtypes_of_outputs(model(), batch())["first"] is HALF
        seen = dtypes_of_outputs(pinned(model(), ["first"], tmp_path), batch())
    assert (seen["first"], seen["attn.query"], seen["last"]) == (WIDE, HALF, HALF)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert dtypes_of_outputs(pinned(model(), ["first"], tmp_path), batch())["first"] is WIDE


def test_own_lines_run_in_float32_and_the_layers_they_call_in_half(tmp_path: Path) -> None:
    inner: list[torch.Tensor] = []
    kept = pinned(model(), ["attn:own"], tmp_path)
    kept.get_submodule("attn.query").register_forward_pre_hook(lambda _, args: inner.append(args[0]))
    with autocast_as_on_cuda():
        seen = dtypes_of_outputs(kept, batch())
        in_half = nn.functional.linear(inner[0], kept.attn.query.weight, kept.attn.query.bias)
    assert seen["attn"] is WIDE
    assert in_half.dtype is HALF
    with autocast_as_on_cuda():
        assert torch.equal(kept.attn.query(inner[0]), in_half)  # outside the pinned lines it is unchanged


def test_pinning_a_layer_that_overflows_makes_its_output_finite(tmp_path: Path) -> None:
    def big() -> Model:
        changed = Model()
        with torch.no_grad():
            changed.first.weight.fill_(1e5)
        return changed

    with autocast_as_on_cuda():
        assert not torch.isfinite(big().first(torch.ones(1, 4))).all()
        assert torch.isfinite(pinned(big(), ["first"], tmp_path).first(torch.ones(1, 4))).all()


def test_the_helper_leaves_state_dict_keys_and_module_names_unchanged(names: tuple[str, ...], tmp_path: Path) -> None:
    kept, plain = pinned(model(), names, tmp_path), model()
    assert list(kept.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in kept.named_modules()] == [name for name, _ in plain.named_modules()]
    kept.load_state_dict(plain.state_dict(), strict=True)


def through_pickle(kept: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(kept))


def through_torch(kept: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(kept, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_torch])
def test_a_copy_of_a_pinned_model_is_independent_of_the_original(
    copied: Callable[[nn.Module], nn.Module], names: tuple[str, ...], tmp_path: Path
) -> None:
    kept = pinned(model(), names, tmp_path)
    with autocast_as_on_cuda():
        expected = kept(batch())
        made = copied(kept)
        with torch.no_grad():
            for parameter in kept.parameters():
                parameter.fill_(9.0)  # the copy must not read the original
        assert torch.equal(made(batch()), expected)


@pytest.mark.parametrize("kind", slow_except(["own lines within own lines"], SETS))
def test_a_pinned_model_compiles_without_graph_breaks_to_the_same_output(kind: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    kept = pinned(model(), SETS[kind], tmp_path)
    compiled = torch.compile(kept, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, seen = kept(batch()), compiled(batch())
    assert torch.equal(seen, expected)
    seen.float().sum().backward()
    assert kept.get_parameter("first.weight").grad is not None


def test_the_helper_changes_no_output_without_autocast(names: tuple[str, ...], tmp_path: Path) -> None:
    kept, plain = pinned(model(), names, tmp_path).eval(), model().eval()
    assert torch.equal(kept(batch()), plain(batch()))
    for dtype in (torch.bfloat16, torch.float64):
        assert torch.equal(kept.to(dtype)(batch().to(dtype)), plain.to(dtype)(batch().to(dtype)))


def test_a_second_call_of_the_helper_changes_nothing(names: tuple[str, ...], tmp_path: Path) -> None:
    once = pinned(model(), names, tmp_path)
    twice = pinned(pinned(model(), names, tmp_path), names, tmp_path)
    with autocast_as_on_cuda():
        assert torch.equal(once(batch()), twice(batch()))


def test_an_error_in_a_pinned_model_leaves_autocast_enabled(names: tuple[str, ...], tmp_path: Path) -> None:
    kept = pinned(model(), names, tmp_path)
    with autocast_as_on_cuda():
        expected = kept(batch())
        with pytest.raises(RuntimeError, match="shapes"):
            kept(torch.ones(3, 5))
        assert torch.is_autocast_enabled("cpu")
        assert torch.equal(kept(batch()), expected)


def test_a_pinned_model_runs_on_a_device_without_autocast(names: tuple[str, ...], tmp_path: Path) -> None:
    kept = pinned(model().to("meta"), names, tmp_path)
    assert kept(batch().to("meta")).shape == (4, 2)


# Own lines, and the modules that they call


class Telling(nn.Linear):
    """Records the dtype of its result before a cast to FP32 for the lines that call it."""

    result: torch.dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        self.result = output.dtype
        return output


def test_modules_that_are_replaced_after_pinning_own_lines_run_in_half(tmp_path: Path) -> None:
    kept = pinned(model(), ["attn:own"], tmp_path)
    for _ in range(2):  # before the first call, and after it
        query, key = Telling(4, 4), Telling(4, 4)
        kept.attn.query, kept.attn.keys = query, nn.ModuleList([nn.Sequential(key)])
        with autocast_as_on_cuda():
            kept(batch())
        assert (query.result, key.result) == (HALF, HALF)


def test_pinned_lines_do_not_affect_the_autocast_state_of_another_thread(tmp_path: Path) -> None:
    kept = pinned(model(), ["attn:own"], tmp_path)
    elsewhere: list[torch.Tensor] = []
    expected = kept(batch())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        alone = kept(batch())

    def run_elsewhere(*_: object) -> None:
        handle.remove()
        with ThreadPoolExecutor(1) as pool:
            elsewhere.append(pool.submit(kept, batch()).result())

    # While this thread runs the pinned lines, which have left autocast.
    handle = kept.attn.query.register_forward_pre_hook(run_elsewhere)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        together = kept(batch())
    assert torch.equal(elsewhere[0], expected)
    assert torch.equal(together, alone)


class Checkpointed(Scores):
    """Calls its layer through a checkpoint, which recomputes it in the backward pass."""

    def forward(self, x: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        return {"scores": checkpoint(self.query, x, use_reentrant=False)}


def test_a_checkpointed_layer_in_pinned_own_lines_is_recomputed_without_error(tmp_path: Path) -> None:
    kept = Model()
    kept.attn = Checkpointed()
    pinned(kept, ["attn:own"], tmp_path)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kept(batch()).sum().backward()
    assert kept.attn.query.weight.grad is not None


class LeavesAutocast(nn.Sequential):
    """An inner module that keeps its own layers in FP32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=WIDE, enabled=False):
            return super().forward(x.float())


def test_an_inner_module_that_disables_autocast_itself_stays_in_float32(tmp_path: Path) -> None:
    kept = Model()
    left, called = Telling(4, 4), Telling(4, 4)
    kept.attn.query, kept.attn.keys = called, nn.ModuleList([LeavesAutocast(left)])
    pinned(kept, ["attn:own"], tmp_path)
    with autocast_as_on_cuda():
        kept(batch())
    assert (left.result, called.result) == (WIDE, HALF)


# Models of the transformers library


IDS = torch.arange(6).reshape(2, 3)


def test_pinned_layers_of_t5_run_in_float32_and_its_lm_head_in_half(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=32, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    t5 = transformers.T5ForConditionalGeneration(config)
    names = [name for name, _ in t5.named_modules() if name.endswith("DenseReluDense.wo")]
    before = list(t5.state_dict())
    given = {"input_ids": IDS, "labels": IDS}
    with autocast_as_on_cuda():
        plain = dtypes_of_outputs(t5, **given)
        seen = dtypes_of_outputs(pinned(t5, names, tmp_path), **given)
        t5(**given).loss.backward()
    assert [(plain[name], seen[name]) for name in names] == [(HALF, WIDE)] * 4
    assert seen["lm_head"] is HALF
    assert list(t5.state_dict()) == before
    assert t5.get_parameter("encoder.block.0.layer.1.DenseReluDense.wo.weight").grad is not None


@pytest.mark.parametrize("name", ["transformer.h.1.attn", "transformer.h.1.attn:own", "transformer.h.1.attn.c_proj"])
def test_pinned_attention_of_gpt2_gives_the_logits_and_tokens_of_pin_fp32(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    options = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=2, n_head=2, **options)
    torch.manual_seed(0)
    gpt2 = transformers.GPT2LMHeadModel(config).train()
    tried = copy.deepcopy(gpt2)
    with autocast_as_on_cuda(), pin_fp32(tried, [name]):
        plain = dtypes_of_outputs(gpt2, input_ids=IDS)
        kept = pinned(gpt2, [name], tmp_path)
        assert torch.equal(kept(input_ids=IDS).logits, tried(input_ids=IDS).logits)
        seen = dtypes_of_outputs(kept, input_ids=IDS)
    module = name.removesuffix(":own")
    assert (plain[module], plain["transformer.h.0.attn"]) == (HALF, HALF)
    assert (seen[module], seen["transformer.h.0.attn"]) == (WIDE, HALF)
    greedy = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    written = [one.eval().generate(IDS[:1], **greedy) for one in (tried, kept)]
    assert torch.equal(*written)

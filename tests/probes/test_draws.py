"""Tests of random numbers in a replay: it drops and draws as the step did, also where a GPU's dtype changes them."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ampdbg.config.file import load_config
from ampdbg.config.schema import Config
from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.precision.widening import LIFTS, lifted
from ampdbg.probes import draws
from ampdbg.probes.draws import Draws, attention, same_random_numbers
from ampdbg.probes.seams import replaced
from ampdbg.training.fp32_twin import distance, fp32_losses
from ampdbg.training.loop import train
from tests.zoo.test_zoo import FILES, config_of

BEFORE = F.scaled_dot_product_attention


def drawn(like: torch.Tensor, dtype: torch.dtype, p: float) -> torch.Tensor:
    """A dropout mask that orders its random numbers differently in half, as CUDA's does."""
    kept = torch.rand(like.numel()) >= p
    return (kept.flip(0) if dtype is torch.float16 else kept).view(like.shape)


def as_on_a_gpu(original: Callable[..., Any]) -> Callable[..., Any]:
    def dropout(given: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        return given * drawn(given, given.dtype, p) / (1.0 - p) if train else original(given, p, train)

    return dropout


@pytest.fixture
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(draws, "depends_on_dtype", lambda tensor: True)
    monkeypatch.setattr(draws, "mask_of", drawn)
    with replaced(torch._VF, "dropout", as_on_a_gpu), replaced(torch, "dropout", as_on_a_gpu):
        yield


def config(folder: Path) -> Config:
    file = next(file for file in FILES if file.stem == "dropout")
    return load_config(config_of(file, folder), ("train.device=cpu",))


@pytest.mark.usefixtures("_on_a_gpu")
def test_a_healthy_model_with_dropout_is_not_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = diagnose(train(config(tmp_path)))
    assert (record.verdict, [one.code for one in record.findings]) == ("healthy", ["scale-calibration"])
    low, fp32 = record.investigations[0].low, record.investigations[0].fp32
    assert low.loss == pytest.approx(record.steps[-1].loss)
    assert fp32 is not None
    assert fp32.loss == pytest.approx(low.loss, rel=1e-2)
    monkeypatch.setattr(draws, "depends_on_dtype", lambda tensor: False)
    assert diagnose(train(config(tmp_path))).findings[0].code == "precision-loss"  # the control


@pytest.mark.usefixtures("_on_a_gpu")
def test_each_dropout_of_a_replay_uses_the_mask_of_the_step() -> None:
    known, x = Draws(), torch.ones(64)
    torch.manual_seed(0)
    with same_random_numbers(known, notes=True):
        there = [F.dropout(x.half()), torch.dropout(x, 0.25, True), F.dropout(x, training=False)]
    assert (known.dtypes, known.are_noted) == ([torch.float16, torch.float32], True)
    for wide in (torch.float32, torch.float64):
        torch.manual_seed(0)
        leaf = x.to(wide).requires_grad_()
        with same_random_numbers(known, notes=False):
            here = [F.dropout(leaf), F.dropout(x, 0.25), F.dropout(x, training=False)]
        assert [one.dtype for one in here] == [wide, torch.float32, torch.float32]
        assert all(torch.equal(one.float(), other.float()) for one, other in zip(here, there, strict=True))
        (gradient,) = torch.autograd.grad(here[0].sum(), leaf)
        assert torch.equal(gradient, here[0])
    torch.manual_seed(0)
    with same_random_numbers(known, notes=False):
        assert torch.equal(F.dropout(x.clone(), inplace=True), there[0].float())


NOISES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "new": lambda like: torch.randn(24, dtype=like.dtype),
    "new, by default": lambda like: torch.rand(24),
    "like another": torch.randn_like,
    "in place": lambda like: torch.empty_like(like).exponential_(2.0),
    "by tensors": lambda like: torch.normal(torch.zeros_like(like), torch.ones_like(like)),
    "by numbers": lambda like: torch.normal(0.0, 2.0, (24,)),
    "by a mean alone": lambda like: torch.normal(like, 1.0),
    "of a distribution": lambda like: torch.distributions.Normal(like, like).sample(),
    "indices": lambda like: torch.multinomial(like, 20).to(like.dtype),
    "counts": torch.poisson,
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_noise_has_the_values_of_the_step_in_the_dtype_of_the_replay(
    noise: Callable[[torch.Tensor], torch.Tensor], dtype: str
) -> None:
    known, like, wider = Draws(), torch.ones(24, dtype=torch.float16), LIFTS[dtype]
    torch.manual_seed(0)
    with same_random_numbers(known, notes=True):
        there = [noise(like), torch.randn(2)]
    for _ in range(2):
        torch.manual_seed(0)
        with lifted(dtype), same_random_numbers(known, notes=False, wider=wider):
            here = [noise(like.to(wider[torch.float16])), torch.randn(2)]
        assert here[0].dtype is wider.get(there[0].dtype, there[0].dtype)
        assert [one.tolist() for one in here] == [one.tolist() for one in there]
    torch.manual_seed(0)
    assert torch.equal(noise(like), there[0])  # no patch is left


class NamingMode(TorchDispatchMode):
    """Records the ops that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("_on_a_gpu")
def test_a_dropout_runs_the_same_ops_in_half_as_in_fp32() -> None:
    known, found = Draws(), list[list[str]]()
    with replaced(torch._VF, "dropout", lambda _: lambda *given: torch.native_dropout(*given)[0]):
        for dtype in (torch.float16, torch.float32):
            with same_random_numbers(known, notes=not found), NamingMode() as names:
                F.dropout(torch.ones(64, dtype=dtype))
            found.append(names.ops[-2:])
    assert found == [["aten.mul.Tensor"] * 2] * 2


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.usefixtures("_on_a_gpu")
def test_another_dropout_mask_counts_as_noise_only_if_it_depends_on_the_dtype(
    seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "depends_on_dtype", lambda tensor: seen)
    noise = distance(fp32_losses(config(tmp_path), is_rounded=True), fp32_losses(config(tmp_path)))
    assert (noise > 0.05) is seen


@pytest.mark.usefixtures("_on_a_gpu")
def test_the_notes_of_a_replay_that_raised_are_discarded() -> None:
    known = Draws()
    with contextlib.suppress(RuntimeError), same_random_numbers(known, notes=True):
        F.dropout(torch.ones(4))
        raise RuntimeError("own")
    with same_random_numbers(known, notes=True):
        F.dropout(torch.ones(4).half())
    assert (known.dtypes, known.are_noted) == ([torch.float16], True)


def test_dropout_and_attention_are_restored_after_an_error() -> None:
    names = ("dropout", "dropout_")
    before = [getattr(torch, name) for name in names]
    with pytest.raises(RuntimeError, match="own"), same_random_numbers(Draws(), notes=True):
        raise RuntimeError("own")
    assert [getattr(torch, name) for name in names] == before
    assert not vars(torch._VF).keys() & set(names)
    assert F.scaled_dot_product_attention is BEFORE


MASK = torch.rand(5, 7, generator=torch.Generator().manual_seed(3))
ADDED = MASK.log()
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 0.3},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": MASK > 0.3},
    "added": {"attn_mask": ADDED},
    "grouped": {"enable_gqa": True},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_attention_matches_torch_with_scores_in_float32_or_wider(options: dict[str, Any], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    heads = 2 if "enable_gqa" in options else 4
    shapes = ((2, 4, 5, 8), (2, heads, 7, 8), (2, heads, 7, 8))
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    wide = torch.promote_types(dtype, torch.float32)
    rounded = {**options, "attn_mask": ADDED.to(dtype).to(wide)} if options.get("attn_mask") is ADDED else options
    expected = F.scaled_dot_product_attention(query.to(wide), key.to(wide), value.to(wide), **rounded)
    result = attention(query, key, value, **options)
    assert result.dtype is dtype
    torch.testing.assert_close(result, expected.to(dtype))


def test_a_mask_beyond_float16_is_cast_with_the_scores() -> None:
    query, mask = torch.ones(1, 1, 2, 4), torch.full((2, 2), -1e9)
    assert (attention(query, query, query, mask) == 1.0).all()
    with torch.autocast("cpu", torch.float16):  # every kernel of torch gives zeros for rows of -inf
        assert (attention(query, query, query, mask) == 0.0).all()


@pytest.mark.usefixtures("_on_a_gpu")
def test_attention_with_dropout_draws_the_same_in_every_dtype() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, 6, 8, generator=generator).half().float() for _ in range(3))
    results = list[torch.Tensor]()
    for dtype in (torch.float16, torch.float32):
        torch.manual_seed(0)
        with (
            same_random_numbers(Draws(), notes=True),
            torch.autocast("cpu", torch.float16, enabled=dtype is torch.float16),
        ):
            results.append(F.scaled_dot_product_attention(query, key, value, dropout_p=0.5))
        assert results[-1].dtype is dtype
    torch.testing.assert_close(results[0].float(), results[1], rtol=2e-3, atol=2e-3)
    with same_random_numbers(Draws(), notes=True):
        assert not torch.equal(F.scaled_dot_product_attention(query, key, value, None, 0.5), results[1])
        assert torch.equal(F.scaled_dot_product_attention(query, key, value), BEFORE(query, key, value))

"""The largest batch that fits: the search by doubling, its extrapolation, and the reasons for which it ends."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ampdbg.costs.levels import enlarged, largest_batch, shared_dimension
from ampdbg.errors import AmpdbgError
from ampdbg.record.run import BatchFit

BATCH = {"x": torch.ones(8, 3), "y": (torch.arange(8), torch.tensor(2.0)), "names": ["a"]}


def fit(room: int, size: Callable[[int], int], batch: Any = BATCH) -> BatchFit:
    """``size`` returns the bytes of a batch with the given number of samples."""
    return largest_batch(batch, room, size(8), lambda larger: size(len(larger["x"])))


def proportional(samples: int) -> int:
    return 100 + 10 * samples


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (179, BatchFit(0, (180,))),
        (180, BatchFit(1, (180, 260))),
        (259, BatchFit(1, (180, 260))),
        (260, BatchFit(2, (180, 260, 420))),
        (420, BatchFit(4, (180, 260, 420), is_reckoned=True)),
        (739, BatchFit(4, (180, 260, 420), is_reckoned=True)),
        (740, BatchFit(8, (180, 260, 420), is_reckoned=True)),
        (100 + 10 * 8 * 1024, BatchFit(1024, (180, 260, 420), is_reckoned=True)),
    ],
)
def test_proportional_memory_is_extrapolated_to_the_byte(room: int, expected: BatchFit) -> None:
    assert fit(room, proportional) == expected


def test_memory_that_grows_out_of_proportion_or_not_at_all_is_measured_and_not_extrapolated() -> None:
    assert fit(16**2, lambda samples: samples**2) == BatchFit(2, (64, 256, 1024))
    why = "memory does not grow in proportion, so ampdbg tried no larger batch"
    measured = tuple(samples**2 for samples in (8, 16, 32, 64, 128))
    assert fit(10**9, lambda samples: samples**2) == BatchFit(16, measured, why=why)
    assert fit(10**9, lambda samples: 64) == BatchFit(16, (64,) * 5, why=why)


def test_doubling_reports_a_missing_shared_dimension_and_an_error_of_the_model() -> None:
    assert shared_dimension([torch.ones(3), torch.ones(4)]) is None
    assert "share no dimension" in largest_batch([torch.ones(3), torch.ones(4)], 10, 1, lambda batch: 1).why

    def raises(samples: int) -> int:
        if samples > 16:
            raise AmpdbgError("the model raised ValueError: got 32, needed 16\nand more")
        return proportional(samples)

    found = fit(10**6, raises)
    assert (found.times, found.why) == (2, "4 times: the model raised ValueError: got 32, needed 16")


def test_doubling_reports_tensors_that_torch_cannot_repeat() -> None:
    rows = torch.ones(4, 3).to_sparse_csr()
    found = largest_batch([rows, torch.ones(4)], 10, 1, lambda batch: 1)
    assert found.times == 1
    assert found.why.startswith("torch cannot double the batch: ")
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    assert shared_dimension([nested, torch.ones(2)]) is None


@pytest.mark.parametrize(
    ("batch", "shared"),
    [
        (BATCH, (0, 8)),
        ((torch.ones(5, 2), torch.ones(5)), (0, 5)),
        ((torch.ones(7, 4), torch.ones(9, 4)), (1, 4)),  # sequence first
        (torch.tensor(3.0), None),
        ("text", None),
    ],
)
def test_the_batch_dimension_is_the_first_that_all_tensors_share(batch: Any, shared: tuple[int, int] | None) -> None:
    assert shared_dimension(batch) == shared


def test_enlarging_repeats_along_the_given_dimension_and_leaves_the_batch_unchanged() -> None:
    larger = enlarged(BATCH, 4, 0)
    assert torch.equal(larger["y"][0], torch.arange(8).repeat(4))
    assert (larger["x"].shape, larger["y"][1].item(), larger["names"]) == ((32, 3), 2.0, ["a"])
    assert shared_dimension(BATCH) == (0, 8)
    assert enlarged((torch.ones(7, 4), torch.ones(9, 4)), 2, 1)[1].shape == (9, 8)

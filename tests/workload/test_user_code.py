"""The message and traceback that a user sees for an exception in their own code."""

from pathlib import Path

import pytest
import torch

import ampdbg
from ampdbg.errors import UserCodeError, WorkloadError
from ampdbg.workload.user_code import UserCode
from tests.workload.folders import build, first_losses

USER = UserCode(())


def shown(folder: Path, *overrides: str, net: str) -> str:
    with pytest.raises(UserCodeError) as raised:
        first_losses(build(folder, *overrides, net=net))
    return raised.value.user_traceback.replace(str(folder), "FOLDER")


def frames(text: str) -> list[str]:
    """The file and function of every frame, innermost last."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("  File ")]
    return [f"{Path(line.split(chr(34))[1]).name}:{line.rpartition(' in ')[2]}" for line in lines]


BROKEN = """
class Inner(nn.Module):
    @torch.no_grad()
    def forward(self, x):
        raise KeyError("mask")

class Broken(Net):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(Inner())

    def forward(self, x):
        return {}
"""


@pytest.mark.parametrize(
    ("returned", "expected", "said"),
    [
        ("self.inner(x)", ["net.py:forward", "net.py:forward"], "KeyError: 'mask'\n"),
        ("self.head(x[:, :3])", ["net.py:forward", "linear.py:forward"], "mat1 and mat2 shapes cannot be multiplied"),
        ("torch.ops.aten.mm.default(x, x)", ["net.py:forward"], "mat1 and mat2 shapes cannot be multiplied"),
    ],
    ids=["only the user's are shown", "the library's that raised is kept", "the dispatcher's is of no interest"],
)
def test_a_traceback_shows_user_frames_and_the_raising_library_frame(
    tmp_path: Path, returned: str, expected: list[str], said: str
) -> None:
    text = shown(tmp_path, "model.target=net.py:Broken", net=BROKEN.format(returned))
    assert frames(text) == expected
    assert said in text.splitlines(keepends=True)[-1]


def test_a_call_with_wrong_arguments_shows_no_frame_of_ampdbg(tmp_path: Path) -> None:
    text = shown(tmp_path, "data.target=net.py:named", net="named = [({'a': 1}, 0)]\n")
    assert "TypeError" in text
    assert str(Path(ampdbg.__file__).parent) not in text


CAUSED = """
def broken():
    try:
        Net(width="four")
    except TypeError as error:
        raise ValueError("a width is a number") from error

def deeply_broken():
    error = ValueError("the first")
    for _ in range(3000):
        later = ValueError("again")
        later.__cause__ = error
        error = later
    raise error
"""


def test_causes_are_shown_without_frames_of_ampdbg_even_if_thousands(tmp_path: Path) -> None:
    text = shown(tmp_path, "model.target=net.py:broken", net=CAUSED)
    assert "The above exception was the direct cause" in text
    assert frames(text)[-1] == "net.py:broken"
    text = shown(tmp_path, "model.target=net.py:deeply_broken", net=CAUSED)
    assert "ValueError: the first" in text
    assert text.count("ValueError: again") >= 3000


def test_an_error_may_have_an_exceptions_attribute_like_an_exception_group(tmp_path: Path) -> None:
    source = "class Several(Exception):\n    exceptions = None\n\ndef broken():\n    raise Several('none left')\n"
    text = shown(tmp_path, "model.target=net.py:broken", net=source)
    assert "Several: none left" in text
    assert frames(text) == ["net.py:broken"]


def test_the_original_exception_is_the_cause(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError) as raised:
        build(tmp_path, net="raise ArithmeticError('x')\n")
    assert type(raised.value.__cause__) is ArithmeticError


def test_an_error_of_ampdbg_is_raised_unchanged() -> None:
    with pytest.raises(WorkloadError, match=r"^as it was$"), USER.running("training"):
        raise WorkloadError("as it was")


def test_only_the_first_line_of_a_long_error_is_in_the_message() -> None:
    with pytest.raises(UserCodeError) as raised, USER.running("running", details=lambda: "more"):
        raise RuntimeError("first\nsecond")
    assert str(raised.value) == "running raised RuntimeError: first\nmore"
    assert "second" in raised.value.user_traceback


def test_a_later_batch_is_named_by_its_number(tmp_path: Path) -> None:
    workload = build(tmp_path, "data.target=net.py:uneven", net="uneven = batches(2) + [(torch.ones(8, 3), None)]\n")
    stream = workload.batches()
    batches = [next(stream) for _ in range(3)]
    with pytest.raises(UserCodeError, match=r"\nbatch 2 holds \[0\]: float32 \[8, 3\]$"):
        workload.losses(batches[2])
    with pytest.raises(UserCodeError, match=r"\nbatch holds \[0\]: float32 \[8, 3\]$"):
        workload.losses((torch.ones(8, 3), None))

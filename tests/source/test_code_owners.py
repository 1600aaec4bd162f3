"""The owner of a frame's code: the name of its module decides, wherever its file is."""

import importlib
import sys
from pathlib import Path
from types import FrameType

import pytest

import ampdbg
from ampdbg.source.ownership import is_ampdbgs, is_users_or_a_librarys, line_of_error, module_of

PACKAGE = Path(ampdbg.__file__).parent


def frame_of(module: str, file: str) -> FrameType:
    """A frame that runs code of this module and file."""
    names: dict[str, object] = {"__name__": module, "sys": sys}
    exec(compile("frame = (lambda: sys._getframe())()", file, "exec"), names)
    frame = names["frame"]
    assert isinstance(frame, FrameType)
    return frame


@pytest.mark.parametrize(
    ("module", "file", "is_named"),
    [
        ("net", "/home/me/net.py", True),
        ("__main__", "/home/me/train.py", True),
        ("timm.models.vit", "/env/site-packages/timm/models/vit.py", True),
        ("torchvision.models", "/env/site-packages/torchvision/models/__init__.py", True),
        ("torch.nn.modules.linear", "/somewhere/else/linear.py", False),
        ("ampdbg.probes.op_trace", "/somewhere/else/op_trace.py", False),
        ("ampdbg.a.room.of.tomorrow", "/somewhere/else/tomorrow.py", False),
        ("net", str(PACKAGE / "probes" / "net.py"), True),
        ("net", "<string>", False),
        ("code", "/home/me/code.py", True),
        ("contextlib", str(sys.modules["contextlib"].__file__), False),
        ("importlib.util", str(importlib.util.__file__), False),
    ],
)
def test_user_and_library_code_is_recognized_by_the_name_of_its_module(module: str, file: str, is_named: bool) -> None:
    assert is_users_or_a_librarys(frame_of(module, file)) is is_named


def test_a_module_that_runs_as_a_program_keeps_its_spec_name() -> None:
    frame = frame_of("__main__", "/env/ampdbg/__main__.py")
    frame.f_globals["__spec__"] = importlib.util.spec_from_loader("ampdbg.__main__", loader=None)
    assert module_of(frame) == "ampdbg.__main__"
    assert is_ampdbgs(frame)


def test_an_error_belongs_to_the_innermost_line_of_the_user() -> None:
    here = __file__
    with pytest.raises(LookupError) as raised:
        importlib.import_module("codecs").lookup("no such codec")
    line = line_of_error(raised.value)
    assert line is not None
    assert line[0] == here
    assert line[2] == "test_an_error_belongs_to_the_innermost_line_of_the_user"

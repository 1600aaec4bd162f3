"""Imports of a file: what they bind, which expressions are autocast, and where another import goes."""

import libcst as cst
import pytest

from ampdbg.source.expressions import disables_autocast, imports_of, origin_of, with_imported

IMPORTS = {
    "import torch.nn": {"torch": "torch"},
    "import torch.nn as nn": {"nn": "torch.nn"},
    "from torch.nn import functional as F": {"F": "torch.nn.functional"},
    "from . import heads": {"heads": "..heads"},
    "try:\n    import torch\nexcept ImportError:\n    torch = None": {"torch": "torch"},
    "if TYPE_CHECKING:\n    import torch": {},
    "from torch import *": {},
}


@pytest.mark.parametrize(("source", "bound"), IMPORTS.items(), ids=IMPORTS.keys())
def test_what_imports_bind(source: str, bound: dict[str, str]) -> None:
    assert imports_of(cst.parse_module(source).body) == bound


def test_a_name_is_followed_to_where_it_comes_from() -> None:
    assert origin_of("F.softmax", {"F": "torch.nn.functional"}) == "torch.nn.functional.softmax"
    assert origin_of("x.softmax", {"F": "torch.nn.functional"}) == ""


@pytest.mark.parametrize(
    ("expression", "off"),
    [
        ("torch.autocast('cuda', enabled=False)", True),
        ("torch.cuda.amp.autocast()", False),
        ("cast_off(enabled=False)", True),
        ("open('x')", False),
    ],
)
def test_autocast_is_known_by_any_of_its_names(expression: str, off: bool) -> None:
    imports = {"torch": "torch", "cast_off": "torch.amp.autocast"}
    item = cst.parse_expression(expression)
    assert disables_autocast(item, imports) == off


PLACED = {
    "before torch's own": (
        "import math\n\nimport numpy\nfrom torch import nn\n\nx = 1\n",
        "import math\n\nimport numpy\nimport torch\nfrom torch import nn\n\nx = 1\n",
    ),
    "in a section of its own": ("import math\n\nx = 1\n", "import math\n\nimport torch\n\nx = 1\n"),
    "in front of the package's own": ("from . import a\n\nx = 1\n", "import torch\n\nfrom . import a\n\nx = 1\n"),
    "below the docstring": ('"""Doc."""\n\nx = 1\n', '"""Doc."""\n\nimport torch\n\nx = 1\n'),
    "on top": ("x = 1\n", "import torch\n\nx = 1\n"),
    "nowhere, as it is there": ("import torch\n", "import torch\n"),
}


@pytest.mark.parametrize(("before", "after"), PLACED.values(), ids=PLACED.keys())
def test_an_import_goes_where_a_person_would_put_it(before: str, after: str) -> None:
    assert with_imported(cst.parse_module(before), "torch").code == after

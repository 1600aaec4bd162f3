"""Imports of a file: the names that they bind, the expressions that are autocast, and the place of a new import."""

import ast

import pytest

from ampdbg.source.edits import with_imported
from ampdbg.source.names import disables_autocast, imports_of, origin_of

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
def test_imports_of_maps_bound_names_to_their_origins(source: str, bound: dict[str, str]) -> None:
    assert imports_of(ast.parse(source).body) == bound


def test_origin_of_resolves_only_imported_names() -> None:
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
def test_disabled_autocast_is_recognized_under_any_imported_name(expression: str, off: bool) -> None:
    imports = {"torch": "torch", "cast_off": "torch.amp.autocast"}
    item = ast.parse(expression, mode="eval").body
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
    "below the comment on top": ("# Licence\n\nx = 1\n", "# Licence\n\nimport torch\n\nx = 1\n"),
    "nowhere, as it is there": ("import torch\n", "import torch\n"),
}


@pytest.mark.parametrize(("before", "after"), PLACED.values(), ids=PLACED.keys())
def test_a_missing_import_is_inserted_in_the_right_section(before: str, after: str) -> None:
    assert with_imported(before, "torch") == after

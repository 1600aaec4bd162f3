"""The suite on every Python of this machine that ampdbg runs on, with the oldest torch, a middle and the newest.

``make matrix`` runs all; ``.venv/bin/nox --list`` names the sessions and ``-s`` picks some. Each makes a virtual
environment of its own, of several gigabytes where torch comes with CUDA.
"""

from __future__ import annotations

import nox

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.error_on_missing_interpreters = False

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("==2.6.*", "==2.10.*", ">=2.6")
"""The oldest that pyproject allows, one between, and the newest that the index has."""

WITHOUT_OLDEST_TORCH = ("3.14",)
"""The Pythons that torch 2.6 has no build for."""


@nox.session(python=PYTHONS)
@nox.parametrize("torch", TORCHES, ids=("oldest", "middle", "newest"))
def tests(session: nox.Session, torch: str) -> None:
    """The tests of `make test` and `make slow`, without lint and types."""
    if torch == TORCHES[0] and session.python in WITHOUT_OLDEST_TORCH:
        session.skip(f"torch 2.6 has no build for Python {session.python}")
    # torch.testing._internal of the oldest imports setuptools.
    session.install(f"torch{torch}", "-e", ".[test]", "setuptools")
    session.run("python", "-c", "import torch; print('torch', torch.__version__)")
    workers = ("--numprocesses=auto", "--maxprocesses=8", "--dist=worksteal")
    session.run("pytest", "--quiet", "-m", "slow or not slow", *workers, *session.posargs)

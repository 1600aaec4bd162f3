"""Runs scripts one after the other and prints as JSON each one's ``losses`` or the error that ended it."""

import contextlib
import json
import runpy
import sys
import warnings


def losses_of(script: str) -> list[float] | str:
    try:
        found: list[float] = runpy.run_path(script)["losses"]
    except Exception as error:  # noqa: BLE001 - any error that ends a script is its result
        return f"{type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):
        found = {script: losses_of(script) for script in sys.argv[1:]}
    sys.stdout.write(json.dumps(found))

"""``ampdbg doctor``: what this machine can do for mixed precision, and what ampdbg emulates."""

from __future__ import annotations

import sys

from ampdbg.errors import EXIT_COULD_NOT_RUN, EXIT_HEALTHY

from . import options
from .output import look_of
from .streams import write_result


def command(
    as_json: options.AsJson = False,
) -> int:
    """Show what this machine can do for mixed precision.

    Checks the GPU, the driver, torch and frameworks, and shows what ampdbg emulates. It works without torch, or with
    a broken one. The exit code is 2 where ampdbg cannot run.
    """
    # Imported here, so that `ampdbg --help` does not wait for them.
    import json
    from dataclasses import asdict

    from ampdbg.machine.facts import this_machine
    from ampdbg.machine.judgments import judged

    machine = this_machine()
    if as_json:
        lines = [asdict(judgment) for judgment in judged(machine)]
        text = json.dumps(
            {"format": "ampdbg.doctor", "version": 1, "machine": asdict(machine), "lines": lines}, indent=2
        )
        write_result(text + "\n", sys.stdout)
    else:
        from ampdbg.report.doctor import page
        from ampdbg.report.formats.text import draw

        write_result(draw(page(machine), look_of(sys.stdout)), sys.stdout)
    return EXIT_HEALTHY if machine.torch.imported else EXIT_COULD_NOT_RUN

"""``ampdbg schema``: the JSON schema of the config, with which editors complete and check YAML."""

from __future__ import annotations

import json
import sys

from ampdbg.errors import EXIT_HEALTHY

from .streams import write_result


def command() -> int:
    """Print the config's JSON schema.

    For editors: ampdbg schema > ampdbg.schema.json, with this first line in the config:
    # yaml-language-server: $schema=ampdbg.schema.json
    """
    from ampdbg.config.schema import json_schema  # pydantic, which `ampdbg --help` does not need

    write_result(json.dumps(json_schema(), indent=2) + "\n", sys.stdout)
    return EXIT_HEALTHY

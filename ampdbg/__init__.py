"""ampdbg: the precision debugger for PyTorch mixed-precision training."""

from __future__ import annotations

import sys
from types import ModuleType

# The program imports this package first, and Ctrl-C prints a traceback until its handler is set. `typing` takes 30 ms.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .api import bisect as bisect
    from .api import capture as capture
    from .api import cost as cost
    from .api import ranges as ranges
    from .api import replay as replay
    from .api import run as run
    from .api import scan as scan
    from .api import suggest_fp32 as suggest_fp32
    from .callbacks import lightning_callback as lightning_callback
    from .callbacks import transformers_callback as transformers_callback
    from .diagnosis.diagnose import diagnose as diagnose
    from .precision.pins import pin_fp32 as pin_fp32
    from .record.file import write_record as write_record
    from .script.loop_watch import watch as watch

__version__ = "0.1.0"

# Imported on first use, so that `import ampdbg` and `ampdbg --help` do not wait for torch.
_HOMES = {
    **dict.fromkeys(("scan", "ranges", "bisect", "cost", "run", "replay", "capture", "suggest_fp32"), ".api"),
    **dict.fromkeys(("lightning_callback", "transformers_callback"), ".callbacks"),
    "watch": ".script.loop_watch",
    "diagnose": ".diagnosis.diagnose",
    "write_record": ".record.file",
    "pin_fp32": ".precision.pins",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


class _Package(ModuleType):
    """Keeps a function such as ``replay`` when Python binds the imported subpackage of the same name."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

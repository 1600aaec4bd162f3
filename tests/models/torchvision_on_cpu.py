"""Makes torchvision importable beside a CPU build of torch; timm and transformers import it whenever it is there.

The torchvision that PyPI serves for Linux is built for CUDA. Beside a torch without CUDA its compiled ops cannot
load, which it tolerates, and then its meta kernels for them raise, which it does not: "operator torchvision::nms
does not exist". No model here uses those ops, so their meta kernels are left out and all else is torchvision's own.
"""

import contextlib
import sys
from types import ModuleType

META_KERNELS = "torchvision._meta_registrations"

with contextlib.suppress(ImportError):
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        sys.modules[META_KERNELS] = ModuleType(META_KERNELS)

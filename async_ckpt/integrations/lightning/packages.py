"""Lightning's packages, which exist under two names.

In: nothing. Out: the modules that the program has imported, with their version checked. Knows nothing of: checkpoints.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from ..common.framework_checks import require

# The same code under two names; a program may have either. Each: Fabric, the package with the version, the Trainer.
_PACKAGES: Final = (
    ("lightning.fabric", "lightning", "lightning.pytorch"),
    ("lightning_fabric", "lightning_fabric", "pytorch_lightning"),
)


def imported_packages() -> list[tuple[Any, Any]]:
    """Fabric and the Trainer's package, under each name that the program has imported or, if none, that is installed.

    The Trainer's package is None if it is missing. Raises ImportError if neither name is installed.
    """
    rows = [row for row in _PACKAGES if sys.modules.get(row[0])] or [row for row in _PACKAGES if find_spec(row[1])]
    if not rows:
        require("lightning")
    packages = []
    for fabric, versioned, pytorch in rows:
        require(versioned)
        trainer = import_module(pytorch) if find_spec(pytorch) else None
        packages.append((import_module(fabric), trainer))
    return packages

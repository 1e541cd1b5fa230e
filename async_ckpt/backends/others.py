"""Accelerators of other makers, after what they publish: none of this has run on their hardware.

In: devices, addresses. Out: what they do otherwise than backends in general. Knows nothing of: saves, loads.
"""

from __future__ import annotations

from typing import Final

from .base import Backend

# ACL_HOST_REG_MAPPED of aclrtHostRegisterV2, which torch.npu.npurt().npuHostRegister passes on.
_MAPPED: Final = 2


class Npu(Backend):
    """Ascend. It refuses memory that does not begin and end on a page (error 507899); ours always does."""

    register_flags = _MAPPED

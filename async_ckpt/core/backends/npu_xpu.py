"""Accelerators of Huawei and Intel, written from their documentation: this code has not run on their hardware.

In: devices, addresses. Out: their differences from backends in general. Knows nothing of: saves, loads.
"""

from __future__ import annotations

from typing import Final

from .backend import AllocatedBackend, Backend

# ACL_HOST_REG_MAPPED of aclrtHostRegisterV2, which torch.npu.npurt().npuHostRegister passes on.
_MAPPED: Final = 2


class Npu(Backend):
    """Ascend. Its runtime refuses memory that is not made of whole pages (error 507899); our buffers are."""

    register_flags = _MAPPED


class Xpu(AllocatedBackend):
    """Intel. Its runtime cannot lock existing memory, but torch's allocator provides locked memory."""

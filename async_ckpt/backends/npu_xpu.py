"""Accelerators of other makers, after what they publish: none of this has run on their hardware.

In: devices, addresses. Out: what they do otherwise than backends in general. Knows nothing of: saves, loads.
"""

from __future__ import annotations

from typing import Final

import torch

from .backend import Backend

# ACL_HOST_REG_MAPPED of aclrtHostRegisterV2, which torch.npu.npurt().npuHostRegister passes on.
_MAPPED: Final = 2


class Npu(Backend):
    """Ascend. It refuses memory that does not begin and end on a page (error 507899); ours always does."""

    register_flags = _MAPPED


class Xpu(Backend):
    """Intel. Its runtime locks no memory that is there already, but torch's allocator gives out such as is locked."""

    def host_memory(self, num_bytes: int) -> torch.Tensor | None:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

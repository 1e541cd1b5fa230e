"""Host copies on a machine with little memory."""

from async_ckpt.core.staging import host_copy
from async_ckpt.core.staging.host_copy import BufferPool


def with_budget(monkeypatch, max_bytes: int) -> BufferPool:
    """A pool of buffers that finds so much memory for all of its copies."""
    made = BufferPool()
    monkeypatch.setattr(host_copy, "spare_memory_bytes", lambda: max_bytes - made.lent_bytes - made._idle_bytes())
    return made

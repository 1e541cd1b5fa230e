"""Python's garbage collector, kept from running while many objects are made that all stay.

In: nothing. Out: nothing. Knows nothing of: what is made.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector of this process from running.

    A walk over 100,000 tensors makes as many objects that all stay, and sets off full collections that find no garbage
    and take a quarter of its time, or half.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()

"""Counting of the branches of the library, for atheris. It has to begin before anything imports the library.

In: imports. Out: the same, counted. Knows nothing of: inputs.
"""

import contextlib
import importlib.util
import io
from collections.abc import Iterator

HAS_ATHERIS = importlib.util.find_spec("atheris") is not None


@contextlib.contextmanager
def instrumented() -> Iterator[None]:
    """While the library is imported: its branches are counted, if atheris is there."""
    if not HAS_ATHERIS:
        yield
        return
    import atheris

    with contextlib.redirect_stderr(io.StringIO()), atheris.instrument_imports(include=["async_ckpt"]):
        yield

"""A run that is reached through a proxy, and what it says when that misbehaves."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from buckets import PART, Bucket, OnServer, no_memory_is_lent, through
from racing import until
from states import assert_is_state, open_run, state_at

from async_ckpt import AsyncCheckpointer, Place, StorageUnavailableError
from async_ckpt.testing import FaultyProxy

# A store that does not come back is given up after this time.
SOON = {"deadline_seconds": 1.5}
# obstore makes no request again by itself, so that every trouble is the sink's.
NO_RETRIES = {"retry_config": {"max_retries": 0}}
# What the two engines say to do.
FORBIDDEN = "credentials|access key|make sure that one may"
AWAY = "check that the store is up|make sure that the endpoint is right"
BIG = 9  # MiB of a state that goes by two parts


_objects: dict[str, bytes] = {}  # of a run that holds step 1: made once, and laid into each bucket


class Far:
    """A run that is reached through a proxy, and holds step 1."""

    def __init__(self, bucket: Bucket, proxy: FaultyProxy, engine: str) -> None:
        self.bucket, self.proxy, self.engine = bucket, proxy, engine
        self.direct = OnServer(bucket, "obstore")
        if not _objects:
            with self.direct.run() as ckpt:
                ckpt.save(state_at(1), step=1).result()
            _objects.update({name: self.direct.read(name) for name in self.direct.names()})
        for name, data in _objects.items():
            bucket.write([f"runs/a/{name}"], data)

    @property
    def url(self) -> str:
        return self.direct.url

    def options(self, **options: Any) -> dict[str, Any]:
        return through(self.proxy, self.bucket, **options)

    def place(self, path: str = "", **options: Any) -> Place:
        url = f"{self.url}/{path}".rstrip("/")
        return Place(url, options=self.options(**options), engine=self.engine)

    def run(self, *, options: dict[str, Any] | None = None, **others: Any) -> AsyncCheckpointer:
        return open_run(self.place(**(options or {})), **{"segment_bytes": PART, **others})

    @contextmanager
    def unharmed(self, ckpt: AsyncCheckpointer) -> Iterator[None]:
        """What fails in the block leaves everything as it was, and the next save works."""
        before = self.direct.names()
        yield
        self.proxy.clear()
        no_memory_is_lent(ckpt)
        # The object by which a thread asks for the store's clock may go late.
        until(lambda: not any(".async_ckpt-probe-" in key for key in self.bucket.keys()))  # noqa: SIM118
        assert self.direct.names() == before
        assert_is_state(self.direct.load(), 1)
        self.goes_on(ckpt, 1)

    def goes_on(self, ckpt: AsyncCheckpointer, *steps: int) -> None:
        """The next save works, everything else is still there, and nothing more."""
        ckpt.save(state_at(9), step=9).result()
        ckpt.wait()
        assert ckpt.steps() == [*steps, 9]
        assert_is_state(ckpt.load(), 9)
        assert len(self.direct.names()) == 2 + 2 * (len(steps) + 1)
        no_memory_is_lent(ckpt)


# Each fault meets one engine here, and both with ASYNC_CKPT_ENGINES=all; test_fsspec_store.py has s3fs' own faults.
ALL = os.environ.get("ASYNC_CKPT_ENGINES") == "all"


def failure(call: Callable[[], Any], message: str) -> StorageUnavailableError:
    """The error of a call: ours, with a path, and a text that says what to do."""
    with pytest.raises(StorageUnavailableError, match=message) as caught:
        call()
    assert caught.value.path.startswith("s3://")
    assert caught.value.path[:60] in str(caught.value)
    return caught.value


TROUBLE: dict[str, Callable[..., Any]] = {
    "SlowDown": lambda proxy, **match: proxy.answer("SlowDown", **match),
    "InternalError": lambda proxy, **match: proxy.answer("InternalError", **match),
    "cut before": lambda proxy, **match: proxy.cut_request(0, **match),
    "answer lost": lambda proxy, **match: proxy.lose_response(**match),
}

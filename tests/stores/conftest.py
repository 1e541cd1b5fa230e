"""Runs of `faulty`, which are reached through a proxy. They lie in the bucket of the file that asks for them."""

from functools import partial

import pytest
from buckets import ENGINES
from faulty import ALL, Far
from racing import Skipping

from async_ckpt.core.host import waits
from async_ckpt.stores.s3 import store


@pytest.fixture
def nobody_waits(monkeypatch):
    """Between two tries, that is: by the clock of the store's client the time has passed. And s3fs, which the uploads of
    failed attempts are aborted by and which has a clock of its own, gives up soon.
    """
    monkeypatch.setattr(store, "ObjectStorage", partial(store.ObjectStorage, timer=Skipping()))
    monkeypatch.setattr(waits, "ABORT_SECONDS", 2.0)


@pytest.fixture(params=ENGINES if ALL else ["obstore"])
def far(request, bucket, proxy):
    return Far(bucket, proxy, request.param)


@pytest.fixture
def obstore(bucket, proxy):
    return Far(bucket, proxy, "obstore")

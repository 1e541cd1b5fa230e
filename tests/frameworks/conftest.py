"""What the tests of frameworks share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from children import Nursery


@pytest.fixture(scope="module")
def nursery(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """What runs scripts in processes that have imported the framework already, by the module that `WARM` names."""
    with Nursery(tmp_path_factory.mktemp("children"), request.module.WARM) as started:
        yield started

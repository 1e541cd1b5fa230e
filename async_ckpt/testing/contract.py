"""The contract of every storage, as tests.

In: a storage with an empty root. Out: tests that pass if it keeps the promises of `plumbing.Storage`.
Knows nothing of: implementations. Needs pytest.

The memory of segments is overwritten as soon as the last holder releases it, as the next save would overwrite it. So a
storage that releases memory too early writes wrong bytes.
"""

from __future__ import annotations

from .archive_contract import ArchiveContract
from .objects import ObjectContract


class StorageContract(ArchiveContract, ObjectContract):
    """A base class for tests of a storage. Define a `storage` fixture: for each test, a new storage with an empty root.

        from async_ckpt.testing import StorageContract

        class TestMyStorage(StorageContract):
            secrets = ("my-secret-key",)

            @pytest.fixture
            def storage(self, tmp_path):
                return MyStorage(tmp_path)

    `async_ckpt.plumbing.register_storage` makes a `Place` use a storage that keeps the contract.

    `secrets` are texts that no message may contain. Override `uploads` if the store can list unfinished uploads.
    `num_listed` is the number of objects that one test lists: set it above the size of a page (1,000 in S3), if
    listings have pages. `not_applicable` maps the names of tests that do not apply to this storage to the reasons.
    """

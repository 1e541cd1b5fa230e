"""The contract of every storage, as tests.

In: a storage with an empty root. Out: tests that pass if it keeps the promises of `plumbing.Storage`.
Knows nothing of: implementations. Needs pytest.

The memory of objects is overwritten at the moment when its last holder releases it, as the next save does with the
memory of the pool: a storage that releases it too early writes other bytes.
"""

from __future__ import annotations

from .archive_contract import ArchiveContract
from .objects import ObjectContract


class StorageContract(ArchiveContract, ObjectContract):
    """A base class for the tests of a storage. Give a `storage` fixture: a new storage with an empty root for each
    test.

        from async_ckpt.testing import StorageContract

        class TestMyStorage(StorageContract):
            secrets = ("my-secret-key",)

            @pytest.fixture
            def storage(self, tmp_path):
                return MyStorage(tmp_path)

    `async_ckpt.plumbing.register_storage` has a `Place` use a storage that keeps to it.

    `secrets` are texts that no message may contain. Override `uploads` if the store can list unfinished uploads.
    `num_listed` is how many objects are listed in one test: set it above the size of a page (1,000 in S3), if there are
    pages. `not_applicable` names tests that cannot hold for this storage, with the reason.
    """

"""The promises of every storage, as tests that any storage can be held to.

In: a storage with an empty root. Out: tests that pass where it keeps what `storage/interface.py` says.
Knows nothing of: how it does so. Needs pytest.

The memory that objects are written from is overwritten in the moment its last holder lets go of it, as the pool's is
by the next save: a storage that lets go too early has written something else.
"""

from __future__ import annotations

from .archives import ArchiveContract
from .objects import ObjectContract


class StorageContract(ArchiveContract, ObjectContract):
    """Derive from it, and give a `storage` fixture: a storage whose root is empty, another one for each test.

        from async_ckpt.testing import StorageContract

        class TestMyStorage(StorageContract):
            secrets = ("my-secret-key",)

            @pytest.fixture
            def storage(self, tmp_path):
                return MyStorage(tmp_path)

    `secrets` are texts that no message may contain. `uploads` says which unfinished uploads the store holds, where it
    can be asked. `not_applicable` names tests that cannot hold for this storage, with the reason.
    """

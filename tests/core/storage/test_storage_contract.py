"""Every storage that comes with the library keeps the contract: against a real server, where it speaks to one."""

import shutil
import uuid
from typing import ClassVar

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from async_ckpt.core.storage.local import LocalStorage
from async_ckpt.errors import CorruptCheckpointError
from async_ckpt.stores.fsspec.store import FsspecStorage
from async_ckpt.stores.s3.store import ObjectStorage
from async_ckpt.testing import StorageContract


class TestLocalStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path):
        return LocalStorage(tmp_path / "root")


class TestMemory(StorageContract):
    @pytest.fixture
    def storage(self):
        return FsspecStorage(f"memory://{uuid.uuid4().hex}")


class TestLocalFilesystem(StorageContract):
    """A folder of a disk through fsspec."""

    @pytest.fixture
    def storage(self, tmp_path):
        return FsspecStorage(str(tmp_path / "root"), fs=LocalFileSystem())


_KEEPS_FOLDERS = "nobody knows whether its `rmdir` spares a folder that is not empty, so that empty folders stay"


class TestPlainestFilesystem(StorageContract):
    """Real folders, and a filesystem that can do nothing but what all can."""

    not_applicable: ClassVar = dict.fromkeys(
        [
            "test_an_aborted_object_leaves_no_trace",
            "test_many_are_deleted_at_once_and_those_that_are_gone_are_no_error",
            "test_a_folder_that_a_deletion_leaves_empty_goes_too",
            "test_all_below_a_folder_is_deleted_however_deep_and_nothing_beside_it",
            "test_a_folder_that_others_remove_while_something_is_begun_in_it_is_made_again",
            "test_a_name_may_have_any_character",
        ],
        _KEEPS_FOLDERS,
    )

    @pytest.fixture
    def storage(self, tmp_path):
        (tmp_path / "root").mkdir()
        return FsspecStorage("run", fs=DirFileSystem(str(tmp_path / "root"), LocalFileSystem()))


class OnServer(StorageContract):
    """A bucket of its own on an S3 server."""

    def place(self, server) -> str:
        self.server = server
        self.secrets = (server.options["secret_access_key"],)
        self.bucket = f"bucket-{uuid.uuid4().hex}"
        server.make_bucket(self.bucket)
        return f"s3://{self.bucket}/run"

    def uploads(self):
        return self.server.uploads(self.bucket)


class OnMoto(OnServer):
    """What others may have put into a bucket."""

    def put(self, key: str, data: bytes = b"") -> None:
        self.server.client.put_object(Bucket=self.bucket, Key=key, Body=data)

    def test_an_empty_object_that_only_shows_a_folder_is_not_in_it(self, storage):
        for key in ("run/", "run/sub/", "run/sub/deep/", "run/none/"):
            self.put(key)
        self.put("run/sub/x", b"1")

        assert storage.names("sub") == ["deep", "x"]
        assert storage.names("") == ["none", "sub"]
        assert storage.sizes("") == {"sub/x": 1}

    @pytest.mark.parametrize("key", ["run/../x", "run/a/../x", "run//x", "run/a//x", "run/./x", "run/.."])
    def test_an_object_whose_name_is_no_path_is_told_of(self, storage, key):
        self.put("run/fine", b"1")
        self.put(key, b"1")
        with pytest.raises(CorruptCheckpointError, match="rename or delete"):
            storage.sizes("")


class TestObstoreOnMoto(OnMoto):
    @pytest.fixture
    def storage(self, s3):
        return ObjectStorage(self.place(s3), s3.options)


@pytest.fixture(scope="module")
def filesystem(s3):
    """A user's own, with all its caches. One for all tests, since its client takes long to make."""
    import s3fs

    return s3fs.S3FileSystem(
        key=s3.options["access_key_id"],
        secret=s3.options["secret_access_key"],
        endpoint_url=s3.endpoint,
        client_kwargs={"region_name": s3.options["region"]},
    )


class TestS3fsOnMoto(OnMoto):
    @pytest.fixture
    def storage(self, s3, filesystem):
        return FsspecStorage(self.place(s3), fs=filesystem)


_NO_CONDITIONS = "rclone ignores conditions, so that nobody can be made sure to be the only one"


class TestObstoreOnRclone(OnServer):
    """It checks signatures and writes to a disk, where the objects are read back from."""

    not_applicable: ClassVar = {
        "test_of_many_writers_that_put_a_new_object_exactly_one_wins": _NO_CONDITIONS,
        "test_of_many_writers_that_replace_one_version_exactly_one_wins": _NO_CONDITIONS,
    }

    @pytest.fixture
    def storage(self, rclone, rclone_folder):
        self.folder = rclone_folder
        yield ObjectStorage(self.place(rclone), {**rclone.options, "deadline_seconds": 20})
        shutil.rmtree(self.folder / self.bucket)  # or each worker's server would hold 400 MB until the last test

    def content(self, storage, path):
        return (self.folder / self.bucket / "run" / path).read_bytes()

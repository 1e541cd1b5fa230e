"""Small objects through fsspec, what writers that died have left, set-up and errors."""

import os
import re
import sys
import threading
import traceback

import fsspec
import pytest
import s3fs
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec_places import KINDS, NUMBERS, SEGMENT, keeps_folders, place_of, s3fs_of, storage_for
from racing import PATIENCE, Call
from states import MIB

import async_ckpt
from async_ckpt import Place, StorageUnavailableError
from async_ckpt.core.storage import store_facts
from async_ckpt.core.storage.locks import TEMP_SUFFIX
from async_ckpt.stores.fsspec.sinks import AppendingSink, MultipartSink
from async_ckpt.stores.fsspec.store import FsspecStorage, abort_stale_uploads
from async_ckpt.stores.s3.store import ObjectStorage


@pytest.fixture
def bucket(s3, bucket):
    yield bucket
    assert s3.uploads(bucket) == []


@pytest.fixture(params=KINDS)
def storage(request, tmp_path):
    """One of each kind; every test must do for all of them."""
    return storage_for(request, tmp_path)


@pytest.fixture
def through(s3, bucket, proxy):
    """A bucket behind the proxy."""
    return FsspecStorage(f"s3://{bucket}/run", {**s3.options, "endpoint": proxy.endpoint})


# --- small objects --------------------------------------------------------------------------------------------


def test_a_store_that_ignores_conditions_is_found_out_and_told_once(through, proxy, caplog):
    ignoring = proxy.answer("NotImplemented", where=lambda request: "if-none-match" in request.headers)
    through.put_new("m.json", b"one")
    with pytest.raises(FileExistsError):
        through.put_new("m.json", b"two")
    _, version = through.read("m.json")
    through.replace("m.json", b"two", version=version)
    with pytest.raises(FileExistsError):
        through.replace("m.json", b"three", version=version)
    through.put_new("n.json", b"one")

    assert ignoring.hits == 1
    assert through.names("") == ["m.json", "n.json"]
    assert len([r for r in caplog.records if "create-only puts" in r.message]) == 1


def test_only_a_filesystem_without_conditions_says_so(storage, caplog):
    for number in range(2):
        storage.put_new(f"{number}", b"data")
        storage.replace(f"{number}", b"new", version=storage.read(f"{number}")[1])
    said = [record for record in caplog.records if record.name == "async_ckpt"]

    limited = {LocalFileSystem: 1, DirFileSystem: 2}  # links create; nothing replaces
    assert len(said) == limited.get(type(place_of(storage)._filesystem()), 0)


def test_objects_are_moved_deleted_and_found(storage):
    names = ["a b", "ü", "a+b", "50%", "#1", "what?", "[1]*"]
    for name in names:
        storage.put_new(f"folder/{name}", name.encode())
    assert storage.names("folder") == sorted(names)
    assert storage.names("") == ["folder"]
    for name in names:
        storage.move(f"folder/{name}", f"folder/moved {name}")
        assert storage.read(f"folder/moved {name}")[0] == name.encode()
    assert storage.names("folder") == sorted(f"moved {name}" for name in names)
    for name in names:
        storage.delete(f"folder/moved {name}")
        storage.delete(f"folder/moved {name}")
    assert storage.names("folder") == []
    assert storage.names("") == (["folder"] if keeps_folders(storage) else [])


def test_a_filesystem_with_one_connection_is_used_by_one_thread_at_a_time():
    class OneConnection(MemoryFileSystem):
        protocol = "ftp"
        in_use = threading.Lock()

        def cat_file(self, path, start=None, end=None, **options):
            assert self.in_use.acquire(blocking=False)
            try:
                return super().cat_file(path, start, end, **options)
            finally:
                self.in_use.release()

    storage = FsspecStorage(f"/root-{next(NUMBERS)}", fs=OneConnection(global_store=False))
    storage.put_new("x", os.urandom(MIB))
    start = threading.Barrier(8)

    def read():
        start.wait(PATIENCE)
        return [storage.read("x") for _ in range(20)]

    assert len({found[0] for call in [Call(read) for _ in range(8)] for found in call.outcome()}) == 1


def test_a_folder_of_a_store_is_no_object(storage):
    storage.put_new("folder/x", b"")
    real = isinstance(place_of(storage)._filesystem(), LocalFileSystem | DirFileSystem)

    assert storage.exists("folder") == real
    assert not storage.exists("folder/x/y")


def test_a_listing_is_never_stale(s3, bucket):
    """Not even by a filesystem that was handed to us, and keeps listings."""
    fs = s3fs_of(s3)
    storage = FsspecStorage(f"s3://{bucket}/run", fs=fs)
    storage.put_new("a", b"")
    fs.ls(f"{bucket}/run")
    s3fs_of(s3).pipe_file(f"{bucket}/run/b", b"")
    assert storage.names("") == ["a", "b"]
    assert storage.exists("b")
    s3fs_of(s3).rm_file(f"{bucket}/run/a")

    assert not storage.exists("a")


def test_a_folder_with_many_objects_is_listed_in_pages(through, proxy, monkeypatch):
    for number in range(5):
        through.put_new(f"f/{number}", b"")
    call = place_of(through).call
    monkeypatch.setattr(place_of(through), "call", lambda *a, **k: call(*a, **{**k, "MaxKeys": 2}))
    before = proxy.count(target="list-type")

    assert through.names("f") == ["0", "1", "2", "3", "4"]
    assert proxy.count(target="list-type") - before == 3


# --- what writers that died have left -------------------------------------------------------------------------


def test_only_what_is_decided_and_old_by_the_stores_clock_is_swept(storage, monkeypatch):
    for name in ("old", f".old.12345678{TEMP_SUFFIX}", "new"):
        storage.put_new(f"step/{name}", b"")
    names = storage.names("step")
    assert storage.sweep("step", names, decided=True) == []
    place = place_of(storage)
    written = {name: place.modified(place.name(f"step/{name}")) for name in names}

    def modified(name):
        if name.endswith("gone"):
            raise FileNotFoundError(name)
        last = name.rpartition("/")[2]
        return written[last] + (1000 if last == "new" else 0)

    monkeypatch.setattr(place, "now", lambda: written["new"] + store_facts.ORPHAN_SECONDS + 60)
    monkeypatch.setattr(place, "modified", modified)

    assert storage.sweep("step", names) == []
    assert storage.sweep("step", [*names, "gone"], decided=True) == [names[0], "old"]
    assert storage.names("step") == names
    storage.sweep("step", names, decided=True, delete=True)
    assert storage.names("step") == ["new"]


def test_the_stores_clock_is_asked_without_a_trace(storage):
    storage.put_new("x", b"")
    age = place_of(storage).now() - place_of(storage).modified(place_of(storage).name("x"))

    assert -2 < age < PATIENCE
    assert storage.names("") == ["x"]


def test_without_a_clock_nothing_is_swept(storage, monkeypatch):
    storage.put_new("x", b"")

    def fail():
        raise NotImplementedError

    monkeypatch.setattr(place_of(storage), "now", fail)

    assert storage.sweep("", ["x"], decided=True, delete=True) == []
    assert storage.exists("x")


def test_uploads_that_nobody_finished_are_aborted_below_this_root_only(s3, bucket, monkeypatch):
    fs = s3fs_of(s3)
    for key in ("run/a", "run/step/b", "run2/c", "d"):
        fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    storage = FsspecStorage(f"s3://{bucket}/run", s3.options)
    tomorrow = place_of(storage).now() + store_facts.ORPHAN_SECONDS + 60
    assert storage.sweep_uploads() == []
    monkeypatch.setattr(place_of(storage), "now", lambda: tomorrow)

    assert sorted(storage.sweep_uploads()) == ["run/a", "run/step/b"]
    assert s3.uploads(bucket) == ["d", "run2/c"]
    assert abort_stale_uploads(bucket, "", before=0.0, options=s3.options) == []
    assert abort_stale_uploads(bucket, "ru", before=tomorrow, options=s3.options) == ["run2/c"]
    assert abort_stale_uploads(bucket, "", before=tomorrow, options=s3.options) == ["d"]


def test_a_store_that_lists_no_uploads_is_told_once(through, proxy, caplog):
    proxy.answer("NotImplemented", kind="list_multipart_uploads")

    assert through.sweep_uploads() == []
    assert through.sweep_uploads() == []
    assert len([r for r in caplog.records if "lifecycle rule" in r.message]) == 1


def test_a_store_that_lists_objects_when_it_is_asked_for_uploads_is_told_and_listed_no_further(
    through, monkeypatch, caplog
):
    for number in range(3):
        through.put_new(f"f/{number}", b"")
    call = place_of(through).call

    def listing_objects(method, name, **parameters):
        if method == "list_multipart_uploads":
            return call("list_objects_v2", name, Prefix=parameters["Prefix"], MaxKeys=1)
        return call(method, name, **parameters)

    monkeypatch.setattr(place_of(through), "call", listing_objects)

    assert through.sweep_uploads() == []
    assert [r.message for r in caplog.records if "returns nothing new" in r.message]


@pytest.mark.parametrize("markers", [[None], ["a", "a"], ["a", "b", "a"]], ids=["nowhere", "to itself", "in a circle"])
def test_a_listing_that_leads_to_no_new_page_is_refused(through, monkeypatch, markers):
    pages = iter(markers)

    def next_page(*_, **__):
        marker = next(pages)  # no more are asked for
        return {"IsTruncated": True} | ({} if marker is None else {"NextContinuationToken": marker})

    monkeypatch.setattr(place_of(through), "call", next_page)

    with pytest.raises(StorageUnavailableError, match="returns nothing new; check that the endpoint is a store"):
        through.names("f")
    assert next(pages, "none left") == "none left"


def test_elsewhere_there_are_no_uploads():
    assert FsspecStorage("memory://run").sweep_uploads() == []


# --- set-up ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["s3://bucket//run", "S3://bucket/run/", "s3://bucket/run//"])
def test_both_clients_use_the_same_key_for_a_url(url):
    assert FsspecStorage(url).locate("x") == ObjectStorage(url).locate("x") == "s3://bucket/run/x"


def test_a_credential_provider_replaces_given_keys(s3, bucket):
    def provider():
        return {"access_key_id": s3.options["access_key_id"], "secret_access_key": s3.options["secret_access_key"]}

    store = FsspecStorage(f"s3://{bucket}", {**s3.options, "access_key_id": "old", "credential_provider": provider})
    store.put_new("x", b"data")
    assert store.read("x")[0] == b"data"


@pytest.mark.parametrize("endpoint", ["localhost:9000", "http://localhost:port"])
def test_an_endpoint_that_is_no_url_is_refused_at_once(endpoint):
    with pytest.raises(ValueError, match="https://host:port"):
        FsspecStorage("s3://bucket", {"endpoint": endpoint})


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nosuch://x", "nosuch:// is not a known scheme; there are local paths, s3://.*fsspec"),
        ("s4://x", "s4:// is not a known scheme; did you mean .*s3://"),
        ("sttp://x", "did you mean .*sftp://"),
        ("just/a/path", "is not a URL"),
        ("simplecache::memory://x", "fs="),
        ("s3://", "names no bucket"),
        ("s3:///run", "names no bucket"),
    ],
)
def test_a_url_that_is_no_place_is_refused(url, message):
    with pytest.raises(ValueError, match=message):
        FsspecStorage(url)


@pytest.mark.parametrize(
    ("url", "package", "command"),
    [
        ("smb://u:hunter2@host/run", "smbclient", "pip install smbclient"),
        ("s3://bucket", "s3fs", r'pip install "async_ckpt\[fsspec\]"'),
        ("memory://run", "fsspec", r'pip install "async_ckpt\[fsspec\]"'),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(url, package, command, monkeypatch):
    monkeypatch.setattr(sys.modules["fsspec.registry"], "_registry", {})
    monkeypatch.setattr(sys.modules["fsspec.registry"], "registry", {})
    monkeypatch.delitem(sys.modules, "fsspec.implementations.smb", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=command) as caught:
        FsspecStorage(url)

    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_the_options_of_obstore_reach_s3fs_by_its_names(monkeypatch):
    storage = FsspecStorage(
        "s3://bucket/run",
        {
            "AWS_ACCESS_KEY_ID": "id", "secret_access_key": "secret", "session_token": "token", "region": "eu-1",
            "endpoint": "http://host:1", "virtual_hosted_style_request": False, "skip_signature": "false",
            "allow_http": True, "deadline_seconds": 5, "client_options": {"timeout": "5s"}, "retry_config": {},
            "client_kwargs": {"verify": False},
        },
    )  # fmt: skip
    fs = place_of(storage)._filesystem()

    assert (fs.key, fs.secret, fs.token, fs.anon) == ("id", "secret", "token", False)
    assert fs.endpoint_url == "http://host:1"
    assert fs.client_kwargs == {"region_name": "eu-1", "verify": False}
    assert fs.config_kwargs == {"s3": {"addressing_style": "path"}}
    with pytest.raises(ValueError, match="'acess_key'"):
        FsspecStorage("s3://bucket", {"acess_key": "id"})


@pytest.mark.parametrize("awaited", [True, False])
def test_a_credential_provider_of_obstore_is_asked(s3, bucket, awaited):
    said = {
        "access_key_id": s3.options["access_key_id"],
        "secret_access_key": s3.options["secret_access_key"],
        "token": None,
        "expires_at": None,
    }

    async def later():
        return said

    options = {"endpoint": s3.endpoint, "region": "us-east-1"}
    provider = later if awaited else lambda: said
    storage = FsspecStorage(f"s3://{bucket}", {**options, "credential_provider": provider})
    storage.put_new("x", b"")

    assert s3.keys(bucket) == ["x"]


def test_the_filesystem_is_made_on_first_use_and_shared_with_nobody(s3, bucket):
    class Made(MemoryFileSystem):
        protocol = f"made{next(NUMBERS)}"
        num_made = 0

        def __init__(self, **options):
            super().__init__(**options)
            type(self).num_made += 1

    fsspec.register_implementation(Made.protocol, Made)
    storage = FsspecStorage(f"{Made.protocol}://run")
    assert Made.num_made == 0
    start = threading.Barrier(4)

    def look():
        start.wait(PATIENCE)
        return storage.names("")

    assert [call.outcome() for call in [Call(look) for _ in range(4)]] == [[]] * 4
    assert Made.num_made == 1
    other = FsspecStorage(f"{Made.protocol}://run")
    other.names("")
    assert Made.num_made == 2
    assert not place_of(storage)._filesystem().dircache.use_listings_cache


def test_a_filesystem_for_coroutines_is_refused():
    with pytest.raises(ValueError, match="asynchronous=False"):
        FsspecStorage("bucket", fs=s3fs.S3FileSystem(asynchronous=True, skip_instance_cache=True))


# --- errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("AccessDenied", "get, put, delete and list"),
        ("ExpiredToken", "renew them"),
        ("RequestTimeTooSkewed", "set it"),
        ("PermanentRedirect", "another region"),
        ("SignatureDoesNotMatch", "check the access key"),
    ],
)
def test_a_refusal_says_where_and_what_to_do(through, proxy, code, advice):
    proxy.answer(code, kind="get_object")
    with pytest.raises(StorageUnavailableError, match=advice) as caught:
        through.read("m.json")

    assert caught.value.path == through.locate("m.json")
    assert caught.value.path in str(caught.value)
    assert caught.value.__cause__ is not None


def test_a_store_that_is_not_there_is_told_from_one_that_refuses(s3, bucket, proxy, monkeypatch):
    options = {**s3.options, "endpoint": proxy.endpoint, "config_kwargs": {"retries": {"max_attempts": 0}}}
    proxy.refuse()
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    with pytest.raises(StorageUnavailableError, match="reachable from this host"):
        FsspecStorage(f"s3://{bucket}", options).names("")


def test_secrets_are_in_no_text(monkeypatch):
    class Leaky(MemoryFileSystem):
        protocol = f"leaky{next(NUMBERS)}"

        def __init__(self, **options):
            super().__init__()
            self.secrets = options

        @staticmethod
        def _get_kwargs_from_urls(url):
            return {"secret": "s3cr3t-in-option", "password": "pa%20ss"}

        def ls(self, path, detail=True, **kwargs):
            try:
                raise RuntimeError(f"the header was {self.secrets}")
            except RuntimeError as error:
                raise PermissionError("pa ss does not match pa%20ss, or env-token") from error

    fsspec.register_implementation(Leaky.protocol, Leaky)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "env-token")
    storage = FsspecStorage(
        f"{Leaky.protocol}://user:pa%20ss@host/run",
        {"secret": "s3cr3t-in-option", "nested": {"token": "t0k3n"}},
    )
    with pytest.raises(StorageUnavailableError) as caught:
        storage.names("")
    told = "".join([
        *traceback.format_exception(caught.value), repr(storage), storage.locate("x"), caught.value.path,
        repr(storage.create("x", num_bytes=1, segment_bytes=1)),
    ])  # fmt: skip

    assert storage.locate("x") == f"{Leaky.protocol}://host/run/x"
    assert not re.search("pa ss|pa%20ss|s3cr3t|t0k3n|env-token", told)
    assert caught.value.__cause__ is not None


def test_credentials_of_a_filesystem_that_was_handed_to_us_are_in_no_text(s3, bucket, proxy):
    fs = s3fs.S3FileSystem(key="my-key-id", secret="my-secret", endpoint_url=proxy.endpoint, skip_instance_cache=True)
    storage = FsspecStorage(f"{bucket}/my-run", fs=fs)
    proxy.answer("AccessDenied")
    with pytest.raises(StorageUnavailableError) as caught:
        storage.names("")

    assert storage.locate("x") == f"s3://{bucket}/my-run/x"
    assert {"my-key-id", "my-secret"} <= set(storage._secrets)
    assert not re.search("my-key-id|my-secret", "".join(traceback.format_exception(caught.value)))


def test_sinks_can_be_shown(storage):
    sink = storage.create("x", num_bytes=SEGMENT, segment_bytes=SEGMENT)

    assert isinstance(sink, MultipartSink | AppendingSink)
    assert "0 of" in repr(sink)
    assert not sink.relieve()
    assert not sink.retryable
    assert not storage.create("y", num_bytes=1, segment_bytes=1).num_retries


class Locking(LocalFileSystem):
    """As WebDAV of rclone: a folder that another client makes just now is locked, and not there yet."""

    def __init__(self, error, times):
        super().__init__(skip_instance_cache=True)
        self.error, self.times, self.calls = error, times, 0

    def makedirs(self, path, exist_ok=False):
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        super().makedirs(path, exist_ok=exist_ok)


def test_a_folder_that_others_make_just_now_is_made_when_they_have_let_go_of_it(tmp_path):
    fs = Locking(OSError("423 Locked"), times=2)
    saved = async_ckpt.save({"epoch": 7}, Place(f"{tmp_path}/a/b/x.tar", fs=fs)).result()
    assert saved.status == "committed"
    assert async_ckpt.load(tmp_path / "a/b/x.tar") == {"epoch": 7}


def test_a_folder_that_may_not_be_made_is_not_tried_again(tmp_path):
    fs = Locking(PermissionError("403"), times=10**6)
    with pytest.raises(StorageUnavailableError, match="no folder could be made: 403"):
        async_ckpt.save({"epoch": 7}, Place(f"{tmp_path}/a/x.tar", fs=fs)).result()
    assert fs.calls <= 2  # for the archive, and for the probe of the place beside it

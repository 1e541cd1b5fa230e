"""A Place: a path or URL with what opens it, wherever a path may be given; and one root's own retention."""

import json
import math
import shutil
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from buckets import Bucket
from fsspec.implementations.memory import MemoryFileSystem
from states import MIB, assert_is_state, difference, everywhere, open_run, save_into, state_at, weight

import async_ckpt
from async_ckpt import AsyncCheckpointer, Keep, Place, StorageUnavailableError
from async_ckpt.testing.servers import Server


@pytest.fixture(params=["local", "bucket", "s3fs", "filesystem"])
def base(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A folder that nobody gets at by its URL alone, but for the local one."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if request.param == "local":
        return Place(tmp_path / "base")
    if request.param == "filesystem":
        return Place(f"/{uuid.uuid4().hex}/base", fs=MemoryFileSystem())
    server: Server = request.getfixturevalue("s3")
    bucket = Bucket(server)
    server.make_bucket(bucket)
    return bucket.place("base", "obstore" if request.param == "bucket" else "s3fs")


FROZEN = weight(0)


def with_frozen(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((3,), float(step))}, "frozen": {"weight": FROZEN}}


def below(base: Place, path: str) -> Place:
    return replace(base, url=f"{base.text}/{path}")


# --- wherever a path does ---------------------------------------------------------------------------------------


def use_save_and_load(base: Place, tmp_path: Path) -> None:
    async_ckpt.save(state_at(1), below(base, "x.tar")).result()
    assert_is_state(async_ckpt.load(below(base, "x.tar")), 1)


def use_a_run(base: Place, tmp_path: Path) -> None:
    with open_run(base) as ckpt:
        for step in (1, 2):
            ckpt.save(state_at(step), step=step).result()
        assert ckpt.root.endswith(str(base.text))
    with AsyncCheckpointer((base,)) as ckpt:
        assert ckpt.restore(state_at(0)) == 2
    assert_is_state(async_ckpt.load(base), 2)
    assert_is_state(async_ckpt.load(below(base, "step_00000001")), 1)


def use_pack_and_unpack(base: Place, tmp_path: Path) -> None:
    with async_ckpt.pack(below(base, "x.tar"), scratch=tmp_path) as folder:
        (folder / "a").write_text("a")
    folder.handle.result()
    (tmp_path / "given").mkdir()
    (tmp_path / "given/b").write_text("b")
    async_ckpt.files.pack_folder(tmp_path / "given", below(base, "y.tar")).result()
    with async_ckpt.unpack(below(base, "x.tar"), scratch=tmp_path) as unpacked:
        assert (unpacked / "a").read_text() == "a"
    assert (async_ckpt.files.extract(below(base, "y.tar"), tmp_path / "out") / "b").read_text() == "b"


def use_wrap(base: Place, tmp_path: Path) -> None:
    def write(where: Path) -> None:
        assert isinstance(where, str)
        Path(where).write_text("written")

    async_ckpt.wrap(torch.save)({"w": torch.ones(3)}, below(base, "x.pt")).result()
    async_ckpt.wrap(write, scratch=tmp_path)(where=below(base, "x.txt")).result()
    with async_ckpt.files.open_file(below(base, "x.pt")) as file:
        assert torch.equal(torch.load(file)["w"], torch.ones(3))
    with async_ckpt.files.open_file(below(base, "x.txt"), "r") as file:
        assert file.read() == "written"


def use_export(base: Place, tmp_path: Path) -> None:
    async_ckpt.export_hf({"w": torch.ones(3)}, below(base, "model")).result()
    with async_ckpt.files.local_read_dir(below(base, "model")) as folder:
        assert [path.name for path in Path(folder).iterdir()] == ["model.safetensors"]


def use_files(base: Place, tmp_path: Path) -> None:
    with async_ckpt.files.local_work_dir(below(base, "tree")) as folder:
        (Path(folder) / "a").write_text("a")
    with async_ckpt.files.open_file(below(base, "tree/b"), "w") as file:
        file.write("b")
    listed = async_ckpt.files.list_dir(below(base, "tree"))
    assert listed == [f"{base.text}/tree/{name}" for name in "ab"]
    with async_ckpt.files.local_read_files(below(base, "tree"), ["a"]) as folder:
        assert (Path(folder) / "a").read_text() == "a"
    assert async_ckpt.files.isdir(below(base, "tree"))
    assert async_ckpt.files.exists(below(base, "tree/a"))
    async_ckpt.files.remove(below(base, "tree"))
    assert not async_ckpt.files.exists(below(base, "tree/a"))


@pytest.mark.parametrize("use", [use_save_and_load, use_a_run, use_pack_and_unpack, use_wrap, use_export, use_files])
def test_a_place_stands_wherever_a_path_does(base, tmp_path, use):
    use(base, tmp_path)


def test_files_go_from_a_local_place_to_one_that_is_far_and_back(s3, bucket, tmp_path):
    far = Place(f"s3://{bucket}/tree", options=s3.options)
    (tmp_path / "a").write_text("a")
    async_ckpt.files.upload_directory(Place(tmp_path), far)
    async_ckpt.files.download_directory(far, Place(tmp_path / "back"))
    assert (tmp_path / "back/a").read_text() == "a"


def test_a_step_that_is_given_by_its_folder_is_read_with_what_it_has_borrowed(base):
    with open_run(base) as ckpt:
        sizes = [ckpt.save(with_frozen(step), step=step, unchanged="frozen").result().num_bytes for step in (1, 2)]
    assert sizes[0] > MIB > sizes[1]
    assert difference(async_ckpt.load(below(base, "step_00000002")), with_frozen(2)) is None


def test_paths_and_places_may_be_roots_of_one_run(tmp_path, s3, bucket):
    far = Place(f"s3://{bucket}/run", options=s3.options)
    memory = f"memory://{uuid.uuid4().hex}"
    for roots in ((str(tmp_path), far, memory), [far, tmp_path, Place(memory)]):
        with open_run(roots) as ckpt:
            step = (ckpt.latest() or 0) + 1
            ckpt.save(state_at(step), step=step).result()
            assert set(ckpt.roots) == {str(tmp_path), far.text, memory}
    for root in (tmp_path, far, memory):
        assert_is_state(async_ckpt.load(root), 2)


@pytest.mark.parametrize("local", [Place, Path.as_uri, str], ids=["place", "file url", "path"])
def test_a_folder_to_pack_or_to_extract_to_is_given_as_any_local_path(local, tmp_path):
    (tmp_path / "given").mkdir()
    (tmp_path / "given/a").write_text("a")
    async_ckpt.files.pack_folder(local(tmp_path / "given"), tmp_path / "x.tar").result()
    assert async_ckpt.files.extract(tmp_path / "x.tar", local(tmp_path / "out")) == tmp_path / "out"
    assert (tmp_path / "out/a").read_text() == "a"


@pytest.mark.parametrize("far", ["memory://x/folder", Place("folder", fs=MemoryFileSystem())], ids=str)
def test_a_folder_elsewhere_is_neither_packed_nor_extracted_to(far, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"is not a local path; fetch the folder with files\.download_directory"):
        async_ckpt.files.pack_folder(far, "x.tar")
    with pytest.raises(ValueError, match=r"is not a local path; .* copy it with files\.upload_directory"):
        async_ckpt.files.extract("x.tar", far)
    with pytest.raises(ValueError, match="is not a local path"):
        async_ckpt.pack("x.tar", scratch=far)
    assert list(tmp_path.iterdir()) == []


# --- what is no place -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Place(Place("runs/a")), TypeError, "not from another Place"),
        (lambda: Place(3), TypeError, "pass a string or a Path"),
        (lambda: Place(""), ValueError, "empty"),
        (lambda: Place("s3://b", options="us-east-1"), TypeError, 'options must be a mapping such as {"region"'),
        (lambda: Place("s3://b", options={3: "x"}), TypeError, "the names of options must be strings"),
        (lambda: Place("s3://b", options={"client_options": "5s"}), TypeError, r'options\["client_options"\] must be a map'),
        (lambda: Place("s3://b", options={"deadline_seconds": 0}), ValueError, "number of seconds above 0, got 0"),
        (lambda: Place("s3://b", options={"deadline_seconds": "soon"}), ValueError, "above 0, got 'soon'"),
        (lambda: Place("s3://b", options={"deadline_seconds": [5]}), ValueError, r"above 0, got \[5\]"),
        (lambda: Place("s3://b", options={"deadline_seconds": math.nan}), ValueError, "above 0, got nan"),
        (lambda: Place("s3://b", engine="boto3"), ValueError, 'engine must be "obstore", "fsspec" or "s3fs"'),
        (lambda: Place("runs/a", keep="3"), TypeError, "keep must be a number of steps"),
        (lambda: Place("runs/a", keep=0), ValueError, r"Keep\(last=…\) must be a whole number"),
        (lambda: Place("runs/a", every=0), ValueError, "every"),
        (lambda: Place("runs/a", every=1.5), ValueError, "every"),
        (lambda: Place("runs/a", volatile="yes"), ValueError, "volatile"),
        (lambda: AsyncCheckpointer(Place("memory://x", engine="s3fs")), ValueError, "is for s3:// URLs"),
        (lambda: Place("runs/a", options={"region": "x"}), ValueError, "are for URLs; leave them out for a local"),
        (lambda: Place("file:///runs/a", engine="fsspec"), ValueError, "are for URLs; leave them out for a local"),
        (lambda: Place("a", fs=MemoryFileSystem(), engine="s3fs"), ValueError, "fs= is used as it is set up"),
        (lambda: Place("a", fs=MemoryFileSystem(), options={"key": 1}), ValueError, "fs= is used as it is set up"),
        (lambda: AsyncCheckpointer("zip://a::s3://b"), ValueError, r"a chain of filesystems; pass Place\(path, fs=…\)"),
        (lambda: AsyncCheckpointer([]), ValueError, "at least one root"),
        (lambda: AsyncCheckpointer([Place("a"), "a"]), ValueError, "two roots are the same"),
        (lambda: AsyncCheckpointer([Place("s3://b/run", options={"endpoint": f"http://{host}:9000"}) for host in "ab"]),
         ValueError, "same: s3://b/run. A place is known by its path or URL, whatever its options="),
        (lambda: AsyncCheckpointer([Place("runs/a", every=10), "runs/b"]), ValueError, "every= is for a further place"),
        (lambda: AsyncCheckpointer(Place("runs/a", every=10)), ValueError, "every= is for a further place"),
        (lambda: AsyncCheckpointer(["r/a", "r/b/../a"]), ValueError, "two roots are the same"),
        (lambda: AsyncCheckpointer(["memory://r/a", "memory://r/a/"]), ValueError, "two roots are the same"),
        (lambda: AsyncCheckpointer("a\0b"), ValueError, "has a null character"),
        (lambda: AsyncCheckpointer(["r/a/b", "r/a"]), ValueError, "r/a/b/ lies inside the root .*r/a/; put them side by side"),
        (lambda: AsyncCheckpointer(["memory://x/b", "memory://x/bc", "memory://x"]), ValueError, "x/b/ lies inside"),
        (lambda: AsyncCheckpointer("s3://key:sec@b/x"), ValueError, "s3://b: a URL must not contain keys or a port"),
        (lambda: AsyncCheckpointer([3]), TypeError, "pass a string or a Path"),
    ],
)  # fmt: skip
def test_what_is_no_place_is_refused_with_what_to_give(make, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        make()
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_a_place_of_the_run_is_no_other_place(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(ValueError, match="two roots are the same"):
        AsyncCheckpointer([tmp_path / "run", tmp_path / "link"])
    with pytest.raises(ValueError, match="lies inside"):
        AsyncCheckpointer([tmp_path / "run", tmp_path / "link" / "far"])
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StorageUnavailableError, match="leads back to it"):
        AsyncCheckpointer([tmp_path / "loop", tmp_path / "run"]).steps()


@pytest.mark.parametrize(
    "write",
    [
        lambda place, folder: async_ckpt.save({}, place),
        lambda place, folder: async_ckpt.pack(place),
        lambda place, folder: async_ckpt.files.pack_folder(folder, place),
        lambda place, folder: async_ckpt.wrap(torch.save)({}, place),
        lambda place, folder: async_ckpt.export_hf({"w": torch.ones(1)}, place),
        lambda place, folder: async_ckpt.files.local_work_dir(place).__enter__(),
        lambda place, folder: async_ckpt.files.open_file(place, "w"),
        lambda place, folder: async_ckpt.files.download_directory("memory://x", place),
        lambda place, folder: async_ckpt.files.upload_directory(folder, place),
    ],
)
def test_what_is_written_once_has_no_retention(write, tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"volatile= and compression= are for the places of an AsyncCheckpointer"):
        write(Place(tmp_path / "x", keep=3), tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_place_with_a_retention_may_be_read(tmp_path):
    root = Place(tmp_path, keep=3)
    save_into(root, 1)
    assert_is_state(async_ckpt.load(root), 1)
    assert async_ckpt.files.isdir(root)


# --- what is shown of it ----------------------------------------------------------------------------------------

SECRET = "8675309"


@pytest.mark.parametrize(
    "place",
    [
        Place("s3://bucket/run", options={"access_key_id": SECRET, "secret_access_key": SECRET}),
        Place("s3://bucket/run", options={"key": SECRET, "secret": SECRET, "token": SECRET}),
        Place("s3://bucket/run", options={"password": int(SECRET)}),
        Place("s3://bucket/run", options={"client_kwargs": {"aws_secret_access_key": SECRET}}),
        Place("s3://bucket/run", options={"credential_provider": lambda: SECRET, "auth": ("me", SECRET)}),
        Place("s3://bucket/run", options={"headers": f"Authorization: Bearer {SECRET}"}),
        Place("s3://bucket/run", options={"endpoint": f"https://me:{SECRET}@host:9000/x?sig={SECRET}"}),
        Place(f"sftp://me:{SECRET}@host/run"),
        Place(f"simplecache::sftp://me:{SECRET}@host/run"),
        Place(f"az://account/run?sig={SECRET}"),
        Place(Path("s3://bucket/run"), options={"sas_token": SECRET}, engine="fsspec", keep=3),
    ],
    ids=str,
)
def test_no_secret_is_shown(place):
    for told in (repr(place), str(place), f"{place}", repr([place]), repr({"root": place})):
        assert SECRET not in told
        assert told.count("Place(") == 1


def test_a_place_shows_where_it_is_and_how_it_is_reached():
    place = Place(
        "s3://bucket/run",
        options={
            "endpoint": "http://minio:9000",
            "region": "eu-west-1",
            "deadline_seconds": 60,
            "key": SECRET,
        },
        engine="s3fs",
        keep=Keep(last=3),
    )
    assert repr(place) == (
        "Place('s3://bucket/run', options={'endpoint': 'http://minio:9000', 'region': 'eu-west-1', "
        f"'deadline_seconds': 60, 'key': '…'}}, engine='s3fs', keep={Keep(last=3)!r})"
    )
    assert repr(Place("run", fs=MemoryFileSystem())) == "Place('run', fs=<MemoryFileSystem>)"
    assert repr(Place(Path("runs") / "a")) == "Place('runs/a')"


# --- the retention of one of several roots ----------------------------------------------------------------------


@pytest.fixture
def roots(tmp_path: Path) -> list[Place]:
    """A disk that holds little, and one that holds more."""
    return [Place(tmp_path / "near", keep=1), Place(tmp_path / "far", keep=Keep(last=3))]


def save(ckpt: AsyncCheckpointer, *steps: int, **options: Any) -> None:
    for step in steps:
        everywhere(ckpt, ckpt.save(state_at(step), step=step, **options))


def steps_of(root: Place) -> list[int]:
    with open_run(root.url) as alone:
        return alone.steps()


def test_each_root_keeps_what_its_own_retention_says(roots, tmp_path):
    with open_run([*roots, tmp_path / "other"], keep=2) as ckpt:
        save(ckpt, 1, 2, 3, 4, 5)
        assert ckpt.steps() == [3, 4, 5]
        assert ckpt.latest() == 5
        assert_is_state(ckpt.load(3), 3)
        live = state_at(0)
        assert ckpt.restore(live, step=4) == 4
        assert_is_state(live, 4)
    assert [steps_of(root) for root in (*roots, Place(tmp_path / "other"))] == [[5], [3, 4, 5], [4, 5]]
    for root, kept in zip(roots, ([5], [3, 4, 5]), strict=True):
        lines = (Path(root.text) / "checkpoints.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == kept


def test_what_a_roots_own_retention_deletes_is_not_copied_back_to_it(roots):
    with open_run(roots) as ckpt:
        save(ckpt, 1, 2, 3, 4)
        assert ckpt.catch_up() == {roots[0].text: [], roots[1].text: []}
    assert [steps_of(root) for root in roots] == [[4], [2, 3, 4]]


def test_a_root_that_was_away_is_given_what_its_own_retention_keeps(roots):
    with open_run([roots[1]]) as ckpt:
        save(ckpt, 1, 2, 3)
    with open_run(roots) as ckpt:
        assert ckpt.catch_up() == {roots[0].text: [3], roots[1].text: []}
    shutil.rmtree(roots[1].text)
    with open_run([roots[0], replace(roots[1], keep=None)]) as ckpt:
        assert ckpt.catch_up() == {roots[0].text: [], roots[1].text: [3]}


def assert_holds(root: Place, kept: list[int]) -> None:
    """These steps and no others, each whole, whatever other roots have."""
    with open_run(root.url) as alone:
        assert alone.steps() == kept
        for step in kept:
            assert difference(alone.load(step), with_frozen(step)) is None


def test_unchanged_groups_are_read_from_each_root_whatever_it_keeps(roots):
    with open_run(roots) as ckpt:
        for step in range(1, 6):
            everywhere(ckpt, ckpt.save(with_frozen(step), step=step, unchanged="frozen"))
    assert_holds(roots[0], [1, 5])
    assert_holds(roots[1], [1, 3, 4, 5])


def test_a_step_that_one_root_has_no_more_is_not_borrowed_from(roots):
    with open_run(roots, on_rollback="retire") as ckpt:
        for step in (1, 2, 3):
            everywhere(ckpt, ckpt.save(with_frozen(step), step=step))
        assert ckpt.restore(with_frozen(0), step=1) == 1
        everywhere(ckpt, ckpt.save(with_frozen(2), step=2, overwrite=True, unchanged="frozen"))
    assert_holds(roots[0], [2])
    assert_holds(roots[1], [1, 2])


def test_a_rolling_save_goes_from_roots_of_any_retention(roots, tmp_path):
    with open_run([*roots, tmp_path / "all"]) as ckpt:
        save(ckpt, 1)
        save(ckpt, 2, rolling=True)
        save(ckpt, 3)
    assert [steps_of(root) for root in (*roots, Place(tmp_path / "all"))] == [[3], [1, 3], [1, 3]]


def test_the_best_stay_in_the_root_that_keeps_them(tmp_path):
    best = Place(tmp_path / "best", keep=Keep(best=("loss", "min", 1)))
    with open_run([tmp_path / "near", best], keep=1) as ckpt:
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.4), (4, 0.3)):
            save(ckpt, step, record={"loss": loss})
        assert ckpt.best("loss", mode="min") == 2
        assert_is_state(ckpt.load(2), 2)
    assert [steps_of(root) for root in (Place(tmp_path / "near"), best)] == [[4], [2, 4]]


# --- endpoints of Azure and Google ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "options", "variables"),
    [
        ("az://bkt", {"endpoint": "HOST", "account_key": "a2V5"}, {}),
        ("az://bkt", {"azure_storage_endpoint": "HOST", "azure_storage_account_key": "a2V5"}, {}),
        ("az://bkt", {"connection_string": "AccountName=a;AccountKey=a2V5;BlobEndpoint=HOST;"}, {}),
        ("az://bkt", {}, {"AZURE_STORAGE_CONNECTION_STRING": "BlobEndpoint=HOST;AccountName=a;AccountKey=a2V5"}),
        ("abfs://bkt", {"anon": True}, {"AZURE_STORAGE_ENDPOINT": "HOST"}),
        ("gs://bkt", {"endpoint": "HOST"}, {}),
        ("gs://bkt", {"endpoint_url": "HOST", "token": "anon", "project": "p"}, {}),
        ("gs://bkt", {"google_base_url": "HOST"}, {"STORAGE_EMULATOR_HOST": "elsewhere:1"}),
        ("gcs://bkt", {}, {"STORAGE_EMULATOR_HOST": "127.0.0.1:1"}),
    ],
)
def test_an_endpoint_is_found_under_each_of_its_names_and_may_do_without_tls(url, options, variables, monkeypatch):
    def at_host(value):
        return value.replace("HOST", "http://127.0.0.1:1") if isinstance(value, str) else value

    for name, value in variables.items():
        monkeypatch.setenv(name, at_host(value))
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    storage = Place(url, options={name: at_host(value) for name, value in options.items()} | {"deadline_seconds": 1})
    with pytest.raises(StorageUnavailableError, match="no answer"):  # nobody listens there, but it was tried
        storage.storage().names("")


def test_keys_are_sent_to_google_without_tls_only_if_they_are_given(monkeypatch):
    from async_ckpt.stores.s3.azure_google_settings import google_config

    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    plain = {"endpoint": "http://127.0.0.1:1"}
    assert google_config(plain)["bearer_token"] == "none"
    assert google_config({**plain, "bearer_token": "mine"})["bearer_token"] == "mine"
    assert "bearer_token" not in google_config({**plain, "service_account": "file"})
    assert "bearer_token" not in google_config({"endpoint": "https://127.0.0.1:1"})

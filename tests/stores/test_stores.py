"""The life of a run on a store, through the public face: the same for every engine, as on a disk."""

import io
import itertools
import json
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from buckets import ENGINES, PART, Bucket, InMemory, OnServer, RunAt, archive_of, no_memory_is_lent
from racing import Call, until
from slices import some
from states import MIB, SEGMENT, assert_is_state, open_run, save, save_into, state_at, weight

import async_ckpt
from async_ckpt import Keep, Naming, NotCommittedError, Place, StepBehindError, StepExistsError
from async_ckpt.testing import FaultyProxy, moto_server


def _make(request: pytest.FixtureRequest) -> OnServer | InMemory:
    if request.param == "memory":
        return InMemory()
    return OnServer(request.getfixturevalue("bucket"), request.param)


@pytest.fixture(params=["obstore", *some(["s3fs", "memory"], 2)])
def place(request: pytest.FixtureRequest) -> OnServer | InMemory:
    """A run on S3, and in one of the places that fsspec leads to: each keeps the contract of a storage in any case."""
    return _make(request)


@pytest.fixture(params=["obstore", "memory"])
def some_place(request: pytest.FixtureRequest) -> OnServer | InMemory:
    """The same for what s3fs does not do otherwise."""
    return _make(request)


# --- the life of a run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mib", [1, 18])
def test_what_was_saved_comes_back(place, mib):
    with place.run() as ckpt:
        report = ckpt.save(state_at(1, mib), step=1).result()
        assert report.status == "committed"
        assert report.path == report.destinations[0].path
        assert report.path.startswith(f"{place.url}/step_00000001/rank_00000.")
        assert report.num_bytes == report.destinations[0].num_bytes > mib * MIB
        assert ckpt.steps() == [1]
        assert ckpt.latest() == 1
        assert_is_state(ckpt.load(), 1, mib)
        assert_is_state(ckpt.load(1), 1, mib)
        no_memory_is_lent(ckpt)
    assert len(place.read(archive_of(place.names(), 1))) == report.num_bytes


def test_a_run_holds_its_archives_manifests_tracker_and_journal_and_nothing_else(place):
    with place.run() as ckpt:
        save(ckpt, 1, 2, mib=9)
    names = place.names()
    archives = [archive_of(names, step) for step in (1, 2)]
    manifests = [f"step_{step:08d}/manifest.json" for step in (1, 2)]
    assert names == sorted([*archives, *manifests, "latest", "checkpoints.jsonl"])
    assert place.read("latest") == b"step_00000002\n"
    journal = [json.loads(line) for line in place.read("checkpoints.jsonl").splitlines()]
    assert [(row["step"], row["path"]) for row in journal] == list(zip((1, 2), archives, strict=True))
    told = json.loads(place.read(manifests[1]))
    assert told["archives"][0]["name"] == archives[1].rpartition("/")[2]
    assert told["archives"][0]["num_bytes"] == len(place.read(archives[1])) == journal[1]["num_bytes"]


def test_a_run_is_found_again_by_a_new_object(some_place):
    with some_place.run() as ckpt:
        ckpt.save(state_at(1), step=1).result()
    with some_place.run() as ckpt:
        assert ckpt.steps() == [1]
        with pytest.raises(StepExistsError):
            ckpt.save(state_at(1), step=1).result()
        with pytest.raises(StepBehindError):
            ckpt.save(state_at(0), step=0).result()
        ckpt.save(state_at(2), step=2).result()
    with some_place.run() as ckpt:
        assert ckpt.steps() == [1, 2]
        for step in (1, 2):
            assert_is_state(ckpt.load(step), step)


def test_an_empty_place_is_an_empty_run_and_stays_untouched(some_place):
    with some_place.run() as ckpt:
        assert ckpt.steps() == []
        assert ckpt.latest() is None
        assert ckpt.restore(state_at(0)) is None
        with pytest.raises(NotCommittedError):
            ckpt.load()
        with pytest.raises(NotCommittedError):
            ckpt.load(7)
        with pytest.raises(NotCommittedError):
            some_place.load()
    assert some_place.names() == []


@pytest.mark.parametrize("mib", [1, 25])
def test_restore_fills_live_tensors_in_place(place, mib):
    with place.run() as ckpt:
        save(ckpt, 1, 2, mib=mib)
        live = state_at(0, mib)
        tensors = dict(live["model"])
        assert ckpt.restore(live) == 2
        assert_is_state(live, 2, mib)
        assert all(live["model"][name] is tensor for name, tensor in tensors.items())
        assert ckpt.restore(live, 1, verify="first") == 1
        assert_is_state(live, 1, mib)


def test_restore_refuses_a_state_of_another_shape_before_it_writes(some_place):
    with some_place.run() as ckpt:
        ckpt.save(state_at(1), step=1).result()
        live = state_at(0, 2)
        with pytest.raises(async_ckpt.StateMismatchError):
            ckpt.restore(live)
        assert_is_state(live, 0, 2)


def test_a_part_of_the_state_may_be_selected(some_place):
    with some_place.run() as ckpt:
        ckpt.save(state_at(3, 9), step=3).result()
        assert list(ckpt.load(select="model.bias")["model"]) == ["bias"]
        assert torch.equal(ckpt.load(select="model.w*")["model"]["weight"], weight(3, 9))
        with pytest.raises(KeyError):
            ckpt.load(select="nothing")


def test_retention_deletes_old_steps_whole(place):
    with place.run(keep=Keep(last=2, every=2)) as ckpt:
        save(ckpt, *range(1, 7))
        ckpt.wait()
        assert ckpt.steps() == [2, 4, 5, 6]
        for step in (2, 4, 5, 6):
            assert_is_state(ckpt.load(step), step)
        with pytest.raises(NotCommittedError):
            ckpt.load(1)
    names = place.names()
    assert len(names) == 2 + 2 * 4
    assert not any("00000001/" in name or "00000003/" in name for name in names)


def test_overwriting_replaces_a_step_and_deletes_what_it_was(place):
    with place.run() as ckpt:
        save(ckpt, 1, 2)
        old = archive_of(place.names(), 2)
        ckpt.save(state_at(7), step=2, overwrite=True).result()
        ckpt.wait()
        assert ckpt.steps() == [1, 2]
        assert_is_state(ckpt.load(2), 7)
        assert archive_of(place.names(), 2) != old


def test_a_step_that_is_not_there_may_be_overwritten_too(some_place):
    with some_place.run() as ckpt:
        assert ckpt.save(state_at(1), step=1, overwrite=True).result().status == "committed"
        assert_is_state(ckpt.load(1), 1)


def test_a_rollback_takes_newer_steps_out_of_the_run(place):
    with place.run() as ckpt:
        save(ckpt, 1, 2, 3)
    with place.run(on_rollback="retire") as ckpt:
        live = state_at(0)
        assert ckpt.restore(live, step=1) == 1
        ckpt.save(state_at(22), step=2, overwrite=True).result()
        ckpt.wait()
        assert ckpt.steps() == [1, 2]
        assert_is_state(ckpt.load(), 22)
    names = place.names()
    assert len([name for name in names if "manifest.retired-" in name]) == 1
    assert place.read("latest") == b"step_00000002\n"
    assert len(place.read("checkpoints.jsonl").splitlines()) == 2


def test_a_rollback_without_leave_to_retire_is_refused(some_place):
    with some_place.run() as ckpt:
        save(ckpt, 1, 2)
        before = some_place.names()
        assert ckpt.restore(state_at(0), step=1) == 1
        with pytest.raises(StepBehindError):
            ckpt.save(state_at(1), step=1, overwrite=True).result()
    assert some_place.names() == before


def test_load_takes_a_run_a_step_and_an_archive(place):
    with place.run() as ckpt:
        save(ckpt, 1, 2)
    assert_is_state(place.load(), 2)
    assert_is_state(place.load("step_00000001"), 1)
    assert_is_state(place.load(archive_of(place.names(), 1)), 1)
    assert place.load(select="step") == {"step": 2}


def test_what_is_not_there_is_a_file_not_found(place):
    with pytest.raises(NotCommittedError, match=r"x\.tar") as missing:
        place.load("x.tar")
    assert isinstance(missing.value, FileNotFoundError)


def test_a_manifest_without_its_archive_is_corrupt_and_passed_over(bucket):
    place = OnServer(bucket, "obstore")
    with place.run() as ckpt:
        save(ckpt, 1, 2)
        ckpt.wait()
        bucket.delete(f"runs/a/{archive_of(place.names(), 2)}")
        with pytest.raises(async_ckpt.CorruptCheckpointError):
            ckpt.load(2)
        live = state_at(0)
        with pytest.warns(RuntimeWarning, match="step . is skipped"):
            assert ckpt.restore(live) == 1
        assert_is_state(live, 1)


def test_a_truncated_archive_is_found_out(bucket):
    place = OnServer(bucket, "obstore")
    with place.run() as ckpt:
        ckpt.save(state_at(1), step=1).result()
        key = f"runs/a/{archive_of(place.names(), 1)}"
        bucket.write([key], bucket.read(key)[: MIB // 2])
        with pytest.raises(async_ckpt.CorruptCheckpointError, match="manifest says"):
            ckpt.load(1)
        with pytest.raises(async_ckpt.CorruptCheckpointError, match="truncated"):
            async_ckpt.load(bucket.place(key))


def test_a_one_off_save_is_one_object(place):
    archive = place.at("x.tar")
    report = async_ckpt.save(state_at(5), archive).result()
    assert (report.step, report.path) == (None, archive.text)
    assert place.names() == ["x.tar"]
    assert_is_state(async_ckpt.load(archive), 5)
    async_ckpt.save(state_at(6, 18), archive).result()
    assert place.names() == ["x.tar"]
    assert_is_state(async_ckpt.load(archive), 6, 18)


# --- engines and roots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("writer", "reader"), [ENGINES, ENGINES[::-1]])
def test_the_engines_read_each_others_runs(bucket, writer, reader):
    with OnServer(bucket, writer).run() as ckpt:
        ckpt.save(state_at(1, 18), step=1).result()
    with OnServer(bucket, reader).run() as ckpt:
        assert_is_state(ckpt.load(), 1, 18)
        ckpt.save(state_at(2), step=2).result()
    with OnServer(bucket, writer).run() as ckpt:
        assert ckpt.steps() == [1, 2]
        ckpt.save(state_at(3), step=2, overwrite=True).result()
        assert_is_state(ckpt.load(2), 3)


@pytest.mark.parametrize(("engine", "slash"), [("obstore", ""), ("obstore", "/"), ("s3fs", "")])
def test_a_whole_bucket_may_be_the_root(bucket, engine, slash):
    place = Place(bucket.url() + slash, options=bucket.server.options, engine=engine)
    with open_run(place, keep=1, segment_bytes=PART) as ckpt:
        assert ckpt.root == bucket.url()
        save(ckpt, 1, 2)
        ckpt.wait()
        assert ckpt.steps() == [2]
        assert_is_state(ckpt.load(), 2)
    assert bucket.read("latest") == b"step_00000002\n"
    assert_is_state(async_ckpt.load(place), 2)
    assert len(bucket.keys()) == 4


@pytest.mark.parametrize("engine", ENGINES)
def test_a_slash_behind_the_root_means_nothing(bucket, engine):
    place = OnServer(bucket, engine)
    with place.run() as ckpt:
        ckpt.save(state_at(1), step=1).result()
    with RunAt(replace(place.place, url=f"{place.url}/")).run() as ckpt:
        assert ckpt.steps() == [1]


def test_a_filesystem_of_fsspec_is_used_as_it_is(bucket):
    import s3fs

    options = bucket.server.options
    fs = s3fs.S3FileSystem(
        key=options["access_key_id"],
        secret=options["secret_access_key"],
        endpoint_url=options["endpoint"],
        client_kwargs={"region_name": options["region"]},
        skip_instance_cache=True,
    )
    with open_run(Place(f"{bucket}/run", fs=fs), segment_bytes=PART) as ckpt:
        ckpt.save(state_at(1, 9), step=1).result()
        assert_is_state(ckpt.load(), 1, 9)
    assert_is_state(async_ckpt.load(bucket.place("run")), 1, 9)


@pytest.mark.parametrize("segment_bytes", [SEGMENT, PART, None])
def test_segments_of_any_size_make_parts(bucket, segment_bytes):
    """Without a budget from the user, a pool that can hold the whole archive always suffices."""
    with OnServer(bucket, "obstore").run(segment_bytes=segment_bytes) as ckpt:
        ckpt.save(state_at(1, 9), step=1).result()
        assert_is_state(ckpt.load(), 1, 9)


@pytest.mark.parametrize("engine", ENGINES)
def test_disk_and_store_hold_the_same_bytes(bucket, tmp_path, engine):
    place = OnServer(bucket, engine)
    with open_run([tmp_path, place.place], segment_bytes=PART) as ckpt:
        assert ckpt.save(state_at(1, 9), step=1).at(place.place).result(60) == 1
    (archive,) = tmp_path.glob("step_00000001/*.tar")
    assert archive.read_bytes() == place.read(archive_of(place.names(), 1))


def test_a_store_and_memory_may_be_two_roots(bucket):
    roots = [bucket.place("run"), f"memory://{uuid.uuid4().hex}"]
    save_into(roots, 1, mib=9, segment_bytes=PART)
    for root in roots:
        assert_is_state(async_ckpt.load(root), 1, 9)


def test_a_root_that_was_added_later_is_caught_up(bucket, tmp_path):
    save_into(tmp_path, 1, 2, mib=9)
    place = OnServer(bucket, "obstore")
    with open_run([tmp_path, place.place], segment_bytes=PART) as ckpt:
        assert ckpt.catch_up() == {str(tmp_path): [], place.url: [2, 1]}
    assert place.read("latest") == b"step_00000002\n"
    with place.run() as ckpt:
        for step in (1, 2):
            assert_is_state(ckpt.load(step), step, 9)


# --- what is asked of the store -------------------------------------------------------------------------------


def ranges(proxy: FaultyProxy, since: int = 0) -> list[int]:
    """The bytes that each read of an archive has asked for."""
    found = []
    for request in proxy.requests[since:]:
        if request.kind == "get_object" and ".tar" in request.target:
            begin, _, end = request.headers["range"].removeprefix("bytes=").partition("-")
            found.append(int(end) + 1 - int(begin))
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_only_what_is_selected_is_fetched_and_the_index_by_few_reads(bucket, proxy, engine):
    with open_run(bucket.place("run", engine, endpoint=proxy.endpoint), segment_bytes=PART) as ckpt:
        report = ckpt.save({"big": {"w": weight(1, 24)}, "small": {"b": torch.ones(3)}}, step=1).result()
        ckpt.wait()

        before = len(proxy.requests)
        assert torch.equal(ckpt.load(select="small")["small"]["b"], torch.ones(3))
        fetched = ranges(proxy, before)
        # Verified reads are whole digest blocks of 4 MiB: the head, the tail, those around the small one.
        assert len(fetched) <= 7, fetched
        assert sum(fetched) < report.num_bytes // 2

        before = len(proxy.requests)
        ckpt.load(select="small", verify=False)
        assert sum(ranges(proxy, before)) <= 4 * MIB + 64 * 1024

        before = len(proxy.requests)
        ckpt.load()
        assert sum(ranges(proxy, before)) < report.num_bytes + 3 * 4 * MIB
    assert all(request.status in (200, 204, 206, 404, 412) for request in proxy.requests)


@pytest.fixture(scope="module")
def crowded() -> Iterator[tuple[Bucket, FaultyProxy]]:
    """A bucket with more folders beside a run than one page of a listing holds, and the way to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "10")  # a thousand, as S3 has it, would take long to write
        with moto_server() as server, FaultyProxy(server.endpoint) as proxy:
            made = Bucket(server)
            server.make_bucket(made)
            made.write([f"other/{number:04d}/x" for number in range(11)])
            yield made, proxy


@pytest.mark.parametrize("engine", ENGINES)
def test_pages_of_objects_under_other_prefixes_are_not_listed(crowded, engine):
    bucket, proxy = crowded
    place = bucket.place(f"run-{engine}", engine, endpoint=proxy.endpoint)
    with open_run(place, segment_bytes=PART) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        ckpt.wait()
        before = proxy.count(kind="list_objects")
        assert ckpt.steps() == [1]
        assert ckpt.latest() == 1
        assert proxy.count(kind="list_objects") - before == 2


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_is_found_among_many_folders_page_by_page(crowded, engine):
    bucket, proxy = crowded
    place = bucket.place("other", engine, endpoint=proxy.endpoint)
    with open_run(place, segment_bytes=PART, naming=Naming(f"{engine}_{{:08d}}")) as ckpt:
        before = proxy.count(kind="list_objects")
        assert ckpt.steps() == []
        assert proxy.count(kind="list_objects") - before == 2
        assert ckpt.save(state_at(2), step=2).result().status == "committed"
        assert ckpt.steps() == [2]


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_asked_before_the_first_call(bucket, proxy, engine):
    with open_run(bucket.place("run", engine, endpoint=proxy.endpoint)):
        assert proxy.requests == []


# --- memory ---------------------------------------------------------------------------------------------------


def guarded() -> tuple[dict[str, Any], torch.optim.Optimizer]:
    """Parameters whose copy may be put off until the next step, and the optimizer that guards them."""
    parameters = [torch.nn.Parameter(torch.full((MIB,), float(i))) for i in range(7)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return {"weights": parameters, "extra": weight(1, 4)}, optimizer


@pytest.mark.parametrize(("engine", "segment_bytes"), some(list(itertools.product(ENGINES, [SEGMENT, PART])), 2))
def test_a_state_larger_than_the_budget_is_saved(bucket, engine, segment_bytes):
    budget = 6 * SEGMENT if segment_bytes == SEGMENT else 4 * PART
    place = OnServer(bucket, engine)
    with place.run(host_bytes=budget, segment_bytes=segment_bytes) as ckpt:
        report = ckpt.save(state_at(1, 36), step=1).result()
        assert report.destinations[0].retryable is False
        ckpt.wait()
        no_memory_is_lent(ckpt)
        assert ckpt.metrics()["pool_bytes"] <= budget
        assert_is_state(ckpt.load(), 1, 36)
    assert bucket.uploads() == []


def test_without_pressure_an_upload_stays_retryable_to_the_end(bucket):
    with OnServer(bucket, "obstore").run() as ckpt:
        report = ckpt.save(state_at(1, 18), step=1).result()
        assert report.destinations[0].retryable is True
        no_memory_is_lent(ckpt)


@pytest.mark.parametrize(("engine", "host_bytes"), some(list(itertools.product(ENGINES, [5 * SEGMENT, None])), 2))
def test_a_guarded_state_is_saved_while_training_goes_on(bucket, engine, host_bytes):
    """A sink that sends in file order must not wait for what is copied at the optimizer's next step."""
    state, optimizer = guarded()
    place = OnServer(bucket, engine)
    with place.run(host_bytes=host_bytes, segment_bytes=SEGMENT, guard=optimizer) as ckpt:
        handle = ckpt.save(state, step=1)
        optimizer.step()
        handle.result()
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        loaded = ckpt.load()
        assert [float(w[0]) for w in loaded["weights"]] == [float(i) for i in range(7)]
        assert all(torch.equal(w, torch.full_like(w, float(w[0]))) for w in loaded["weights"])
        assert torch.equal(loaded["extra"], weight(1, 4))
        ckpt.wait()
        no_memory_is_lent(ckpt)


# --- several writers ------------------------------------------------------------------------------------------


def both_at_once(proxy: FaultyProxy, calls: list[Any]) -> list[BaseException | None]:
    """Hold both writers at the manifest, so that neither knows of the other; how each has ended."""
    held = proxy.delay(None, kind="put_object", target="manifest.json")
    running = [Call(call) for call in calls]
    until(lambda: held.hits >= len(calls))
    held.clear()
    ends: list[BaseException | None] = []
    for call in running:
        try:
            call.outcome()
        except BaseException as error:
            ends.append(error)
        else:
            ends.append(None)
    return ends


@pytest.mark.parametrize(
    ("engines", "overwrite"), some(list(itertools.product([["obstore", "obstore"], ENGINES], [False, True])), 2)
)
def test_of_two_writers_of_one_step_exactly_one_commits(bucket, proxy, engines, overwrite):
    if overwrite:
        with OnServer(bucket, "obstore").run() as ckpt:
            ckpt.save(state_at(1), step=5).result()
    runs = [open_run(bucket.place("runs/a", engine, endpoint=proxy.endpoint), segment_bytes=PART) for engine in engines]
    calls = [
        lambda ckpt=ckpt, number=number: ckpt.save(state_at(number), step=5, overwrite=overwrite).result()
        for number, ckpt in enumerate(runs, start=10)
    ]
    ends = both_at_once(proxy, calls)
    assert sorted(type(end).__name__ for end in ends) == ["NoneType", "StepExistsError"]
    for ckpt in runs:
        no_memory_is_lent(ckpt)
        ckpt.wait()
        assert_is_state(ckpt.load(5), 10 + ends.index(None))
        ckpt.close()
    names = [key.removeprefix("runs/a/") for key in bucket.keys()]  # noqa: SIM118
    manifest = json.loads(bucket.read("runs/a/step_00000005/manifest.json"))
    assert archive_of(names, 5).endswith(manifest["archives"][0]["name"])
    assert len(names) == 4
    assert bucket.uploads() == []


def test_of_many_writers_in_one_process_each_step_is_committed_once(bucket):
    place = OnServer(bucket, "obstore")
    together = threading.Barrier(4)

    def write(number: int) -> str:
        with place.run() as ckpt:
            together.wait(60)
            try:
                ckpt.save(state_at(number), step=1).result()
            except StepExistsError:
                return "exists"
            return "committed"

    with ThreadPoolExecutor(4) as threads:
        ends = list(threads.map(write, range(10, 14)))
    assert sorted(ends) == ["committed", "exists", "exists", "exists"]
    assert_is_state(place.load(), 10 + ends.index("committed"))
    assert len(place.names()) == 4


# --- interoperability -----------------------------------------------------------------------------------------


def test_an_archive_on_a_store_is_an_ordinary_tar(bucket):
    import tarfile

    place = OnServer(bucket, "obstore")
    with place.run() as ckpt:
        ckpt.save(state_at(1, 9), step=1).result()
    with tarfile.open(fileobj=io.BytesIO(place.read(archive_of(place.names(), 1)))) as tar:
        assert "model.safetensors" in tar.getnames()

"""The contract of every storage for small objects, names, and the leftovers of dead writers.

In: a storage with an empty root. Out: tests. Knows nothing of: implementations.
"""

from __future__ import annotations

import traceback

import pytest

from ..plumbing import Storage, spec
from .lending import (
    NUM_THREADS,
    ODD_NAMES,
    SEGMENT_BYTES,
    SORTED_NAMES,
    ContractBase,
    LentMemory,
    create,
    everything,
    put_archive,
    random_bytes,
    same,
    together,
    write,
)


class ObjectContract(ContractBase):
    """The tests of small objects; see StorageContract."""

    # --- small objects ----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("data", [b"", b"1", b"\x00\r\n\xff" * 1000, bytes(spec.MIB)], ids=len)
    def test_a_small_object_is_read_as_it_was_written(self, storage: Storage, data: bytes) -> None:
        storage.put_new("folder/new", data)
        storage.replace("folder/replaced", data)

        assert storage.read("folder/new")[0] == data
        assert storage.read("folder/replaced")[0] == data

    def test_a_new_object_is_refused_when_there_is_one(self, storage: Storage) -> None:
        storage.put_new("folder/manifest", b"first")
        with pytest.raises(FileExistsError):
            storage.put_new("folder/manifest", b"second")
        with pytest.raises(FileExistsError):
            storage.put_new("folder/manifest", b"first")

        assert storage.read("folder/manifest")[0] == b"first"
        assert everything(storage) == ["folder/manifest"]

    def test_of_many_writers_that_put_a_new_object_exactly_one_wins(self, storage: Storage) -> None:
        def put(number: int) -> bool:
            try:
                storage.put_new("folder/manifest", str(number).encode())
            except FileExistsError:
                return False
            return True

        won = together(put, range(NUM_THREADS))

        assert won.count(True) == 1
        assert storage.read("folder/manifest")[0] == str(won.index(True)).encode()
        assert everything(storage) == ["folder/manifest"]

    def test_an_object_may_be_new_again_once_it_is_deleted(self, storage: Storage) -> None:
        storage.put_new("folder/manifest", b"first")
        storage.delete("folder/manifest")
        storage.put_new("folder/manifest", b"second")

        assert storage.read("folder/manifest")[0] == b"second"

    def test_replacing_shows_at_once(self, storage: Storage) -> None:
        for number in range(5):
            storage.replace("latest", str(number).encode())
            assert storage.read("latest")[0] == str(number).encode()

        assert storage.names("") == ["latest"]

    def test_the_version_changes_when_an_object_is_replaced_and_only_then(self, storage: Storage) -> None:
        versions = set()
        for number in range(5):
            storage.replace("x", str(number).encode())
            versions |= {storage.read("x")[1], storage.read("x")[1]}

        assert len(versions) == 5

    def test_replacing_needs_the_version_that_was_read(self, storage: Storage) -> None:
        storage.put_new("x", b"one")
        first = storage.read("x")[1]
        storage.replace("x", b"two", version=first)
        with pytest.raises(FileExistsError):
            storage.replace("x", b"three", version=first)
        with pytest.raises(FileExistsError):
            storage.replace("missing", b"one", version=first)

        assert storage.read("x")[0] == b"two"
        assert storage.names("") == ["x"]

    def test_the_version_that_replacing_tells_is_the_one_that_is_read(self, storage: Storage) -> None:
        """A storage that does not know the version returns None."""
        first = storage.replace("x", b"one")
        second = storage.replace("x", b"two", version=storage.read("x")[1])

        assert second in (None, storage.read("x")[1])
        assert first is None or first != second

    def test_of_many_writers_that_replace_one_version_exactly_one_wins(self, storage: Storage) -> None:
        storage.put_new("x", b"old")
        version = storage.read("x")[1]

        def replace(number: int) -> bool:
            try:
                storage.replace("x", str(number).encode(), version=version)
            except FileExistsError:
                return False
            return True

        won = together(replace, range(NUM_THREADS))

        assert won.count(True) == 1
        assert storage.read("x")[0] == str(won.index(True)).encode()

    def test_moving_keeps_the_content(self, storage: Storage) -> None:
        storage.replace("folder/x", b"data")
        storage.move("folder/x", "folder/y")

        assert storage.names("folder") == ["y"]
        assert storage.read("folder/y")[0] == b"data"
        assert not storage.exists("folder/x")

    def test_deleting_what_is_not_there_is_no_error(self, storage: Storage) -> None:
        for path in ("missing", "missing/too"):
            storage.delete(path)
        storage.replace("folder/x", b"1")
        storage.replace("folder/y", b"2")
        storage.delete("folder/x")
        storage.delete("folder/x")

        assert everything(storage) == ["folder/y"]

    def test_many_are_deleted_at_once_and_those_that_are_gone_are_no_error(self, storage: Storage) -> None:
        for number in range(20):
            storage.replace(f"folder/{number}", b"1")
        storage.replace("folder/deep/x", b"1")
        storage.replace("other", b"1")
        storage.delete("folder/7")
        storage.delete_many([*(f"folder/{number}" for number in range(19)), "folder/deep/x", "missing/x"])
        storage.delete_many([])

        assert everything(storage) == ["folder/19", "other"]
        assert storage.names("folder") == ["19"]

    def test_a_folder_that_a_deletion_leaves_empty_goes_too(self, storage: Storage) -> None:
        storage.replace("other", b"0")
        storage.replace("folder/x", b"1")
        storage.delete("folder/x")

        assert storage.names("") == ["other"]
        assert not storage.exists("folder")

    def test_all_below_a_folder_is_deleted_however_deep_and_nothing_beside_it(self, storage: Storage) -> None:
        for path in ("folder/x", "folder/deep/er/y", "folder2/x", "folder.x", "other"):
            storage.replace(path, b"1")
        for path in ("folder", "other", "missing"):
            storage.delete_all(path)

        assert everything(storage) == ["folder.x", "folder2/x"]
        assert storage.names("") == ["folder.x", "folder2"]

    def test_a_folder_with_something_in_it_is_not_removed(self, storage: Storage) -> None:
        storage.replace("folder/deep/x", b"1")
        for folder in ("folder", "folder/deep", "folder/deep/x", "missing", "missing/too", ""):
            assert not storage.remove_if_empty(folder)
        data, memory = random_bytes(2 * SEGMENT_BYTES), LentMemory()
        sink = create(storage, "other/x.tar", data, memory)
        assert not storage.remove_if_empty("other")
        write(sink, data, memory, order=[0, 1])
        sink.finish()
        sink.close()

        assert everything(storage) == ["folder/deep/x", "other/x.tar"]

    def test_a_folder_that_others_remove_while_something_is_begun_in_it_is_made_again(self, storage: Storage) -> None:
        data = random_bytes(spec.PAGE_BYTES)

        def run(number: int) -> None:
            if number == 0:
                put_archive(storage, "folder/x.tar", data, LentMemory())
            elif number == 1:
                storage.put_new("folder/manifest", b"1")
            else:  # repeatedly, as many processes would
                for _ in range(10):
                    storage.remove_if_empty("folder")

        for _ in range(5):
            together(run, range(4))
            assert same(self.content(storage, "folder/x.tar"), data)
            assert storage.names("folder") == ["manifest", "x.tar"]
            storage.delete("folder/x.tar")
            storage.delete("folder/manifest")
            assert everything(storage) == []

    # --- names ------------------------------------------------------------------------------------------------

    def test_names_are_of_one_level_and_sorted(self, storage: Storage) -> None:
        for path in ("step_10/x", "step_9/deep/x", "step_9/x", "latest", "B", "ä", "step_1", "step_90/x"):
            storage.replace(path, b"1")

        assert storage.names("") == sorted(["step_10", "step_9", "latest", "B", "ä", "step_1", "step_90"])
        assert storage.names("step_9") == ["deep", "x"]
        assert storage.names("step_9/deep") == ["x"]

    def test_a_missing_folder_has_no_names(self, storage: Storage) -> None:
        assert storage.names("") == []
        assert storage.names("missing") == []
        storage.replace("folder/x", b"1")

        assert storage.names("fold") == []
        assert storage.names("folder/missing") == []

    def test_the_sizes_are_of_everything_below_a_folder(self, storage: Storage) -> None:
        for path, num_bytes in (("a/b/c/x", 3), ("a/b/y", 0), ("a/z", 2), ("ab", 1), ("a2/x", 1)):
            storage.replace(path, bytes(num_bytes))

        assert list(storage.sizes("a").items()) == [("b/c/x", 3), ("b/y", 0), ("z", 2)]
        assert storage.sizes("a/b/c") == {"x": 3}
        assert list(storage.sizes("")) == ["a/b/c/x", "a/b/y", "a/z", "a2/x", "ab"]

    def test_a_missing_folder_has_no_sizes(self, storage: Storage) -> None:
        assert storage.sizes("") == {}
        storage.replace("folder/x", b"1")

        for folder in ("missing", "folder/missing", "fold", "folder/x"):
            assert storage.sizes(folder) == {}

    def test_what_is_being_written_has_no_size_yet(self, storage: Storage) -> None:
        data, memory = random_bytes(2 * SEGMENT_BYTES), LentMemory()
        sink = create(storage, "folder/x.tar", data, memory)
        write(sink, data, memory, order=[0, 1])
        assert storage.sizes("") == {}
        sink.finish()
        sink.close()

        assert storage.sizes("") == {"folder/x.tar": len(data)}

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_sizes_are_by_the_names_that_objects_were_given(self, storage: Storage, name: str) -> None:
        storage.replace(f"{name}/{name}/x", b"12")
        storage.replace(f"{name}/{name}/y", b"")

        assert storage.sizes(name) == {f"{name}/x": 2, f"{name}/y": 0}

    def test_what_exists_is_told_in_the_order_that_was_asked(self, storage: Storage) -> None:
        for path in ("a/1", "a/2", "b/1"):
            storage.replace(path, b"1")

        assert storage.existing([]) == []
        assert storage.existing(["b/1", "a/9", "a/2", "c/1", "a/1"]) == ["b/1", "a/2", "a/1"]
        assert storage.exists("a/1")
        assert not storage.exists("a/9")
        assert not storage.exists("c/1")

    def test_many_objects_are_read_as_one_by_one(self, storage: Storage) -> None:
        paths = [f"{number}/x" for number in range(20)]
        for path in paths[1:]:
            storage.replace(path, path.encode())

        contents = storage.read_many([*paths, "none/x"])
        there = {path for path, content in contents.items() if content is not None}
        assert there <= {*paths[1:]}
        assert contents.keys() - there <= {paths[0], "none/x"}
        assert all(storage.read(path) == contents[path] for path in there)
        assert storage.read_many([]) == {}

    @pytest.mark.parametrize("first", ["a", "manifest.json", "~"])
    def test_objects_are_found_however_their_folders_are_sorted(self, storage: Storage, first: str) -> None:
        """Some servers sort by folder, some by key: the slash that ends a folder comes after `-` and before `0`."""
        there = [f"{folder}/{first}" for folder in SORTED_NAMES]
        beside = [f"{folder}/{folder}.tar" for folder in SORTED_NAMES]  # such as archives without a manifest
        for path in there + beside:
            storage.replace(path, path.encode())
        missing = [f"{folder}/{name}" for folder in (*SORTED_NAMES, "none") for name in ("!", f"{first}x")]

        for asked in (there, there[::-1], there[:1], [*missing, *there], missing):
            assert storage.existing(asked) == [path for path in asked if path in there]
            contents = storage.read_many(asked)
            assert {path for path, content in contents.items() if content is not None} <= {*there}
            assert {path for path in asked if path in contents and contents[path] is None} <= {*missing}
        assert storage.names("") == sorted(SORTED_NAMES)
        assert sorted(storage.sizes("")) == sorted(there + beside)
        for folder in SORTED_NAMES:
            assert storage.names(folder) == sorted([first, f"{folder}.tar"])

    def test_more_objects_than_a_page_has_are_listed_and_found(self, storage: Storage) -> None:
        number = self.num_listed
        paths = [f"step_{step:08d}/manifest.json" for step in range(number)]
        beside = [f"step_{step:08d}/rank_00000.tar" for step in range(number)]
        archives = [f"step_{number:08d}/rank_{rank:05d}.tar" for rank in range(number)]
        every = [*paths[1:], *beside, *archives]
        shares = [every[begin::NUM_THREADS] for begin in range(NUM_THREADS)]
        together(lambda share: [storage.replace(path, b"1") for path in shares[share]], range(NUM_THREADS))

        assert storage.existing([paths[0], *paths[1:]]) == paths[1:]
        assert {path for path, content in storage.read_many(paths).items() if content} <= {*paths[1:]}
        assert storage.names("") == [f"step_{step:08d}" for step in range(number + 1)]
        names = [path.rpartition("/")[2] for path in archives]
        assert storage.names(f"step_{number:08d}") == names
        assert storage.listed(f"step_{number:08d}", ["gone.tar", *names[1:]]) == {*names[1:]}
        assert list(storage.sizes("")) == sorted(every)
        storage.delete_many(archives)
        assert list(storage.sizes("")) == sorted([*paths[1:], *beside])

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_a_name_may_have_any_character(self, storage: Storage, name: str) -> None:
        data = random_bytes(spec.PAGE_BYTES)
        put_archive(storage, f"{name}/{name}.tar", data, LentMemory())
        storage.put_new(f"{name}/{name}.json", b"1")
        storage.put_new(f"{name}/old", b"2")
        storage.move(f"{name}/old", f"{name}/{name}.txt")

        assert storage.names("") == [name]
        assert storage.names(name) == [f"{name}.json", f"{name}.tar", f"{name}.txt"]
        assert same(self.content(storage, f"{name}/{name}.tar"), data)
        assert storage.read(f"{name}/{name}.txt")[0] == b"2"
        assert storage.existing([f"{name}/{name}.json", f"{name}/old"]) == [f"{name}/{name}.json"]
        for end in ("json", "tar", "txt"):
            storage.delete(f"{name}/{name}.{end}")
        assert everything(storage) == []

    def test_a_location_is_for_people(self, storage: Storage) -> None:
        assert storage.locate("folder/x.tar").endswith("folder/x.tar")
        assert isinstance(storage.remote, bool)
        assert isinstance(storage.in_order, bool)

    def test_secrets_are_shown_nowhere(self, storage: Storage) -> None:
        sink = storage.create("x.tar", num_bytes=spec.PAGE_BYTES, segment_bytes=SEGMENT_BYTES, max_segments=4)
        with pytest.raises(FileNotFoundError) as missing:
            storage.read("missing")
        shown = [
            repr(storage), str(storage), storage.locate("x.tar"), repr(sink), *traceback.format_exception(missing.value)
        ]  # fmt: skip
        sink.abort()
        sink.close()

        assert not [secret for secret in self.secrets if secret in "".join(shown)]

    # --- the proof before a save ------------------------------------------------------------------------------

    @pytest.mark.parametrize("for_run", [True, False])
    def test_a_place_is_proved_and_nothing_is_left_of_it(self, storage: Storage, for_run: bool) -> None:
        storage.replace("folder/x", b"1")
        for _ in range(2):
            storage.prove(for_run=for_run)

        assert everything(storage) == ["folder/x"]

    # --- leftovers --------------------------------------------------------------------------------------------

    def test_an_object_that_is_being_written_is_never_swept(self, storage: Storage) -> None:
        data, memory = random_bytes(3 * SEGMENT_BYTES), LentMemory()
        sink = create(storage, "folder/x.tar", data, memory)
        write(sink, data, memory, order=[0, 1])
        swept = storage.sweep("folder", storage.names("folder"), delete=True, decided=True)
        aborted = storage.sweep_uploads()
        write(sink, data, memory, order=[2])
        sink.finish()
        after = storage.sweep("folder", ["x.tar"], delete=True, decided=True)
        sink.close()

        assert (swept, aborted, after) == ([], [], [])
        assert same(self.content(storage, "folder/x.tar"), data)

    def test_a_sweep_deletes_only_what_it_is_told_to(self, storage: Storage) -> None:
        storage.replace("folder/x", b"1")
        storage.sweep("folder", ["x"], decided=True)
        storage.sweep("folder", ["x"])

        assert storage.sweep("folder", ["missing"], delete=True, decided=True) == []
        assert storage.sweep("folder", [], delete=True, decided=True) == []
        assert storage.read("folder/x")[0] == b"1"

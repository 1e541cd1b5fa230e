"""Use folders and files in a store as if they were local.

    from async_ckpt.files import local_read_dir, open_file

A path may be a URL or a Place unless it must be local. In a store, a folder exists while it contains an object.
Temporary folders are created where `tempfile` creates them: set TMPDIR if that disk is too small for a model.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, Literal, cast

from .core.storage.bulk import Parcel, copy
from .core.storage.disk import refuse_dangling, sync_folder, user_path_translated
from .core.storage.interface import Storage
from .core.storage.local import LocalStorage
from .core.storage.locks import TEMP_SUFFIX, temp_stem
from .core.storage.place import Anywhere, Place, local_place, place_of, written_at
from .core.storage.url import local_path, scheme_of, unusable_name
from .errors import IsAFolderError, NotAFolderError, NotFoundError
from .face.around.pack import pack_folder
from .face.around.scratch import refuse_current
from .face.around.streams import BUFFER_BYTES, ReaderFile, UploadFile, open_local
from .face.around.unpack import extract

__all__ = [
    "download_directory",
    "exists",
    "extract",
    "isdir",
    "list_dir",
    "local_read_dir",
    "local_read_files",
    "local_work_dir",
    "open_file",
    "pack_folder",
    "remove",
    "upload_directory",
]

# Hub ids as huggingface_hub accepts them, but always with an organization: a single word is more likely the name of a
# missing folder.
_HUB_ID: Final = re.compile(r"(?!.*(--|\.\.))(?!.*\.git$)\w[\w.-]{0,95}(?<![.-])/\w[\w.-]{0,95}(?<![.-])", re.ASCII)


# --- folders ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def local_read_dir(path: Anywhere) -> Iterator[str]:
    """Provide a local folder with the files at `path`, until the end of the `with` block.

        with async_ckpt.files.local_read_dir("s3://bucket/model") as folder:
            model = AutoModel.from_pretrained(folder)

    A local folder is returned unchanged. The folder at a URL is downloaded into a temporary folder, which is removed at
    the end of the block. An id of the Hugging Face hub ("org/name") that is not a local path is returned unchanged, for
    the loader to download; give models without an organization by their full name ("openai-community/gpt2"). Raises
    FileNotFoundError for any other path, and CorruptCheckpointError for objects that cannot be files of one folder.
    """
    place = place_of(path)
    storage, name = place.inside()
    if storage.remote:
        with _scratch() as folder:
            _fetch(storage, name, _sizes_below(storage, name), folder)
            yield folder
    elif os.path.isdir(storage.locate(name)):
        yield _as_given(place)
    elif _HUB_ID.fullmatch(place.text) and not os.path.lexists(storage.locate(name)):
        yield place.text
    else:
        raise NotFoundError(
            f"{place.shown} is not a folder, a URL or an id of the Hugging Face hub (org/name); correct the path"
        )


@contextlib.contextmanager
def local_read_files(
    path: Anywhere, names: Iterable[str], *, missing: Literal["error", "skip"] = "skip"
) -> Iterator[str]:
    """Provide a local folder with these files of the folder at `path`, until the end of the `with` block.

        with async_ckpt.files.local_read_files("s3://bucket/model", ["config.json"]) as folder:
            config = json.load(open(f"{folder}/config.json"))

    A local folder is returned unchanged; from a URL, only these files are downloaded. `names` may contain subfolders
    ("hf/config.json"). Missing files are skipped, as in SkyRL: check for them, or pass missing="error" to get
    FileNotFoundError. A missing folder always raises FileNotFoundError.
    """
    if missing not in ("error", "skip"):
        raise ValueError(f'missing must be "error" or "skip", got {missing!r}')
    wanted = _checked_names(names)
    place = place_of(path)
    storage, name = place.inside()
    if storage.remote:
        sizes = _sizes_below(storage, name)
        sizes_found = {wish: sizes[wish] for wish in wanted if wish in sizes}
    else:
        folder = _existing_folder(place)
        sizes_found = {wish: 0 for wish in wanted if os.path.isfile(os.path.join(folder, wish))}
    missing_names = [wish for wish in wanted if wish not in sizes_found]
    if missing_names and missing == "error":
        raise NotFoundError(
            f'{storage.locate(name)} has no {", ".join(missing_names)}; pass missing="skip" to ignore missing files'
        )
    if not storage.remote:
        yield _as_given(place)
        return
    with _scratch() as folder:
        _fetch(storage, name, sizes_found, folder)
        yield folder


@contextlib.contextmanager
def local_work_dir(output: Anywhere) -> Iterator[str]:
    """Provide a local folder to write to. Its content is at `output` after the `with` block.

        with async_ckpt.files.local_work_dir("s3://bucket/model") as folder:
            model.save_pretrained(folder)

    A local folder is returned unchanged, and created if necessary. For a URL it is a temporary folder, which is
    uploaded only if the block ends without an exception, and is removed in any case.
    """
    place = written_at(output)
    storage, name = place.inside()
    if not storage.remote:
        os.makedirs(storage.locate(name), exist_ok=True)
        yield _as_given(place)
        return
    with _scratch() as folder:
        yield folder
        _send(folder, LocalStorage(folder).sizes(""), storage, name)


def upload_directory(local: Anywhere, cloud: Anywhere) -> None:
    """Copy all files below a local folder into the folder at a URL: `local/x` always becomes `cloud/x`.

        async_ckpt.files.upload_directory("out/model", "s3://bucket/model")

    Several files are copied at once, through 128 MiB of memory; each file appears as a whole. Existing files of the
    same names are replaced, others are kept. Links are followed. Empty folders are not copied, since stores have none.
    """
    place = written_at(cloud)
    storage, name = place.inside()
    if not storage.remote:
        raise ValueError(f"{place.shown} is not a URL to upload to; give one such as s3://bucket/folder")
    folder = _existing_folder(place_of(local))
    sizes = LocalStorage(folder).sizes("")
    if not sizes:
        raise NotFoundError(f"{folder} holds no files; there is nothing to upload")
    _send(folder, sizes, storage, name)


def download_directory(cloud: Anywhere, local: Anywhere) -> None:
    """Copy all objects below the folder at a URL into a local folder: `cloud/x` always becomes `local/x`.

        async_ckpt.files.download_directory("s3://bucket/model", "out/model")

    Nothing is visible at `local` until all files are downloaded and durable. Existing files of the same names are
    replaced, others are kept. Raises FileNotFoundError if there is nothing to copy, CorruptCheckpointError for objects
    that cannot be files of one folder, StorageFullError and StorageUnavailableError; nothing has changed then.
    """
    source, target = place_of(cloud), local_place(written_at(local))
    storage, name = source.inside()
    if not storage.remote:
        raise ValueError(f"{source.shown} is not a URL to download from; give one such as s3://bucket/folder")
    sizes = _sizes_below(storage, name)
    _check_target(target, sizes)
    # Inside an existing target, else beside it, so that renames work: the target may be a mount point, or a link.
    beside = target if target.is_dir() else target.parent
    temp = beside / f"{temp_stem(target.name)}{os.urandom(4).hex()}{TEMP_SUFFIX}"
    try:
        _fetch(storage, name, sizes, temp)
        _put_in_place(temp, target, sizes)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


# --- names --------------------------------------------------------------------------------------------------------


def exists(path: Anywhere) -> bool:
    """True if there is a file or folder at `path`. Raises StorageUnavailableError if that cannot be determined.

    if async_ckpt.files.exists("s3://bucket/runs/a"): ...
    """
    storage, name = place_of(path).inside()
    if storage.remote and not name:
        return bool(storage.names(""))
    return storage.exists(name) or (storage.remote and bool(storage.names(name)))


def isdir(path: Anywhere) -> bool:
    """True if there is a folder at `path`. Raises StorageUnavailableError if that cannot be determined.

    if async_ckpt.files.isdir("s3://bucket/runs/a"): ...
    """
    storage, name = place_of(path).inside()
    return bool(storage.names(name)) if storage.remote else os.path.isdir(storage.locate(name))


def list_dir(path: Anywhere) -> list[str]:
    """List the full paths, or URLs, of everything directly in a folder, sorted.

        for path in async_ckpt.files.list_dir("s3://bucket/runs"): ...

    Raises FileNotFoundError if the folder does not exist, and NotADirectoryError for a file.
    """
    place = place_of(path)
    storage, name = place.inside()
    if not storage.remote:
        folder = _existing_folder(place)
        return [os.path.join(folder, entry) for entry in sorted(os.listdir(folder))]
    names = storage.names(name)
    if not names:
        raise _no_folder(storage, name)
    return [f"{place.text.rstrip('/')}/{entry}" for entry in names]


def remove(path: Anywhere) -> None:
    """Delete a file, or a folder with its content. For a local link, only the link is deleted.

        async_ckpt.files.remove("s3://bucket/runs/a")

    Raises FileNotFoundError if the path does not exist, and ValueError for a whole bucket or disk, and for a folder
    that is or contains the current one.
    """
    place = place_of(path)
    storage, name = place.inside()
    if not name or (not storage.remote and os.path.ismount(storage.locate(name))):
        raise ValueError(f"{place.shown} is a whole bucket or disk; name a file or a folder in it")
    located = storage.locate(name)
    is_found = bool(storage.sizes(name)) or _is_object(storage, name) if storage.remote else os.path.lexists(located)
    if not is_found:
        raise NotFoundError(f"{located} does not exist")
    if not (storage.remote or os.path.islink(located)):
        refuse_current(located, "deleted")
    storage.delete_all(name)


# --- one file -----------------------------------------------------------------------------------------------------


def open_file(path: Anywhere, mode: str = "rb") -> IO[Any]:
    """Open a file, local or in a store, like `open`. Text is UTF-8.

        with async_ckpt.files.open_file("s3://bucket/config.json", "w") as file:
            json.dump(config, file)

    If a local file is opened for writing, missing parent folders are created. A file in a store is read by ranges, and
    is seekable. Data for a store is written to a temporary file and uploaded by `close`, but not if the `with` block
    raises an exception, or if the file is never closed.
    """
    encoding = None if "b" in mode else "utf-8"
    place = written_at(path) if "w" in mode else place_of(path)
    if place.is_local:
        with user_path_translated(_as_given(place)):
            return open_local(_as_given(place), mode, encoding)
    if mode not in ("r", "rt", "rb", "w", "wt", "wb"):
        raise ValueError(f'a file in a store is opened with mode "r", "rb", "w" or "wb", not {mode!r}')
    storage, name = place.object()
    if "w" in mode:
        return cast("IO[Any]", UploadFile(storage, name, mode, encoding))
    with user_path_translated(place.shown):
        ranges = io.BufferedReader(ReaderFile(storage.open(name)), BUFFER_BYTES)
    return io.TextIOWrapper(ranges, encoding) if encoding else ranges


# --- shared parts ---------------------------------------------------------------------------------------------------


def _as_given(place: Place) -> str:
    """A local path as the user gave it, with ~ expanded, or the path of a `file://` URL."""
    path = local_path(place.text)
    return os.path.expanduser(place.text) if scheme_of(place.text) is None else str(path)


def _existing_folder(place: Place) -> str:
    """The path of a local folder. Raises FileNotFoundError, NotADirectoryError, and ValueError for a URL."""
    folder = str(local_place(place))
    refuse_dangling(Path(folder))
    if not os.path.exists(folder):
        raise NotFoundError(f"{folder} does not exist; correct the path")
    if not os.path.isdir(folder):
        raise NotAFolderError(f"{folder} is a file; give the folder that contains it")
    return folder


def _sizes_below(storage: Storage, name: str) -> dict[str, int]:
    """The sizes of the objects below a folder of a store. Raises if they cannot be files of one local folder."""
    sizes = storage.sizes(name)
    if not sizes:
        raise _no_folder(storage, name)
    for path in sizes:
        if os.sep != "/" and re.search(r'[\\:*?"<>|]', path):
            raise unusable_name(storage.locate(name), f"{path!r} has a character that this system does not allow")
        if both := next((folder for folder in _folders_of(path) if folder in sizes), None):
            raise unusable_name(storage.locate(name), f"{both!r} is both an object and the folder of another")
    return sizes


def _no_folder(storage: Storage, name: str) -> OSError:
    path = storage.locate(name)
    if _is_object(storage, name):
        return NotAFolderError(f"{path} is an object, not a folder; read it with open_file")
    return NotFoundError(f"{path} does not exist: there is nothing below it; correct the URL")


def _is_object(storage: Storage, name: str) -> bool:
    try:
        storage.open(name).close()
    except (FileNotFoundError, IsADirectoryError):
        return False
    return True


def _folders_of(path: str) -> Iterator[str]:
    """The folders above a relative path, the nearest first."""
    while path := path.rpartition("/")[0]:
        yield path


def _checked_names(names: Iterable[str]) -> list[str]:
    if isinstance(names, str):
        raise TypeError(f"names must be a list of names: pass [{names!r}]")
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        if os.path.isabs(name) or any(part in ("", ".", "..") for part in name.split("/")):
            raise ValueError(f"{name!r} is not the name of a file below a folder")
    return wanted


def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="async_ckpt-")


def _fetch(storage: Storage, name: str, sizes: Mapping[str, int], folder: str | Path) -> None:
    parcels = [Parcel(partial(storage.open, _below(name, path)), path, size) for path, size in sizes.items()]
    copy(parcels, LocalStorage(folder))


def _send(folder: str, sizes: Mapping[str, int], storage: Storage, name: str) -> None:
    local = LocalStorage(folder)
    copy([Parcel(partial(local.open, path), _below(name, path), size) for path, size in sizes.items()], storage)


def _below(name: str, path: str) -> str:
    return f"{name}/{path}" if name else path


def _check_target(target: Path, paths: Collection[str]) -> None:
    """Check, before files are downloaded, that they can be put into `target`."""
    for folder in {target, *(target / folder for path in paths for folder in _folders_of(path))}:
        if folder.exists() and not folder.is_dir():
            raise NotAFolderError(f"{folder} is a file, but should be a folder; remove it, or choose another folder")
    for path in paths:
        if (target / path).is_dir():
            raise IsAFolderError(f"{target / path} is a folder where a file should be; remove it first")


def _put_in_place(temp: Path, target: Path, paths: Collection[str]) -> None:
    try:
        os.rename(temp, target)
        sync_folder(target.parent)
        return
    except OSError:  # the folder exists, perhaps created by another process that downloads the same files
        if not target.is_dir():
            raise
    for path in paths:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(temp / path, target / path)
    for folder in {target, *(target / folder for path in paths for folder in _folders_of(path))}:
        sync_folder(folder)

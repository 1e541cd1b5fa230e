"""Folders to pack, and tars of any kind to unpack."""

import io
import os
import random
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from states import MIB

gnu_tar = pytest.mark.skipif(
    b"GNU tar" not in subprocess.run(["tar", "--version"], capture_output=True, check=False).stdout
    if shutil.which("tar")
    else True,
    reason="GNU tar is not installed",
)


def look(folder: Path) -> dict[str, Any]:
    """All that an archive keeps of what is in a folder: kinds, contents, links, execution, times of files."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name, about = os.fsencode(path.relative_to(folder)), path.lstat()
        if path.is_symlink():
            found[name] = "link", os.readlink(path)
        elif path.is_dir():
            found[name] = ("folder",)
        else:
            found[name] = "file", path.read_bytes(), about.st_mode & 0o755, int(about.st_mtime)
    return found


def make_tree(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "huggingface/deep/er").mkdir(parents=True)
    (folder / "huggingface/deep/er/model.safetensors").write_bytes(random.Random(0).randbytes(3 * MIB + 17))
    (folder / "empty").mkdir()
    (folder / "empty.txt").touch()
    (folder / "run.sh").write_text("#!/bin/sh")
    (folder / "run.sh").chmod(0o755)
    (folder / "secret").write_text("s")
    (folder / "secret").chmod(0o600)
    (folder / "latest").symlink_to("huggingface/deep")
    (folder / "huggingface/up").symlink_to("../config.json")
    os.link(folder / "config.json", folder / "huggingface/config again.json")
    (folder / ("x" * 90)).write_text("a long name")
    os.utime(folder / "run.sh", (1_000_000_000, 1_000_000_000))
    return folder


def in_names(folder: Path) -> None:
    """Names that older formats of tar cannot hold."""
    (folder / "größe-重み-🙂").write_text("unicode")
    (folder / "\udcff\udcfe").write_text("no text at all")
    (folder / "-rf").write_text("not an option")
    (folder / "two\nlines").write_text("newline")
    (folder / ("d" * 120) / ("e" * 120)).mkdir(parents=True)
    (folder / ("d" * 120) / ("e" * 120) / ("f" * 120)).write_text("longer than 255")


def with_holes(path: Path, holes: int = 3) -> None:
    with open(path, "wb") as file:
        for number in range(holes):
            file.seek(number * MIB + 4096)
            file.write(b"data" * 1024)
        file.truncate(holes * MIB + 123)


def tar(*arguments: object, cwd: Path | None = None) -> str:
    command = ["tar", *map(os.fsencode, map(str, arguments))]
    return subprocess.run(command, check=True, capture_output=True, cwd=cwd).stdout.decode(errors="surrogateescape")


def plain_tar(members: list[tuple[tarfile.TarInfo, bytes]], **options: Any) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", **options) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "", **more: Any) -> Any:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, len(data), link
    for key, value in more.items():
        setattr(info, key, value)
    return info, data

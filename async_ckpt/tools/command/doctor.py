"""The facts about this machine that matter for checkpoints, one line each, with advice.

In: the machine, and a root if one is given. Out: findings, and their table. Knows nothing of: command-line arguments.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

import typer

from ... import Place
from ...plumbing import limits, reports, timing, urls
from .output import NO, print_json, print_table

Verdict = Literal["ok", "note", "bad"]

# Extras, and the packages that each of them installs.
_EXTRAS: Final = {
    "s3": ("obstore", "tenacity", "botocore", "s3fs"),
    "fsspec": ("fsspec", "s3fs", "tenacity"),
    "zstd": ("zstandard",),
    "progress": ("tqdm",),
    "cli": ("typer", "rich"),
}
# Environment variables that may have credentials. Only their names are printed.
_CREDENTIALS: Final = {
    "AWS_ACCESS_KEY_ID": "s3://", "AWS_PROFILE": "s3://", "AWS_WEB_IDENTITY_TOKEN_FILE": "s3://",
    "GOOGLE_APPLICATION_CREDENTIALS": "gs://", "AZURE_STORAGE_ACCOUNT_KEY": "az://", "AZURE_STORAGE_SAS_TOKEN": "az://",
}  # fmt: skip

_LITTLE_SPACE_BYTES: Final = 1 << 30
_CLOCK_SECONDS: Final = 5.0
_MAX_SKEW_SECONDS: Final = 5.0
# S3 refuses a request whose signature is older, or further in the future.
_REFUSED_SKEW_SECONDS: Final = 900.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact: the subject, what was found, and advice unless the verdict is "ok"."""

    verdict: Verdict
    subject: str
    text: str


def show(root: Place | None, *, as_json: bool) -> None:
    """Print the findings. Raises typer.Exit if one of them is bad."""
    lines = list(findings(root))
    if as_json:
        print_json("findings", {"findings": lines})
    else:
        print_table(("", "what", "is"), ((one.verdict, one.subject, one.text) for one in lines))
    if any(one.verdict == "bad" for one in lines):
        raise typer.Exit(NO)


def findings(root: Place | None) -> Iterator[Finding]:
    """All findings, in the order in which they are made."""
    yield Finding("ok", "async_ckpt", version("async_ckpt"))
    yield Finding("ok", "Python", f"{platform.python_version()} on {platform.system()}")
    yield from _torch()
    yield from _packages()
    yield Finding("ok", "cores", f"{limits.num_cpus()} for this process")
    yield from _memory()
    yield from _credentials()
    if root is not None:
        yield from _disk(root) if root.is_local else _store(root)


def _noted(subject: str, advice: object, fine: str) -> Finding:
    """A note with the advice, or "ok" with `fine` if there is no advice."""
    return Finding("note", subject, str(advice)) if advice else Finding("ok", subject, fine)


def _torch() -> Iterator[Finding]:
    if find_spec("torch") is None:
        yield Finding("bad", "torch", "is not installed: pip install torch")
        return
    import torch

    from ...plumbing import backends

    yield Finding("ok", "torch", torch.__version__)
    device = backends.accelerator()
    lacks = "" if device else "torch sees none: install a torch for your device, if there is one"
    yield _noted("accelerator", lacks, str(device))


def _packages() -> Iterator[Finding]:
    for extra, packages in _EXTRAS.items():
        found, lacking = [], []
        for package in packages:
            try:
                found.append(f"{package} {version(package)}")
            except PackageNotFoundError:
                lacking.append(package)
        advice = f'{", ".join(lacking)} not installed: pip install "async_ckpt[{extra}]" if you need it'
        yield _noted(f"extra {extra}", lacking and advice, ", ".join(found))


def _memory() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    advice = f"{reports.sized(soft)}, which limits page-locked buffers, but not CUDA's: raise it with ulimit -l"
    yield _noted("memlock", soft != resource.RLIM_INFINITY and advice, "unlimited")
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if huge.exists():
        chosen = huge.read_text().partition("[")[2].partition("]")[0]
        advice = f"off, so that a first save takes longer: echo madvise > {huge}"
        yield _noted("huge pages", chosen == "never" and advice, chosen)
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        text = f"{reports.sized(int(text))}; host_bytes must fit in it beside the training"
        yield Finding("ok", "cgroup memory", text)


def _credentials() -> Iterator[Finding]:
    for name, scheme in _CREDENTIALS.items():
        if name in os.environ:
            yield Finding("ok", "credentials", f"{name} is set, for {scheme}")
    home = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", Path.home() / ".aws/credentials"))
    try:
        home.stat()
    except FileNotFoundError:
        return
    except OSError as error:  # such as a service whose HOME belongs to another user
        yield Finding("note", "credentials", f"{home}: {error.strerror}: set HOME or AWS_SHARED_CREDENTIALS_FILE")
        return
    yield Finding("ok", "credentials", f"{home} exists, for s3://")


def _disk(root: Place) -> Iterator[Finding]:
    folder = Path(root.text.removeprefix("file://"))
    there = next((one for one in (folder, *folder.parents) if one.is_dir()), None)
    if there is None or not os.access(there, os.W_OK):
        yield Finding("bad", root.shown, "cannot be written to: give a folder that is yours")
        return
    free = shutil.disk_usage(there).free
    if free > _LITTLE_SPACE_BYTES:
        yield Finding("ok", "free space", f"{reports.sized(free)} at {there}")
    else:
        text = f"{reports.sized(free)} at {there}: delete old steps (async-ckpt prune), or give another folder"
        yield Finding("bad", "free space", text)
    try:
        file = tempfile.NamedTemporaryFile(dir=there, prefix=".async-ckpt-doctor.")  # noqa: SIM115
    except OSError as error:  # such as /proc, or a file system that is mounted read-only
        yield Finding("bad", root.shown, f"no file can be made in {there} ({error.strerror}): give another folder")
        return
    with file:
        yield _tried(
            "preallocation",
            lambda: os.posix_fallocate(file.fileno(), 0, 1 << 20),
            "the file system cannot reserve space, so that a full disk is noticed only while it is written",
        )
        if sys.platform == "linux":
            yield _tried(
                "O_DIRECT",
                lambda: os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT)),
                "the file system has none: writes go through the page cache",
            )


def _tried(subject: str, call: Callable[[], object], advice: str) -> Finding:
    try:
        call()
    except OSError as error:
        return Finding("note", subject, f"{advice} ({error.strerror})")
    return Finding("ok", subject, "works")


def _store(root: Place) -> Iterator[Finding]:
    from ...errors import CheckpointError

    try:
        root.storage().names("")
    except (CheckpointError, ImportError, ValueError) as error:
        yield Finding("bad", root.shown, str(error))
    else:
        yield Finding("ok", root.shown, "answers")
    yield from _clock(root)


def _clock(root: Place) -> Iterator[Finding]:
    """Compare the clock of this machine with the clock of a store, which each response has in its Date header."""
    endpoint = _endpoint(root)
    if endpoint is None:
        return
    try:
        begin = timing.wall_time()
        try:
            answer = urllib.request.urlopen(endpoint, timeout=_CLOCK_SECONDS)  # the user's endpoint  # nosec B310
            date = answer.headers["Date"]
        except urllib.error.HTTPError as refused:  # a refusal has the header, too
            date = refused.headers["Date"]
        middle = (begin + timing.wall_time()) / 2
        skew = middle - parsedate_to_datetime(date).timestamp() - 0.5  # the header has whole seconds
    except (OSError, ValueError, TypeError) as error:
        yield Finding("note", "clock", f"{endpoint} sent no valid Date header ({error})")
        return
    seconds, direction = abs(skew), "ahead of" if skew > 0 else "behind"
    if seconds <= _MAX_SKEW_SECONDS:
        yield Finding("ok", "clock", f"agrees with that of {endpoint}")
    else:
        refusal = "; requests are refused for it" if seconds > _REFUSED_SKEW_SECONDS else ""
        verdict: Verdict = "bad" if refusal else "note"
        text = f"{seconds:.0f} s {direction} that of {endpoint}{refusal}: set it by NTP (chrony, timedatectl)"
        yield Finding(verdict, "clock", text)


def _endpoint(root: Place) -> str | None:
    """The URL of a store's endpoint; None if it is not known."""
    scheme = urls.scheme_of(root.text)
    if scheme in ("gs", "gcs"):
        return "https://storage.googleapis.com"
    if scheme == "s3":
        from ...stores.s3.aws_settings import AwsSetup

        options = {key: value for key, value in (root.options or {}).items() if value is not None}
        setup = AwsSetup(options)
        return setup.endpoint or f"https://s3.{setup.config['aws_region']}.amazonaws.com"
    return None

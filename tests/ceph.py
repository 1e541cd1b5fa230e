"""A store that answers as Ceph's gateway does."""

from __future__ import annotations

from typing import Any


def matches(request: Any) -> str:
    """What the condition of a put names, as it was sent."""
    return request.headers.get("if-match", "")


def as_ceph(proxy: Any) -> Any:
    """Ceph's gateway compares the e-tag with the header as it is, and so takes it without quotes alone."""
    return proxy.answer(
        "PreconditionFailed", kind="put_object", where=lambda request: matches(request).startswith('"')
    )

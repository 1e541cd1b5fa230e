"""Translation of obstore's errors.

In: an error of obstore. Out: an error of this library, with a reason and advice. Knows nothing of: requests.

Errors of obstore have the status and the code only in their text. No other module parses that text.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass, replace
from typing import Final

from ...errors import StorageFullError, StorageUnavailableError
from ...plumbing import store_facts
from .settings import BucketSettings

# Advice, by the store's error code, or else by HTTP status.
ADVICE: Final = {
    "NoSuchBucket": store_facts.NO_BUCKET,
    "ContainerNotFound": store_facts.NO_BUCKET,
    "PermanentRedirect": store_facts.REGION,
    "AuthorizationHeaderMalformed": store_facts.REGION,
    "IllegalLocationConstraintException": store_facts.REGION,
    "ExpiredToken": store_facts.LOG_IN,
    "ExpiredTokenException": store_facts.LOG_IN,
    "TokenRefreshRequired": store_facts.LOG_IN,
    "RequestTimeTooSkewed": store_facts.CLOCK,
    "RequestExpired": store_facts.CLOCK,
    "InvalidAccessKeyId": store_facts.KEYS,
    "SignatureDoesNotMatch": store_facts.KEYS,
    "301": store_facts.REGION,
    "400": "check the name and the options, which the store rejects",
    "401": store_facts.KEYS,
    "403": store_facts.RIGHTS,
    "507": store_facts.ROOM,
    "NoRange": "use another server or client, which can read a part of an object",
    "Panic": "check the keys, such as for a line break at the end of one, and the options of the Place",
}
EXPIRED_CODES: Final = frozenset({code for code, advice in ADVICE.items() if advice is store_facts.LOG_IN})
# Not a code of the store: a request for a part of an object was answered with something else.
NO_RANGE: Final = "NoRange"
UNSUPPORTED_STATUSES: Final = frozenset({400, 405, 501})  # for an unsupported condition
TRANSIENT_STATUSES: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
TRANSIENT_CODES: Final = frozenset({"SlowDown", "InternalError", "RequestTimeout", "ServiceUnavailable", "ServerBusy"})
# Two writers at once, of which neither has won yet; or an upload that no longer exists, since it was aborted, or was
# completed by a request whose response was lost. All of these requests are repeated.
CONFLICT_CODES: Final = frozenset({"ConditionalRequestConflict", "OperationAborted", "NoSuchUpload"})
INSUFFICIENT_STORAGE: Final = 507


@dataclass(frozen=True)
class ErrorResponse:
    """The parts of a store's response that are in the text of an error of obstore."""

    status: int | None
    code: str
    reason: str
    region: str
    is_unanswered: bool
    lacks_keys: bool  # so that no request was sent

    @classmethod
    def of(cls, error: BaseException) -> ErrorResponse:
        text = str(error)

        def find(pattern: str) -> str:
            match = re.search(pattern, text, re.DOTALL)
            return match[1] if match else ""

        status, code = find(r"status(?: code)?: (\d{3})"), find(r"<Code>(\w+)<")
        message = find(r"<Message>(.*?)<")
        if "redirect without LOCATION" in text:
            status = "301"
        if re.search(r"non-partial response|^Requested \S+, got |Content-Range", text, re.MULTILINE):
            code = NO_RANGE
        if is_panic(error):
            code = "Panic"
        kind, detail = find(r"HttpError \{\s*kind: (\w+)"), find(r'(?:message|error): "([^"]*)"')
        builder, certificate = "builder error" in text, find(r"invalid peer certificate: (\w+)")
        provider = find(r"External \w+ credential provider: (?:\w+: )?([^\n]*)")
        lacks_keys = bool(provider) or "169.254.169.254" in text  # the metadata service, used only for keys
        first = re.sub(r"\S+://\S+", "the store", text.partition("\n")[0])
        if status:
            answer = " ".join(filter(None, (status, code)))
            reason = f"the store answered {answer}" + (f": {message}" if message else "")
        elif certificate:
            reason = f"its certificate is not trusted ({certificate})"
        elif kind and not builder:
            reason = f"no answer ({detail or kind})"
        else:
            reason = provider or first
        return cls(
            status=int(status) if status else None,
            code=code,
            reason=reason[:500],
            region=find(r"<Region>([\w-]+)<"),
            is_unanswered=bool(kind) and not (status or builder or certificate or lacks_keys),
            lacks_keys=lacks_keys,
        )


def is_panic(error: BaseException) -> bool:
    """Whether Rust code of obstore has panicked, such as over a key that no header may contain."""
    return type(error).__name__ == "PanicException"


def translate(error: BaseException, path: str, settings: BucketSettings, num_bytes: int = 0) -> Exception:
    """The error of this library for an error of obstore. `num_bytes` is the size of the object to be written."""
    shown, name, response = settings.locate(path), type(error).__name__, ErrorResponse.of(error)
    advice = ADVICE.get(response.code) or ADVICE.get(str(response.status), store_facts.AWAY)
    if response.status == 404 and name == "GenericError":
        advice = store_facts.NO_BUCKET  # the request was a listing
    if advice is not store_facts.NO_BUCKET and response.code not in CONFLICT_CODES:
        if isinstance(error, FileNotFoundError):
            return FileNotFoundError(errno.ENOENT, "there is no such object", shown)
        if name in ("AlreadyExistsError", "PreconditionError"):
            return FileExistsError(errno.EEXIST, "another writer was first", shown)
    if name == "NotSupportedError":
        response = replace(response, status=501)
    is_transient = (
        response.status in TRANSIENT_STATUSES
        or response.code in TRANSIENT_CODES | CONFLICT_CODES
        or response.is_unanswered
    )
    if response.code in EXPIRED_CODES:
        is_transient = settings.renews_keys
    if response.region:
        advice = f"{advice}; it is in {response.region}"
    if response.lacks_keys:
        advice = store_facts.NO_KEYS.get(settings.scheme, store_facts.NO_KEYS["az"])
    reason = settings.scrub(response.reason)
    message = f"{shown}: {reason}; {advice}"
    refusal: StorageUnavailableError
    if response.status == INSUFFICIENT_STORAGE:
        refusal = StorageFullError(message, path=shown, needed_bytes=num_bytes, free_bytes=None)
    else:
        refusal = StorageUnavailableError(
            message, path=shown, status=response.status, code=response.code, transient=is_transient
        )
    # Without the original text, which may repeat our headers. A panic is not an Exception.
    refusal.__cause__ = (RuntimeError if is_panic(error) else type(error))(reason)
    return refusal

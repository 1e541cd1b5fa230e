"""The meaning of a filesystem's refusal, and advice on it.

In: an error of fsspec's, botocore's or aiohttp's. Out: its words, its advice, and what in it must not be shown.
Knows nothing of: which call it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from .. import stores


class NoBucketError(OSError):
    pass


class InheritedError(OSError):
    """The filesystem of a user cannot be made again in a forked child."""


REFUSED: Final = frozenset({"PreconditionFailed", "412"})
CONFLICT: Final = frozenset({"ConditionalRequestConflict", "OperationAborted", "409"})
NO_SUCH_CALL: Final = frozenset({"NotImplemented", "501", "InvalidArgument", "InvalidRequest", "400", "405"})
# By what an error or one of its causes is called, in S3's codes and in Python's classes: what to do about it.
_ADVICE: Final = {
    "NoBucketError": stores.CREATE,
    "InheritedError": "make it in this process, or give a URL and options= instead of fs=",
    "NoCredentialsError PartialCredentialsError CredentialRetrievalError ProfileNotFound": stores.NO_KEYS,
    "ExpiredToken ExpiredTokenException TokenRefreshRequired": stores.LOG_IN,
    "InvalidAccessKeyId SignatureDoesNotMatch InvalidToken AuthenticationException": stores.KEYS,
    "RequestTimeTooSkewed": stores.CLOCK,
    "PermanentRedirect 301 AuthorizationHeaderMalformed IllegalLocationConstraintException": stores.REGION,
    "PermissionError AccessDenied 403": stores.RIGHTS,
    "EndpointConnectionError ConnectTimeoutError ReadTimeoutError HTTPClientError ClientConnectionError "
    "ConnectionError ConnectionRefusedError ConnectionResetError FSTimeoutError TimeoutError NoValidConnectionsError gaierror": (
        stores.AWAY
    ),
}


def advice_on(error: BaseException) -> str:
    codes = codes_of(error)
    otherwise = (
        "make sure that the place is there, is healthy, and may be read and written with these credentials"
    )
    return next((advice for names, advice in _ADVICE.items() if codes & set(names.split())), otherwise)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(10):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def codes_of(error: BaseException) -> set[str]:
    """The names of an error and its causes: their classes, and the codes that a store gave."""
    codes = set()
    for cause in chain(error):
        codes.add(type(cause).__name__)
        codes.add(str(_answer(cause).get("Error", {}).get("Code")))
    return codes


def was_repeated(error: BaseException) -> bool:
    return any(_answer(cause).get("ResponseMetadata", {}).get("RetryAttempts") for cause in chain(error))


def _answer(error: BaseException) -> Mapping[str, Any]:
    answer = getattr(error, "response", None)
    return answer if isinstance(answer, Mapping) else {}


def secrets_in(url: str, *options: Mapping[str, Any]) -> tuple[str, ...]:
    """Texts that nobody may read in a message, the longest first."""
    secrets = {os.environ.get(name, "") for name in _SECRET_VARIABLES}
    parts = urlsplit(url)
    password = parts.password
    secrets |= {password or "", unquote(password or ""), parts.query, parts.fragment}
    mappings = list(options)
    while mappings:
        for name, value in mappings.pop().items():
            if isinstance(value, Mapping):
                mappings.append(value)
            elif isinstance(value, str) and stores.SECRET_NAME.search(name):
                secrets.add(value)
    return tuple(sorted(secrets - {""}, key=len, reverse=True))


_SECRET_VARIABLES: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")

"""Advice on errors of fsspec's filesystems.

In: an error of fsspec, botocore or aiohttp. Out: its codes, advice; the secrets that messages must not show.
Knows nothing of: calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from ...plumbing import store_facts


class NoBucketError(OSError):
    """The bucket does not exist."""


class InheritedError(OSError):
    """A user's filesystem could not be copied in a forked child."""


REFUSED: Final = frozenset({"PreconditionFailed", "412"})
CONFLICT: Final = frozenset({"ConditionalRequestConflict", "OperationAborted", "409"})
NO_SUCH_CALL: Final = frozenset({"NotImplemented", "501", "InvalidArgument", "InvalidRequest", "400", "405"})
# Advice, by the S3 codes and Python classes of an error and its causes.
_ADVICE: Final = {
    "NoBucketError": store_facts.CREATE,
    "InheritedError": "make it in this process, or give a URL and options= instead of fs=",
    "NoCredentialsError PartialCredentialsError CredentialRetrievalError ProfileNotFound": store_facts.NO_KEYS["s3"],
    "ExpiredToken ExpiredTokenException TokenRefreshRequired": store_facts.LOG_IN,
    "InvalidAccessKeyId SignatureDoesNotMatch InvalidToken AuthenticationException": store_facts.KEYS,
    "RequestTimeTooSkewed": store_facts.CLOCK,
    "PermanentRedirect 301 AuthorizationHeaderMalformed IllegalLocationConstraintException": store_facts.REGION,
    "PermissionError AccessDenied 403": store_facts.RIGHTS,
    "EndpointConnectionError ConnectTimeoutError ReadTimeoutError HTTPClientError ClientConnectionError "
    "ConnectionError ConnectionRefusedError ConnectionResetError FSTimeoutError TimeoutError NoValidConnectionsError "
    "gaierror": store_facts.AWAY,
}


def advice_on(error: BaseException) -> str:
    codes = codes_of(error)
    otherwise = "make sure that the place exists, is healthy, and these credentials may read and write it"
    return next((advice for names, advice in _ADVICE.items() if codes & set(names.split())), otherwise)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes."""
    for _ in range(10):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def codes_of(error: BaseException) -> set[str]:
    """The class names of an error and its causes, and the error codes of the store in them."""
    codes = set()
    for cause in chain(error):
        codes.add(type(cause).__name__)
        codes.add(str(_answer(cause).get("Error", {}).get("Code")))
    return codes


def was_repeated(error: BaseException) -> bool:
    """Whether s3fs had made the request more than once."""
    return any(_answer(cause).get("ResponseMetadata", {}).get("RetryAttempts") for cause in chain(error))


def _answer(error: BaseException) -> Mapping[str, Any]:
    answer = getattr(error, "response", None)
    return answer if isinstance(answer, Mapping) else {}


def secrets_in(url: str, *options: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts that no message may contain, the longest first."""
    secrets = {os.environ.get(name, "") for name in _SECRET_VARIABLES}
    parts = urlsplit(url)
    password = parts.password
    secrets |= {password or "", unquote(password or ""), parts.query, parts.fragment}
    mappings = list(options)
    while mappings:
        for name, value in mappings.pop().items():
            if isinstance(value, Mapping):
                mappings.append(value)
            elif isinstance(value, str) and store_facts.SECRET_NAME.search(name):
                secrets.add(value)
    return tuple(sorted(secrets - {""}, key=len, reverse=True))


_SECRET_VARIABLES: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")

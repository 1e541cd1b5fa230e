"""The settings of obstore's clients for one bucket.

In: a URL and the user's options. Out: keys of objects; the arguments of each client. Knows nothing of: requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import TIMEOUT_MAX
from typing import Any, Final, Literal, TypeAlias

from ...errors import StorageUnavailableError
from ...plumbing import store_facts, timing, urls, waits
from ..proven.client_facts import identity_of
from .aws_settings import AwsSetup
from .azure_google_settings import azure_config, google_config

# Clients for small requests, for parts, for the deletion of many objects, and for objects of any size.
Kind: TypeAlias = Literal["small", "part", "many", "whole"]

# If a request takes this many times its own timeout, obstore's threads are stuck.
_STUCK_TIMES: Final = 4


class BucketSettings:
    """A bucket, or everything below a prefix in it, and the options of its clients. A Client creates and owns it.

    `options` are the options of obstore, with or without the prefix `aws_`, or of fsspec; and also `client_options`,
    `retry_config` (for the requests of one part), `credential_provider`, `profile` and `deadline_seconds`.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None) -> None:
        self.scheme, self.bucket, self.prefix = urls.split_bucket(url)
        self.url = "/".join(filter(None, (f"{self.scheme}://{self.bucket}", self.prefix)))
        self.options = dict(options or {})
        rest = {key: value for key, value in self.options.items() if value is not None}
        self.deadline_seconds = min(float(rest.pop("deadline_seconds", None) or waits.OBJECT_SECONDS), TIMEOUT_MAX)
        self._client_options = dict(rest.pop("client_options", {}))
        self._retry_config = dict(rest.pop("retry_config", {}))
        self._credential_provider = rest.pop("credential_provider", None)
        self.aws = AwsSetup(rest) if self.scheme == "s3" else None
        if self.aws:
            self._config, self.endpoint = self.aws.config, self.aws.endpoint
        elif self.scheme == "gs":
            self._config = google_config(rest)
            self.endpoint = str(self._config.get("base_url", ""))
        else:
            self._config = azure_config(rest)
            self.endpoint = str(self._config.get("endpoint", ""))
        if self.endpoint.startswith("http:"):
            self._client_options.setdefault("allow_http", True)

    @property
    def identity(self) -> str:
        """A text that is equal for equal buckets and options."""
        return identity_of(f"{self.scheme}://{self.bucket}", self._config, self.aws.given_keys if self.aws else {})

    @property
    def obeys_conditions(self) -> bool:
        """Whether this is S3 itself, Google or Azure, which are known to obey the conditions of a put."""
        return not self.endpoint

    @property
    def renews_keys(self) -> bool:
        """Whether new keys can be looked up when keys have expired."""
        return self._credential_provider is not None or (self.aws is not None and not self.aws.given_keys)

    def locate(self, path: str) -> str:
        return f"{self.url}/{path}" if path else self.url

    def key(self, path: str) -> str:
        """The key of an object, or of a folder, without a slash at its end."""
        key = "/".join(filter(None, (self.prefix, path)))
        num_bytes = len(key.encode())
        if num_bytes > store_facts.MAX_KEY_BYTES:
            shown = self.locate(path)
            raise StorageUnavailableError(store_facts.key_too_long(shown, num_bytes), path=shown)
        return key

    def stuck_seconds(self, kind: Kind) -> float:
        """How long a request may make no progress. If the user sets timeouts or retries, up to the whole deadline."""
        is_set = self._client_options.keys() & {"timeout", "connect_timeout"} or self._retry_config
        longest = self.deadline_seconds if is_set or kind != "small" else waits.REQUEST_SECONDS
        return max(_STUCK_TIMES * self._timeout_seconds(kind), min(longest, self.deadline_seconds))

    def _timeout_seconds(self, kind: Kind) -> float:
        if kind == "whole":
            return self.deadline_seconds
        return min(waits.PART_SECONDS if kind == "part" else waits.SMALL_SECONDS, self.deadline_seconds)

    def arguments(self, kind: Kind) -> dict[str, Any]:
        """The arguments of obstore's constructors."""
        seconds = self._timeout_seconds(kind)
        client_options = {
            "timeout": f"{seconds * 1000:.0f}ms",
            "connect_timeout": "10s",
        } | self._client_options
        # obstore itself retries the requests of a part; `retry` retries all others.
        retries: dict[str, Any] = {"max_retries": 0}
        if kind == "part":
            retries = {"max_retries": 10, "retry_timeout": timing.duration(seconds)} | self._retry_config
        provider = self._credential_provider or (self.aws.provider if self.aws else None)
        # Some servers do not support the deletion of many objects by one request.
        one_by_one = {"aws_disable_bulk_delete": True} if self.aws and kind != "many" else {}
        return {
            "config": {**self._config, **one_by_one},
            "client_options": client_options,
            "retry_config": retries,
            **({"credential_provider": provider} if provider else {}),
        }

    def scrub(self, text: str) -> str:
        """A text without the secrets of these settings, and without the secrets in its URLs."""
        known = {str(value) for key, value in self._config.items() if store_facts.SECRET_NAME.search(key)}
        return urls.starred(text, known | (self.aws.known_secrets if self.aws else set()))

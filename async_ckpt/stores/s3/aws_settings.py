"""The settings of S3, from the sources that all clients of S3 use.

In: options, the environment, the files of the user's profile. Out: obstore's configuration and credentials.
Knows nothing of: objects.
"""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from ...plumbing import timing

# How long keys are used before they are looked up again; botocore returns no keys that expire sooner.
_KEYS_SECONDS: Final = 300.0
# Names of options in fsspec, so that the same options work for both clients.
_ALIASES: Final = {
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "anon": "skip_signature",
    "endpoint_url": "endpoint",
    "endpoint_url_s3": "endpoint",
    "region_name": "region",
    "default_region": "region",
}
# The setting by which users switch off all endpoints but that of the options.
_IGNORED: Final = "aws_ignore_configured_endpoint_urls"
# The endpoint in the nested settings of one service, in a section to which a profile refers by `services = name`.
_ENDPOINT: Final = re.compile(r"^\s*endpoint_url\s*=\s*(\S+)", re.MULTILINE)
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
# Options that select one of obstore's own sources of keys.
_OWN_KEYS: Final = re.compile(r"container_|metadata_|web_identity_|role_|imdsv1_")


class AwsSetup:
    """The settings of S3: options first, then the environment, then the files of the user's profile.

    BucketSettings creates and owns it. obstore calls it for credentials, on its own threads.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        config: dict[str, Any] = {}
        for key, value in _flat(options):
            name = key.lower().removeprefix("aws_")
            config[_ALIASES.get(name, name)] = value
        self._profile = str(config.pop("profile", "")) or None  # the option has precedence over the environment
        profile = self._read_profile()
        ignored = _environment(_IGNORED.upper()) or profile.get(_IGNORED.removeprefix("aws_"), "")
        configured = _environment("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") or profile.get("endpoint_url", "")
        self.endpoint = str(config.pop("endpoint", "")) or ("" if ignored.lower() == "true" else configured)
        config.setdefault(
            "region", _environment("AWS_REGION", "AWS_DEFAULT_REGION") or profile.get("region") or "us-east-1"
        )
        # Keys are passed by the provider: obstore would combine given keys with a session token of the environment.
        names = ("access_key_id", "secret_access_key", "session_token")
        self.given_keys = {name: str(config.pop(name)) for name in names if config.get(name)}
        if self.given_keys and not ({"access_key_id", "secret_access_key"} <= set(self.given_keys)):
            raise ValueError("options: access_key_id and secret_access_key belong together; give both")
        self.known_secrets = set(self.given_keys.values())
        if str(config.get("skip_signature", False)).lower() in ("false", "0", ""):
            config.pop("skip_signature", None)
            own = any(_OWN_KEYS.match(name) for name in config) and not self.given_keys
        else:
            own = True
        self.provider: Callable[[], dict[str, Any]] | None = None if own or not self._finds_keys() else self
        if self.endpoint:
            url = parse_endpoint(self.endpoint)
            config["endpoint_url_s3"] = self.endpoint  # this name has precedence over the environment
            # Over plain http, only a signature protects the bytes in transit.
            config.setdefault("unsigned_payload", url.scheme == "https" or url.hostname in _LOOPBACK)
        else:
            if configured:  # obstore would take an endpoint in the environment that is to be ignored
                config["endpoint_url_s3"] = f"https://s3.{config['region']}.amazonaws.com"
            config.setdefault("unsigned_payload", True)
            # crc64nvme takes 0.03 s of processor time per GiB, sha256 0.6 s, and the upload itself 0.24 s. Other
            # servers with the API of S3 may not support it.
            config.setdefault("checksum_algorithm", "crc64nvme")
        self.config = {f"aws_{name}": value for name, value in config.items()}

    def __call__(self) -> dict[str, Any]:
        """The keys, which obstore requests again before they expire."""
        keys = self.given_keys or self._keys_of_session() or self._keys_of_files()
        if not keys:
            raise LookupError("no credentials were found")
        self.known_secrets = self.known_secrets | set(keys.values())
        return {
            "access_key_id": keys["access_key_id"],
            "secret_access_key": keys.get("secret_access_key", ""),
            "token": keys.get("session_token"),
            "expires_at": None if self.given_keys else timing.from_now(_KEYS_SECONDS),
        }

    def renew(self) -> None:
        """Forget the credentials, so that they are looked up again."""
        self.__dict__.pop("_credentials", None)

    def _finds_keys(self) -> bool:
        """Whether this object has a source of keys. Without botocore, obstore has more sources than this module."""
        return bool(self.given_keys or _botocore_session() or self._keys_of_files())

    def _keys_of_session(self) -> dict[str, str]:
        if self._credentials is None:
            return {}
        frozen = self._credentials.get_frozen_credentials()
        keys = {"access_key_id": frozen.access_key, "secret_access_key": frozen.secret_key}
        return keys | ({"session_token": frozen.token} if frozen.token else {})

    @cached_property
    def _credentials(self) -> Any:
        """The credentials of botocore, which supports SSO, assumed roles and processes, and renews keys."""
        session = _botocore_session()
        return session(profile=self._profile).get_credentials() if session else None

    def _keys_of_files(self) -> dict[str, str]:
        profile = self._read_profile()
        names = ("access_key_id", "secret_access_key", "session_token")
        sources: tuple[Mapping[str, str], ...] = (profile,) if self._profile else (os.environ, profile)
        for source in sources:
            keys = {name: source.get(f"AWS_{name.upper()}") or source.get(f"aws_{name}", "") for name in names}
            if keys["access_key_id"]:
                return {name: value for name, value in keys.items() if value}
        return {}

    def _read_profile(self) -> dict[str, str]:
        name = self._profile or _environment("AWS_PROFILE", "AWS_DEFAULT_PROFILE") or "default"
        folder = Path("~/.aws")
        settings: dict[str, str] = {}
        for variable, file, section in (
            ("AWS_CONFIG_FILE", "config", name if name == "default" else f"profile {name}"),
            ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
        ):
            parser = configparser.RawConfigParser(strict=False)
            with suppress(configparser.Error, OSError, UnicodeDecodeError):  # botocore reports errors in the file
                parser.read(Path(_environment(variable) or folder / file).expanduser(), encoding="utf-8")
                if parser.has_section(section):
                    settings |= dict(parser.items(section))
                services = parser.get(f"services {settings.get('services')}", "s3", fallback="")
                if of_s3 := _ENDPOINT.search(services):
                    settings["endpoint_url"] = of_s3[1]
        return settings


def _botocore_session() -> Any:
    try:
        from botocore.session import Session  # type: ignore[import-untyped]
    except ImportError:
        return None
    return Session


def _environment(*names: str) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _flat(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in options.items():
        if key == "client_kwargs":
            yield from dict(value).items()
        else:
            yield key, value


def parse_endpoint(endpoint: str) -> SplitResult:
    """The parts of an endpoint. Raises ValueError unless it is the URL of a server."""
    with suppress(ValueError):  # of an invalid port, or an invalid IPv6 address
        url = urlsplit(endpoint)
        if url.scheme in ("http", "https") and url.hostname and url.port != 0 and not (url.username or url.password):
            return url
    raise ValueError("the endpoint of the store must be a URL such as https://host:port; correct it")

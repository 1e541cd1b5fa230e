"""The settings of Azure and of Google Cloud Storage, by the names that obstore, fsspec and their own tools use.

In: options, the environment. Out: obstore's configuration, and the endpoint. Knows nothing of: objects.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

# Other names of obstore's options, in adlfs, gcsfs and the command.
_AZURE_NAMES: Final = {
    "account_url": "endpoint",
    "sas_token": "sas_key",
    "anon": "skip_signature",
    "account_name": "account_name",
    "account_key": "account_key",
    "connection_string": "connection_string",
}
_GOOGLE_NAMES: Final = {
    "endpoint": "base_url",
    "endpoint_url": "base_url",
    "anon": "skip_signature",
    "bearer_token": "bearer_token",
    "service_account": "service_account",
    "service_account_path": "service_account",
    "service_account_key": "service_account_key",
    "application_credentials": "application_credentials",
}
# The parts of a connection string of Azure.
_CONNECTION_PARTS: Final = {
    "AccountName": "account_name",
    "AccountKey": "account_key",
    "SharedAccessSignature": "sas_key",
    "BlobEndpoint": "endpoint",
}
_GOOGLE_KEYS: Final = frozenset({"service_account", "service_account_key", "application_credentials", "bearer_token"})
_GOOGLE_VARIABLES: Final = tuple(f"GOOGLE_{name.upper()}" for name in (*_GOOGLE_KEYS, "service_account_path"))


def azure_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """Obstore's configuration for Azure. The endpoint comes from an option, a connection string, or the environment."""
    config = _renamed(options, "azure_", _AZURE_NAMES)
    connection = str(config.pop("connection_string", "") or os.environ.get("AZURE_STORAGE_CONNECTION_STRING", ""))
    for part in filter(None, connection.split(";")):
        name, _, value = part.partition("=")
        if name in _CONNECTION_PARTS and value:
            config.setdefault(_CONNECTION_PARTS[name], value)
    if not config.get("endpoint"):
        endpoint = os.environ.get("AZURE_STORAGE_ENDPOINT") or os.environ.get("AZURE_ENDPOINT")
        config |= {"endpoint": endpoint} if endpoint else {}
    return config


def google_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """Obstore's configuration for Google. The endpoint comes from an option or the environment.

    Requests to a server without TLS, which can only be an emulator, carry no credentials unless some are given.
    """
    config = _renamed(options, "google_", _GOOGLE_NAMES)
    if config.get("token") == "anon":
        config["skip_signature"] = True
    config.pop("token", None)
    config.pop("project", None)
    if not config.get("base_url"):
        endpoint = os.environ.get("GOOGLE_BASE_URL") or os.environ.get("STORAGE_EMULATOR_HOST")
        if endpoint:
            config["base_url"] = endpoint if "://" in endpoint else f"http://{endpoint}"
    has_keys = config.keys() & _GOOGLE_KEYS or any(map(os.environ.get, _GOOGLE_VARIABLES))
    if str(config.get("base_url", "")).startswith("http:") and not has_keys:
        config["bearer_token"] = "none"  # without it, obstore looks for credentials before each put  # nosec B105
    return config


def adlfs_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of adlfs, from options of adlfs or obstore. An endpoint becomes a part of a connection string."""
    config = azure_config(options)
    endpoint = config.pop("endpoint", None)
    names = {new: old for old, new in _AZURE_NAMES.items() if old in ("sas_token", "anon")}
    adlfs = {names.get(name, name): value for name, value in config.items()}
    if endpoint and "credential" not in adlfs:
        parts = {part: config.get(name) for part, name in _CONNECTION_PARTS.items()} | {"BlobEndpoint": endpoint}
        adlfs["connection_string"] = ";".join(f"{part}={value}" for part, value in parts.items() if value)
    return adlfs


def gcsfs_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of gcsfs, from options of gcsfs or obstore."""
    config = {name.lower().removeprefix("google_"): value for name, value in options.items()}
    for name in ("endpoint", "base_url"):
        if name in config:
            config["endpoint_url"] = config.pop(name)
    for name in ("service_account", "application_credentials"):
        if name in config:
            config["token"] = config.pop(name)
    is_plain = str(config.get("endpoint_url", "")).startswith("http:")
    if str(config.pop("skip_signature", False)).lower() in ("true", "1") or (is_plain and "token" not in config):
        config["token"] = "anon"
    return config


def _renamed(options: Mapping[str, Any], prefix: str, names: Mapping[str, str]) -> dict[str, Any]:
    """The options, each under one name. Unknown options keep their names, and obstore accepts or rejects them."""
    config = {}
    for key, value in options.items():
        name = key.lower().removeprefix(prefix).removeprefix("storage_")
        config[names.get(name, name if name in names.values() else key)] = value
    return config

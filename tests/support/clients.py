"""What every client of a store reads when it is made, read once: most of what a test at a store would take.

A client of botocore parses megabytes of JSON, and lists the folders of hundreds of services. Its TLS context, which it has
for http too, takes a hundred authorities.
"""

import functools
from pathlib import Path
from typing import Any


def trusting_one_authority(folder: Path) -> dict[str, str]:
    """The variables by which clients trust one authority, in a file in this folder. Nothing speaks TLS here."""
    import certifi

    end = "-----END CERTIFICATE-----\n"
    path = folder / "authority.pem"
    path.write_text(Path(certifi.where()).read_text(encoding="ascii").partition(end)[0] + end, encoding="ascii")
    return {"AWS_CA_BUNDLE": str(path), "SSL_CERT_FILE": str(path)}


def read_services_once() -> None:
    """From now on, in this process."""
    from botocore.loaders import JSONFileLoader, Loader, create_loader

    read = functools.cache(functools.partial(JSONFileLoader.load_file, JSONFileLoader()))
    listed = functools.partial(Loader.list_available_services, create_loader())  # each loader keeps what it has found
    JSONFileLoader.load_file = lambda _, path: read(path)
    Loader.list_available_services = lambda _, type_name: listed(type_name)


def environment_of(server: Any) -> dict[str, str]:
    """The variables by which clients find a server that a test has started."""
    keys = ("region", "access_key_id", "secret_access_key")
    return {**{f"AWS_{key.upper()}": server.options[key] for key in keys}, "AWS_ENDPOINT_URL": server.endpoint}

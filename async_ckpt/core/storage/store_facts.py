"""Facts about object stores that hold for every client.

In: nothing. Out: limits, ages, advice; the names of secret options. Knows nothing of: clients, requests.
"""

from __future__ import annotations

import os
import re
from typing import Final

from ...errors import StorageUnavailableError
from ..spec import MIB

# S3 refuses smaller parts, except for the last, and a 10,001st part; S3, Google and Azure refuse longer keys.
MIN_PART_BYTES: Final = 5 * MIB
MAX_PARTS: Final = 10_000
MAX_KEY_BYTES: Final = 1024
# No writer of an object of this age, by the store's clock, can still be alive.
ORPHAN_SECONDS: Final = 86400.0
# The beginning of the names of probes, objects that are written to find out what a store can do.
PROBE: Final = ".async_ckpt-probe-"

# Advice on refusals.
CREATE: Final = "create it, or correct the URL"
NO_BUCKET: Final = f"the bucket does not exist; {CREATE}"
REGION: Final = 'the bucket is in another region; give it in Place(url, options={"region": …}), or set AWS_REGION'
LOG_IN: Final = "the credentials have expired; log in again, or renew them where they are kept"
KEYS: Final = "check the access key and its secret"
# By the scheme of the URL; all schemes of Azure use "az".
NO_KEYS: Final = {
    "s3": "give keys in Place(url, options=…), set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or log in (aws "
    "configure, aws sso login)",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account, or log in (gcloud auth "
    "application-default login)",
    "az": "give an account key or a token in Place(url, options=…), or log in (az login)",
}
CLOCK: Final = "this host's clock is wrong; set it, by NTP for instance"
RIGHTS: Final = "let these credentials get, put, delete and list there, or use others"
AWAY: Final = "check that the store is up and reachable from this host, then try again"
ROOM: Final = "delete old steps or keep fewer (keep=), then save again"

# Names of options and variables whose values must not appear in messages.
SECRET_NAME: Final = re.compile(r"key|secret|token|pass|credential|sas|signature|connection_string", re.IGNORECASE)


def probe_name() -> str:
    """A new name for a probe, an object that is written to find out what a store can do."""
    return f"{PROBE}{os.urandom(8).hex()}"


def part_segments(num_bytes: int, segment_bytes: int) -> int:
    """The number of segments in a part of an upload: the smallest that obeys the limits on size and number of parts."""
    smallest = max(MIN_PART_BYTES, -(-num_bytes // MAX_PARTS))
    return min(-(-smallest // segment_bytes), max(1, -(-num_bytes // segment_bytes)))


def key_too_long(shown: str, num_bytes: int) -> str:
    """The message about a key that exceeds the limit of all stores."""
    return f"{shown:.100}…: the key has {num_bytes:,} bytes, but stores accept at most {MAX_KEY_BYTES:,}; shorten it"


def endless_listing(shown: str) -> StorageUnavailableError:
    """The error for a store whose listing never ends: a page leads back to an earlier page, or to no page."""
    return StorageUnavailableError(
        f"{shown}: the store says that its listing continues, but returns nothing new; check that the endpoint is a "
        "store, or tell its operators",
        path=shown,
    )

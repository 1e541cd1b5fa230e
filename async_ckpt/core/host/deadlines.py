"""All deadlines: the limits, in seconds, of waits for something that may never come.

In: nothing. Out: constants. Knows nothing of: the waits. Intervals of polling are defined beside the code that polls.
"""

from __future__ import annotations

from typing import Final

# --- a store ------------------------------------------------------------------------------------------------------

# How long a store may be away before a save gives up: enough for a reboot of its front end or a new network lease.
OBJECT_SECONDS: Final = 900.0
# The same for a manifest, a listing or a read, for which the user waits.
REQUEST_SECONDS: Final = 120.0
# One request for a part. Eight parts of 32 MiB in this time need 1.5 MB/s; if that fails, the next attempt sends half
# as many at once.
PART_SECONDS: Final = 180.0
SMALL_SECONDS: Final = 30.0  # any other request
# How long an aborted upload may take to drop its buffers before its thread ends without them.
DROP_SECONDS: Final = 10.0
# The abort of the leftovers of a failed upload.
ABORT_SECONDS: Final = 10.0

# --- other ranks --------------------------------------------------------------------------------------------------

# The first save, export or publication of another rank.
MEETING_SECONDS: Final = 600.0
# Between two signs that a rank is still working: much less than the other ranks wait for its answer.
SIGN_SECONDS: Final = 60.0
# The receipts or parts of other ranks, once rank 0's own archive is durable.
PEER_SECONDS: Final = 1800.0
# The decision of rank 0, which has to wait for receipts itself.
DECISION_SECONDS: Final = PEER_SECONDS + 600.0
# How long a shared root may hide from one rank what another has written: NFS does so for a minute.
SHARED_SECONDS: Final = 120.0

# --- a place of several, and the end ------------------------------------------------------------------------------

# A place that does not even open, once the save could go on without it, or has failed.
OPEN_SECONDS: Final = 10.0
# With `commit="any"`, a place that lags behind a committed one. Then it is left to be caught up.
LAG_SECONDS: Final = 900.0
# A place that was away is tried again for so long, since other ranks may wait for its object.
AGAIN_SECONDS: Final = 1800.0
# Calls at a place whose part is in vain.
END_SECONDS: Final = 10.0
# The last writes of abandoned saves. An exit with a timeout waits only for a tenth of that timeout more, but at least
# as long as a healthy disk may need.
ABANDON_SECONDS: Final = 10.0
LEAST_ABANDON_SECONDS: Final = 1.0
# Listeners of operations, such as exporters of metrics, at the interpreter's exit.
LISTENERS_SECONDS: Final = 5.0

"""The history of a run: what happened there, for people. Nothing in this library trusts it.

`shapes.py` has the kinds of events and their fields, `log.py` the bounded log of them at one root, and `goodput.py`
what the time of a run went to.
What is named here is for others than the core, by `plumbing.events`.
"""

from __future__ import annotations

from .goodput import Goodput as Goodput
from .goodput import goodput_of as goodput_of
from .log import EventLog as EventLog
from .shapes import MEASURED as MEASURED
from .shapes import Event as Event
from .shapes import bandwidth_of as bandwidth_of
from .shapes import shortened as shortened

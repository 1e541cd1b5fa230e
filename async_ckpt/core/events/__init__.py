"""The history of a run: a log of its events for people. Nothing in this library trusts it.

`kinds.py` has the kinds of events and their fields, `log.py` is the bounded log at one root, and `goodput.py` computes
how a run has spent its time. The names imported here are for code outside the core, through `plumbing.events`.
"""

from __future__ import annotations

from .goodput import Goodput as Goodput
from .goodput import goodput_of as goodput_of
from .kinds import MEASURED as MEASURED
from .kinds import Event as Event
from .kinds import bandwidth_of as bandwidth_of
from .kinds import shortened as shortened
from .log import EventLog as EventLog

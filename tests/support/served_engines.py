"""An engine in a process of its own, behind the routes of its framework; its support module has a function `serve`."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any, ClassVar

from children import Child, Nursery
from racing import until

_SERVE = """
import sys
from {module} import serve
serve(sys.argv[1])
"""


class ServedEngine:
    """One engine, which writes its port to `folder`."""

    module: ClassVar[str]

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.child: Child = nursery.start(_SERVE.format(module=self.module), folder)
        until(lambda: (folder / "port").exists())
        self.url = f"http://127.0.0.1:{(folder / 'port').read_text()}"

    def state(self) -> dict[str, Any]:
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/state", b"{}"), timeout=60) as response:
            return json.loads(response.read())

    def kill(self) -> None:
        self.child.send(signal.SIGKILL)
        self.child.ended()

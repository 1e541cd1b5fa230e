"""`python -m async_ckpt`: the command `async-ckpt`.

In: arguments. Out: its status. Knows nothing of: its words.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    """Run the command. Without its packages, one line says what to install."""
    if any(find_spec(name) is None for name in ("typer", "rich")):  # rich is imported late, for a terminal
        sys.exit('async-ckpt needs typer and rich: pip install "async_ckpt[cli]"')
    from .tools.command.main import main as command

    command()


if __name__ == "__main__":
    main()

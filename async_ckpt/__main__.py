"""`python -m async_ckpt`: the command `async-ckpt`.

In: arguments. Out: its status. Knows nothing of: its words.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command. Without its packages, one line says what to install."""
    try:
        from .command.main import main as command
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        sys.exit("async-ckpt needs typer and rich: pip install 'async_ckpt[cli]'")
    command()


if __name__ == "__main__":
    main()

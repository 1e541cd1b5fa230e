"""The exit status of a call, and calls for several places.

In: calls. Out: a status, and one line on stderr if something is wrong. Knows nothing of: arguments, checkpoints.

Status: 0 success; 1 the answer is no (damaged, different, nothing found); 2 wrong usage, or things that cannot be
compared; 70 internal error; 74 storage error; 75 steps are left to move; 130 Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import typer

from ... import Place
from ...errors import CheckpointError, NotCommittedError, StorageUnavailableError
from .output import NO, STORAGE, USAGE, Answer, documents_in_lines, escaped, print_text

_INTERRUPTED: Final = 130
_FAULT: Final = 70  # EX_SOFTWARE of sysexits.h


def for_each(call: Callable[..., object], *places: Sequence[Place], with_headings: bool = False) -> None:
    """Make a call for each of several places, or pairs of places, even if other calls fail. Exits with the highest
    status.
    """
    targets = [*zip(*places, strict=True)]
    if len(targets) == 1:
        call(*targets[0])
        return
    worst = 0
    with documents_in_lines():
        for each in targets:
            if with_headings:
                print_text(f"{each[0].shown}:")
            worst = max(worst, status := status_after(partial(call, *each)))
            if status == _INTERRUPTED:
                break
    raise typer.Exit(worst)


def status_after(call: Callable[[], object]) -> int:
    """Make a call, print its error on stderr, and return the status."""
    try:
        result = call()
        return result if isinstance(result, int) else 0
    except typer.Exit as error:
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except Answer as error:
        return _print_error(str(error), error.status)
    except CheckpointError as error:
        is_of_storage = isinstance(error, StorageUnavailableError | OSError) and not isinstance(
            error, NotCommittedError
        )
        return _print_error(str(error), STORAGE if is_of_storage else NO)
    except KeyError as error:  # a name that no checkpoint has; str(error) would have quotes
        return _print_error(str(error.args[0] if error.args else error), NO)
    except (ValueError, TypeError, ImportError) as error:
        return _print_error(str(error), USAGE)
    except OSError as error:
        return _print_error(str(error), STORAGE)
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("click", "typer"):
            show: Any = error
            show.show()
            return int(getattr(error, "exit_code", USAGE))
        if os.environ.get("ASYNC_CKPT_TRACEBACK"):
            raise
        return _print_error(
            f"internal error: {type(error).__name__}: {error!s:.200}; please report it with the traceback that "
            "ASYNC_CKPT_TRACEBACK=1 in the environment prints",
            _FAULT,
        )


def _print_error(text: str, status: int) -> int:
    print(f"async-ckpt: {escaped(text)}", file=sys.stderr)
    return status

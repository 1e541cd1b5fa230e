"""Every byte of a checkpoint against its digest.

In: a place. Out: a report, as text or a document. Knows nothing of: arguments.
"""

from __future__ import annotations

import typer

from .. import CorruptCheckpointError, verify
from ..storage.place import Place
from .screen import NO, escaped, print_json, print_text


def show(place: Place, *, as_json: bool) -> None:
    """Verify what is at a place, and print the report.

    Raises:
        CorruptCheckpointError: something is damaged, and no document was asked for.
        typer.Exit: something is damaged, as the document says.
    """
    try:
        report = verify(place)
    except CorruptCheckpointError as error:
        if not as_json:
            raise
        print_json(
            "verification",
            {"place": place.shown, "sound": False, "error": str(error), "tensors": list(error.tensors)},
        )
        raise typer.Exit(NO) from None
    if not as_json:
        print_text(escaped(str(report)))
        return
    print_json(
        "verification",
        {
            "place": place.shown,
            "sound": True,
            "steps": list(report.steps),
            "num_archives": report.num_archives,
            "num_bytes": report.num_bytes,
            "notes": list(report.notes),
        },
    )

"""The options that words of the command share: a place with what its store needs, and `--json`.

In: a word that takes a `place`. Out: the same word, for typer, with the options that describe one. Knows nothing of:
what a word does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Final, get_args, get_origin

import typer

from ..storage.place import Place
from ..storage.url import scheme_of

# How long a store may not answer: somebody waits at the terminal.
_DEADLINE_SECONDS: Final = 30.0

# A parameter of this type is an argument that says where; `with_place` makes it one.
Where = Annotated[Place, typer.Argument(help="A path or URL.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, and nothing else.")]

_OPTIONS: Final = {
    "endpoint": (Annotated[str | None, typer.Option(help="The endpoint of an S3 store.")], None),
    "region": (Annotated[str | None, typer.Option(help="The region of the store.")], None),
    "profile": (Annotated[str | None, typer.Option(help="The profile in ~/.aws whose credentials are used.")], None),
    "anonymous": (Annotated[bool, typer.Option("--anonymous", help="Ask the store without credentials.")], False),
    "deadline": (
        Annotated[float, typer.Option(help="How many seconds a store may take to answer a request.")],
        _DEADLINE_SECONDS,
    ),
}
_KEYWORD: Final = inspect.Parameter.KEYWORD_ONLY


def with_place(word: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameters of a word that are a `Place` by an argument each, and add the options of their store."""
    signature = inspect.signature(word, eval_str=True)
    parameters = [_as_argument(one) for one in signature.parameters.values()]
    places = [name for name, one in signature.parameters.items() if _is_place(one)]
    parameters += [
        inspect.Parameter(name, _KEYWORD, default=default, annotation=annotation)
        for name, (annotation, default) in _OPTIONS.items()
    ]

    @functools.wraps(word)
    def called(**given: Any) -> None:
        options = {name: given.pop(name) for name in _OPTIONS}
        for name in places:
            given[name] = None if given[name] is None else place_of(given[name], **options)
        word(**given)

    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in parameters}
    return called


def place_of(where: str, *, anonymous: bool, deadline: float, **given: str | None) -> Place:
    """The place at a path or URL, with the options of its store that are given."""
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if anonymous:
        options["skip_signature"] = True
    if scheme_of(where) not in (None, "file"):
        options["deadline_seconds"] = deadline
    return Place(where, options=options or None)


def _is_place(parameter: inspect.Parameter) -> bool:
    return get_origin(parameter.annotation) is Annotated and get_args(parameter.annotation)[0] in (Place, Place | None)


def _as_argument(parameter: inspect.Parameter) -> inspect.Parameter:
    """The parameter as typer needs it: all are given by name, and a place is described by a text."""
    if not _is_place(parameter):
        return parameter.replace(kind=_KEYWORD)
    kind, argument = get_args(parameter.annotation)
    text = str if kind is Place else str | None
    return parameter.replace(kind=_KEYWORD, annotation=Annotated[text, argument])

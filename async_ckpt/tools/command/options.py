"""The options that subcommands share: a place with the options of its store, and `--json`.

In: a function with parameters of type `Place`. Out: a function for typer with the options of these places. Knows
nothing of: what a subcommand does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Final, get_args, get_origin

import typer

from ... import Place
from .place_arguments import DEADLINE_SECONDS, is_local, place_of

# The type of a parameter that is a place; `with_place` makes it an argument.
Where = Annotated[
    Place, typer.Argument(metavar="PLACE", help="A path or URL; a step as RUN@100 or RUN@latest.", show_default=False)
]
_AS_JSON: Final = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else.")]

# The options of a store: type, default, metavar and help of each.
_OPTIONS: Final[dict[str, tuple[type, Any, str | None, str]]] = {
    "endpoint": (str, None, "URL", "The URL of the store, if not the provider's own."),
    "region": (str, None, "NAME", "The region of the store."),
    "profile": (str, None, "NAME", "The profile in ~/.aws that has the credentials."),
    "anonymous": (bool, False, None, "Send requests without credentials."),
    "deadline": (float, DEADLINE_SECONDS, "SECONDS", "How long the store may take to answer a request."),
}
# The types of parameters that are places, and the types of their texts on the command line.
_TEXTS: Final[dict[Any, Any]] = {Place: str, Place | None: str | None, list[Place]: list[str]}
_KEYWORD: Final = inspect.Parameter.KEYWORD_ONLY


def with_place(word: Callable[..., None], show: Callable[..., None]) -> Callable[..., None]:
    """A function for typer that calls `show`. Each parameter that is a `Place` becomes an argument. The option `--json`
    and the options of the stores come last.
    """
    signature = inspect.signature(word, eval_str=True)
    parameters = [_as_argument(parameter) for parameter in signature.parameters.values()]
    places = [name for name, parameter in signature.parameters.items() if _is_place(parameter)]
    own = {place: _store_options(place if number else "") for number, place in enumerate(places)}
    parameters.append(inspect.Parameter("as_json", _KEYWORD, default=False, annotation=_AS_JSON))
    parameters += [option for options in own.values() for option in options]

    @functools.wraps(word)
    def called(**given: Any) -> None:
        options: dict[str, Any] = {}
        for place, parameters in own.items():
            chosen = {parameter.name.rpartition("_")[2]: given.pop(parameter.name) for parameter in parameters}
            options |= {name: value for name, value in chosen.items() if value is not None}
            if given[place] is not None:
                given[place] = _opened(given[place], options, is_only=len(places) == 1)
        show(**given)

    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _opened(where: str | list[str], options: dict[str, Any], *, is_only: bool) -> Place | list[Place]:
    """The place at a path or URL, or the places at several. Beside a URL, a path does not get the options."""
    from .selection import step_named

    several = where if isinstance(where, list) else [where]
    are_for_all = is_only and all(map(is_local, several))  # then a path refuses them
    opened = [step_named(place_of(one, **(options if are_for_all or not is_local(one) else {}))) for one in several]
    return opened if isinstance(where, list) else opened[0]


def _store_options(place: str) -> list[inspect.Parameter]:
    """The options of a store. Those of a second place begin with its name, and default to the first place's options."""
    options = []
    for name, (kind, default, metavar, text) in _OPTIONS.items():
        full, annotation = name, kind if default is not None else kind | None
        if place:
            full, default, annotation = f"{place}_{name}", None, kind | None
            text = f"--{name} for {place.upper()}, if different."
        flag = f"--{full.replace('_', '-')}"
        option = typer.Option(flag, help=text, metavar=metavar)
        parameter = inspect.Parameter(full, _KEYWORD, default=default, annotation=Annotated[annotation, option])
        options.append(parameter)
    return options


def _is_place(parameter: inspect.Parameter) -> bool:
    return get_origin(parameter.annotation) is Annotated and get_args(parameter.annotation)[0] in _TEXTS


def _as_argument(parameter: inspect.Parameter) -> inspect.Parameter:
    """The parameter for typer: keyword-only, and a text if it is a place."""
    if not _is_place(parameter):
        return parameter.replace(kind=_KEYWORD)
    kind, argument = get_args(parameter.annotation)
    return parameter.replace(kind=_KEYWORD, annotation=Annotated[_TEXTS[kind], argument])

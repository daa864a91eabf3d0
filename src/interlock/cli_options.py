"""Command-line parameters of the launch options, built from ``OPTIONS`` so that help cannot drift."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from interlock.cli_completion import values_of
from interlock.errors import Refusal
from interlock.option_kinds import Kind, Option
from interlock.option_sources import describe_default, gather
from interlock.options import OPTIONS, Options

Verb = Callable[..., int]


def launch_options(*, http: bool) -> Callable[[Callable[..., int]], Verb]:
    """Give a verb MODEL, ``--config`` and every option; it receives them as ``options: Options``.

    Args:
        http: include the options of the HTTP front end.
    """

    def decorate(verb: Callable[..., int]) -> Verb:
        chosen = [option for option in OPTIONS.values() if http or option.engine]

        @wraps(verb)
        def run(**values: Any) -> int:
            flags = {option.name: values.pop(option.name) for option in chosen}
            options = gather(flags, config=values.pop("config"), environ=os.environ)
            return verb(options=options, **values)

        parameters = [_parameter(option) for option in chosen] + [_config()]
        _describe(run, verb, parameters)
        return run

    return decorate


def model_of(options: Options) -> str:
    """MODEL, from wherever it was given."""
    model = options.text("model")
    if model is None:
        raise Refusal(
            option="MODEL",
            given="",
            rule="is missing: a folder, or a built-in model",
            alternatives=("demo", "tiny-random"),
        )
    return model


def _describe(run: Callable[..., int], verb: Callable[..., int], added: list[inspect.Parameter]) -> None:
    """Show typer the verb's own parameters plus ``added``."""
    hints = get_type_hints(verb, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(verb).parameters.items()
        if name != "options"
    ]
    parameters = added[:1] + own + added[1:]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del run.__wrapped__  # type: ignore[attr-defined]


def _parameter(option: Option) -> inspect.Parameter:
    if option.name == "model":
        argument = typer.Argument(
            metavar="MODEL", help=option.help, show_default=False, autocompletion=values_of(option)
        )
        return _keyword(option.name, Annotated[str | None, argument])
    help_text = f"{option.help} [default: {describe_default(option)}]"
    panel = option.section.value
    if option.kind is Kind.SWITCH:
        names = f"{option.flag}/--no-{option.flag[2:]}"
        switch = typer.Option(names, help=help_text, rich_help_panel=panel, show_default=False)
        return _keyword(option.name, Annotated[bool | None, switch])
    metavar = "|".join(option.allowed()) or option.kind.value.upper()
    text = typer.Option(
        option.flag,
        help=help_text,
        metavar=metavar,
        rich_help_panel=panel,
        show_default=False,
        autocompletion=values_of(option),
    )
    return _keyword(option.name, Annotated[str | None, text])


def _config() -> inspect.Parameter:
    help_text = "YAML file of options (tp_size: 2); flags win over it, it wins over INTERLOCK_* variables"
    return _keyword(
        "config", Annotated[str | None, typer.Option("--config", help=help_text, show_default=False)]
    )


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

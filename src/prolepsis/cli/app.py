"""The commands, by name."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

# The module of each, and the function in it.
_COMMANDS = {
    "demo": "demo.demo",
    "generate": "generate.generate",
    "chat": "chat.chat",
    "serve": "serve.serve",
    "pull": "models.pull",
    "bench": "bench.bench",
    "ppl": "perplexity.ppl",
    "quantize": "quantize.quantize",
    "calibrate": "calibrate.calibrate_",
    "warmup": "models.warmup",
}
_KV_COMMANDS = {
    "save": "kv.save",
    "load": "kv.load_",
    "inspect": "kv.inspect",
    "verify": "kv.verify",
    "bench": "kv_bench.bench",
    "plan": "kv_plan.plan",
}


def app_for(arguments: Sequence[str]) -> typer.Typer:
    """The command line, with all that `arguments` need of it: most of the time that a command takes to start is the
    imports of others."""
    app = typer.Typer(
        name="prolepsis",
        help="An LLM inference engine that predicts its own future: tokens and KV cache.",
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_prolepsis)
    first = arguments[0] if arguments else None
    if first != "kv":
        _add(app, {} if first == "--version" else _COMMANDS, first)
    if first not in ("--version", *_COMMANDS):
        kv_app = typer.Typer(help="Save, restore, look into, verify, measure and plan losslessly coded KV caches.")
        kv_app.callback(invoke_without_command=True)(_help_if_alone)
        _add(kv_app, _KV_COMMANDS, arguments[1] if first == "kv" and len(arguments) > 1 else None)
        app.add_typer(kv_app, name="kv")
    return app


def _add(app: typer.Typer, commands: Mapping[str, str], wanted: str | None) -> None:
    """The one that is wanted; all where it is none of them, for help and advice name them all."""
    for name in [wanted] if wanted is not None and wanted in commands else commands:
        app.command(name)(_function(commands[name]))


def _function(place: str) -> Callable[..., Any]:
    module, name = place.split(".")
    function: Callable[..., Any] = getattr(import_module(f"prolepsis.cli.{module}"), name)
    return function


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            number = version("prolepsis")
        except PackageNotFoundError:
            number = "(run from its sources, not installed)"
        print(f"prolepsis {number}")
        raise typer.Exit


def _prolepsis(
    context: typer.Context,
    version_: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    _help_if_alone(context)


def _help_if_alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


# Typer does not export the class that all its complaints about arguments share.
_USAGE_ERROR = typer.BadParameter.__mro__[1]


def usage_message(error: Exception) -> str | None:
    """What to tell a user who gave wrong arguments, in one line; None for any other error."""
    if not isinstance(error, _USAGE_ERROR):
        return None
    usage: Any = error
    command = usage.ctx.command_path if usage.ctx is not None else "prolepsis"
    return f"{usage.format_message()} (see `{command} --help`)"

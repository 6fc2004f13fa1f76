"""The commands, by name."""

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from prolepsis.cli import (
    bench,
    calibrate,
    chat,
    demo,
    generate,
    kv,
    kv_bench,
    kv_plan,
    models,
    perplexity,
    quantize,
    serve,
)

app = typer.Typer(
    name="prolepsis",
    help="An LLM inference engine that predicts its own future: tokens and KV cache.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
kv_app = typer.Typer(help="Save, restore, look into, verify, measure and plan losslessly coded KV caches.")

app.command("demo")(demo.demo)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("pull")(models.pull)
app.command("bench")(bench.bench)
app.command("ppl")(perplexity.ppl)
app.command("quantize")(quantize.quantize)
app.command("calibrate")(calibrate.calibrate_)
app.command("warmup")(models.warmup)
kv_app.command("save")(kv.save)
kv_app.command("load")(kv.load_)
kv_app.command("inspect")(kv.inspect)
kv_app.command("verify")(kv.verify)
kv_app.command("bench")(kv_bench.bench)
kv_app.command("plan")(kv_plan.plan)
app.add_typer(kv_app, name="kv")


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            number = version("prolepsis")
        except PackageNotFoundError:
            number = "(run from its sources, not installed)"
        print(f"prolepsis {number}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _prolepsis(
    context: typer.Context,
    version_: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    _help_if_alone(context)


@kv_app.callback(invoke_without_command=True)
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

"""The commands, by name."""

import typer

from prolepsis.cli import demo, generating, kv, models

app = typer.Typer(
    name="prolepsis",
    help="An LLM inference engine that predicts its own future: tokens and KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
kv_app = typer.Typer(help="Save, restore, look into and verify losslessly coded KV caches.", no_args_is_help=True)

for command in (demo.demo, generating.generate, generating.chat, models.pull, models.bench, models.ppl, models.warmup):
    app.command()(command)
for name, command in (("save", kv.save), ("load", kv.load_), ("inspect", kv.inspect), ("verify", kv.verify)):
    kv_app.command(name)(command)
app.add_typer(kv_app, name="kv")

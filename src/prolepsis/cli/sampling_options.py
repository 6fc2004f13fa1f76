"""Options of the commands that generate."""

import json
from pathlib import Path
from typing import Annotated

import typer

from prolepsis.cli.console import read_text
from prolepsis.engine.grammar import Grammar
from prolepsis.errors import InputError

Temperature = Annotated[float, typer.Option(help="0 always takes the most probable token.")]
TopK = Annotated[int, typer.Option(help="Keep the k most probable tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the most probable tokens up to this total probability.")]
MinP = Annotated[float, typer.Option(help="Keep tokens at least this fraction as probable as the best one.")]
Repetition = Annotated[float, typer.Option(help="Above 1 discourages tokens of the prompt and the answer.")]
Presence = Annotated[float, typer.Option(help="Subtracted from the logit of each token already in the answer.")]
Frequency = Annotated[float, typer.Option(help="Subtracted once for each time a token is in the answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")]
StopToken = Annotated[list[int] | None, typer.Option(help="Token id that ends the answer; may be repeated.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Seed = Annotated[int | None, typer.Option(help="Makes a sampled answer repeatable.")]
Logprobs = Annotated[int | None, typer.Option(help="Report this many most probable tokens at each position (--json).")]


def grammar_option(json_schema: Path | None, regex: str | None) -> Grammar | None:
    """The grammar that --json-schema or --regex asks for. Raises InputError that names the flag."""
    if json_schema is not None and regex is not None:
        raise InputError("give --json-schema or --regex, not both")
    if json_schema is not None:
        text = read_text(json_schema, "--json-schema")
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"--json-schema: {json_schema} is not JSON: {error}") from None
        return Grammar.json_schema(schema, source="--json-schema")
    return None if regex is None else Grammar("regex", regex, source="--regex")

"""Options of the commands that generate."""

from typing import Annotated

import typer

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

"""This server beside its peers under load, and what prefix caching and the store buy in chats.

python benchmarks/serve.py [--peer llama.cpp=PYTHON] [--peer vllm=PYTHON] [--plot FILE.svg] [--json]

Closed loop: 1, 4, 16 and 64 clients ask again as soon as they are answered. Open loop: requests arrive by a Poisson
process. Every prompt is new, some 64 tokens of random words, and every answer has 64 tokens, greedy. Each cell takes
--seconds, that of 64 clients twice as long: what still runs then is broken off, and who has no first token yet counts
with the time waited. TTFT is the time to first token, ITL that between two pieces of text; `tokens/s` are those of
outputs, of all clients together. The servers run one after another, each alone, with the same file and threads; a peer
is started by the Python that --peer names, in whose environment it is installed: llama.cpp is the server of
llama-cpp-python, which runs one request at a time; vLLM reads no GGUF on a CPU, and gets the same weights as bfloat16
(written with the extra `test`). It compiles for minutes when it first meets them in a directory: with --safetensors DIR
they stay, and the next run is quicker.

Chats: some with one system prompt, whose users take turns, so that each chat has left a pool that is too small for all
before it goes on. TTFT is that of turns after the first.
"""

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from measuring import numbers, parser, report
from serving_chats import chat_rows
from serving_load import Client, Told, closed_loop, figures, open_loop
from serving_plot import plot
from serving_servers import PATIENCE_S, Recipe, llama_cpp, ours, running, safetensors_of, vllm

from prolepsis.model.model_file import open_model
from prolepsis.model.pull import DEFAULT_MODEL, resolve

PEERS = ("llama.cpp", "vllm")
_WARM_UP_TOKENS = 4
_FEW = 16  # clients; more take long to have all their first prompts read


class Load:
    """Prompts that are all different, the same for every server."""

    def __init__(self, client: Client, arguments: argparse.Namespace) -> None:
        self._client, self._arguments = client, arguments
        text = (Path(__file__).parents[1] / "src" / "prolepsis" / "data" / "kv-cache-guide.md").read_text()
        self._words = sorted({word for word in text.split() if word.isalpha()})
        self._random = random.Random(0)

    async def ask(self, told: Told) -> None:
        """One request."""
        words = self._random.choices(self._words, k=round(self._arguments.prompt_tokens / 1.2))  # tokens a word
        await self._client.ask(" ".join(words), self._arguments.output_tokens, told)

    async def warm_up(self) -> None:
        """Let the server meet what it will. Raises RuntimeError where it cannot answer."""
        told = Told(time.perf_counter())
        await asyncio.wait_for(self._client.ask("one two three " * 20, _WARM_UP_TOKENS, told), PATIENCE_S)
        if told.error:
            raise RuntimeError(f"it cannot answer: {told.error}")

    async def rows(self) -> list[dict[str, Any]]:
        """Every cell of one server."""
        arguments, rows = self._arguments, []
        await self.warm_up()
        for clients in arguments.clients:
            seconds = arguments.seconds * (1 if clients <= _FEW else 2)
            row = await self._cell(f"{clients} clients", closed_loop(self.ask, clients, seconds))
            rows.append(row)
        for rate in arguments.rates:
            row = await self._cell(f"{rate}/s arrive", open_loop(self.ask, rate, arguments.seconds, seed=0))
            rows.append(row)
        return rows

    async def _cell(self, name: str, work: Any) -> dict[str, Any]:
        begin = time.perf_counter()
        all_told, _ = found = await work
        errors = [told.error for told in all_told if told.error]
        if errors:
            print(f"  {len(errors)} failed: {errors[0]}", file=sys.stderr)
        await self.warm_up()  # answered once the server is done with those who have left
        return {"load": name, **figures(all_told, begin, found[1])}


def recipes(arguments: argparse.Namespace, model: str, stack: ExitStack) -> Iterator[Recipe]:
    """Every server that takes part, ours first."""
    yield ours(model, arguments.threads, *arguments.option)
    yield ours(model, arguments.threads, "--precision", "fast", *arguments.option, name="prolepsis, fast")
    peers = dict(arguments.peer)
    if "llama.cpp" in peers:
        eos_ids = sorted(open_model(Path(model)).tokenizer.eos_ids)
        yield llama_cpp(peers["llama.cpp"], model, arguments.threads, eos_ids)
    if "vllm" in peers:
        directory = arguments.safetensors or stack.enter_context(tempfile.TemporaryDirectory(prefix="prolepsis-"))
        if not (Path(directory) / "config.json").exists():
            safetensors_of(model, Path(directory))
        yield vllm(peers["vllm"], directory, arguments.threads)


def load_rows(arguments: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """Closed and open loop, of every server."""
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        for recipe in recipes(arguments, model, stack):
            print(recipe.name, file=sys.stderr)
            try:
                with running(recipe) as client:
                    found = asyncio.run(Load(client, arguments).rows())
            except (RuntimeError, TimeoutError) as error:
                if recipe.name.startswith("prolepsis"):
                    raise
                print(f"left out: {error}", file=sys.stderr)
                continue
            rows += [{"server": recipe.name, **row} for row in found]
    return rows


def main() -> None:
    """Measure, print and draw. Servers are ended too where SIGTERM ends this."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments = flags().parse_args()
    model = str(resolve(arguments.model))
    rows = load_rows(arguments, model)
    chats = chat_rows(arguments, model) if arguments.chats else []
    if arguments.plot:
        plot(rows, chats, arguments.plot)
    if arguments.json:
        report("servers under load", rows, arguments, model=arguments.model, chats=chats)
        return
    report("servers under load", rows, arguments, model=arguments.model)
    if chats:
        report("chats with one system prompt", chats, arguments)


def flags() -> argparse.ArgumentParser:
    """The command line."""
    found = parser(__doc__.splitlines()[0])
    found.set_defaults(runs=1)
    found.add_argument("--model", default=DEFAULT_MODEL)
    found.add_argument("--peer", type=_peer, action="append", default=[], metavar="NAME=PYTHON", help="or " + PEERS[1])
    found.add_argument(
        "--safetensors", metavar="DIR", help="keeps vLLM's weights, by whose path it finds what it compiled"
    )
    found.add_argument("--option", action="append", default=[], help="for our server, e.g. --option=--draft=ngram")
    found.add_argument("--clients", type=numbers, default=[1, 4, 16, 64], metavar="N,N,...")
    found.add_argument("--rates", type=_rates, default=[1.0, 2.0, 4.0], metavar="R,R,...", help="requests a second")
    found.add_argument("--seconds", type=float, default=8.0, help="of each cell")
    found.add_argument("--prompt-tokens", type=int, default=64)
    found.add_argument("--output-tokens", type=int, default=64)
    found.add_argument("--chats", type=int, default=8, help="0 leaves them out")
    found.add_argument("--turns", type=int, default=4)
    found.add_argument("--plot", metavar="FILE", help="draw the figures too (.svg or .png; needs matplotlib)")
    return found


def _peer(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if name not in PEERS or not path:
        raise argparse.ArgumentTypeError(f"expected NAME=PYTHON with one of {', '.join(PEERS)}")
    return name, path


def _rates(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


if __name__ == "__main__":
    main()

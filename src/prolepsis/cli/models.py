"""`pull` and `warmup`: commands about a model and this machine."""

from prolepsis.cli.console import ModelArgument, ThreadsOption, bar, load, note
from prolepsis.engine.warm_up import warm_up
from prolepsis.model.pull import DEFAULT_MODEL, resolve


def pull(model: ModelArgument = DEFAULT_MODEL) -> None:
    """Fetch a model into the user's cache, if it is not there, and print its path."""
    with bar(f"fetching {model}", unit="bytes") as on_download:
        print(resolve(model, progress=on_download))


def warmup(model: ModelArgument = DEFAULT_MODEL, threads: ThreadsOption = None) -> None:
    """Compile every kernel for this CPU but those of --kv-evict, so that no later command has to."""
    llm = load(model, threads=threads)
    warm_up(llm)
    note("all kernels are compiled")

"""Prefill and decode speed of this engine and of each peer that is installed, at several lengths of prompt.

python benchmarks/decode_prefill.py [--model MODEL] [--prompt-tokens 32,512,1500,4000] [--json]

The same file, tokens and threads for all; each engine runs in a process of its own. llama.cpp takes part where
llama-cpp-python is installed: `pip install '.[engines]'`. The columns `prefill` and `decode` are tokens a second.
"""

import sys

from measuring import numbers, parser, report

from prolepsis.bench.engines import installed
from prolepsis.bench.worker import Job, run_apart
from prolepsis.model.gguf_file import GGUFFile
from prolepsis.model.pull import DEFAULT_MODEL, resolve


def main() -> None:
    """Measure every engine at every length."""
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--model", default=DEFAULT_MODEL)
    flags.add_argument("--prompt-tokens", type=numbers, default=[32, 512, 1500, 4000], metavar="N,N,...")
    flags.add_argument("--new-tokens", type=int, default=64)
    arguments = flags.parse_args()
    path = resolve(arguments.model)
    vocabulary = GGUFFile.open(path).tensors["token_embd.weight"].shape[0]
    engines = installed()
    if "llama.cpp" not in engines:
        print("llama-cpp-python is not installed: nothing to compare with", file=sys.stderr)
    rows = []
    for length in arguments.prompt_tokens:
        # Any tokens will do, as long as they differ; speed does not depend on which.
        prompt = [(7919 * i + 13) % vocabulary for i in range(length)]
        new = [(104729 * i + 11) % vocabulary for i in range(arguments.new_tokens)]
        for engine in engines:
            job = Job(engine, str(path), arguments.threads, prompt, new, arguments.runs)
            speed = run_apart(job, lambda: None)
            rows.append(
                {
                    "engine": engine,
                    "prompt": length,
                    "prefill": speed.prefill_tok_s,
                    "decode": speed.decode_tok_s,
                    "peak RSS, MB": speed.rss_mb,
                }
            )
    file_mb = round(path.stat().st_size / 1e6, 1)
    report("prefill and decode, tokens/s", rows, arguments, model=arguments.model, file_mb=file_mb)


if __name__ == "__main__":
    main()

"""How long it takes until something happens: importing, loading, the first token warm, and the first token ever.

python benchmarks/startup.py [--model MODEL] [--no-cold] [--json]

Each figure is the whole life of a new process, interpreter included. `first token` is that after a prompt of 16 tokens;
`cold` starts with an empty cache of compiled kernels and compiles all of them.
"""

import os
import subprocess
import sys
import tempfile
import time
from statistics import median

from measuring import parser, report

from prolepsis.model.pull import DEFAULT_MODEL, resolve

FIRST_TOKEN = """
from prolepsis import LLM, SamplingParams
llm = LLM({model!r})
llm.generate(list(range(100, 116)), SamplingParams(temperature=0, max_tokens=1))
"""


def seconds_of(code: str, **environment: str) -> float:
    """Wall-clock time of a new interpreter that runs `code`."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | environment)
    return time.perf_counter() - start


def main() -> None:
    """Measure each start."""
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--model", default=DEFAULT_MODEL)
    flags.add_argument("--no-cold", action="store_true", help="leave out the start that compiles, about half a minute")
    arguments = flags.parse_args()
    first_token = FIRST_TOKEN.format(model=str(resolve(arguments.model)))
    starts = {
        "interpreter alone": "pass",
        "import prolepsis": "import prolepsis",
        "import the engine": "from prolepsis import LLM",
        "load the model": first_token.rpartition("llm.generate")[0],
        "first token, warm": first_token,
    }
    rows = []
    environment = {"PROLEPSIS_THREADS": str(arguments.threads)}
    seconds_of(first_token, **environment)  # compiles what is missing, and reads the file into memory
    for name, code in starts.items():
        rows.append({"start": name, "s": median(seconds_of(code, **environment) for _ in range(arguments.runs))})
    if not arguments.no_cold:
        with tempfile.TemporaryDirectory() as empty:
            rows.append(
                {"start": "first token, cold", "s": seconds_of(first_token, **environment, NUMBA_CACHE_DIR=empty)}
            )
    report("start", rows, arguments, model=arguments.model)


if __name__ == "__main__":
    main()

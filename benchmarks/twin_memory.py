"""What coding with a twin takes in memory and time, by the length of the session.

Saves and restores sessions of growing length, each in a process of its own, and tells the most memory that the process
had beyond what it had when model, cache and profile were there and all kernels had run once.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import measuring

from prolepsis import LLM
from prolepsis.engine.profile_store import keep
from prolepsis.engine.profiles import calibrate, collect, kv_of_texts, load_profile
from prolepsis.engine.session import load_session, save_session

_VARIANT = "twin-int8"


def resident(which: str) -> float:
    """MB in memory: "VmRSS", now, or "VmHWM", the most since the last `forget`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) / 1e3


def forget() -> None:
    """Begin to look for the most memory anew."""
    Path("/proc/self/clear_refs").write_text("5")


def one(model: str, profile_path: str, path: str, tokens: int, saves: bool) -> dict[str, float]:
    """Save a session of so many tokens, or restore it."""
    llm = LLM(model)
    profile = load_profile(profile_path, llm, "bf16")
    ids = llm.tokenizer.encode("\n\n".join(topics.values()))[:tokens]
    sequence = llm.runner.new_sequence(ids)
    llm.runner.prefill(sequence)  # its blocks are there before the clock starts, for the restored session too
    short = llm.runner.new_sequence(ids[:40])
    llm.runner.prefill(short)
    save_session(path + ".warm", llm, short, profile=profile)
    load_session(path + ".warm", llm, profile=profile).sequence.release()
    if not saves:
        sequence.release()
    forget()
    before, start = resident("VmRSS"), time.perf_counter()
    if saves:
        save_session(path, llm, sequence, profile=profile)
    else:
        load_session(path, llm, profile=profile).sequence.release()
    return {"seconds": time.perf_counter() - start, "MB": resident("VmHWM") - before}


def main() -> None:
    arguments = measuring.parser(__doc__)
    arguments.add_argument("--model", default="smollm2:135m")
    arguments.add_argument("--tokens", type=measuring.numbers, default=[64, 640, 6400])
    arguments.add_argument("--child", nargs=5, help="of the script itself")
    arguments = arguments.parse_args()
    if arguments.child:
        model, profile, path, tokens, what = arguments.child
        print(json.dumps(one(model, profile, path, int(tokens), what == "save")))
        return
    llm = LLM(arguments.model)
    ids = llm.tokenizer.encode("\n\n".join(topics.values()))[-2048:]
    with collect(llm, kv_of_texts(llm, [ids], "bf16", 2048, 2048), "bf16", 2048) as sample:
        profile = keep(calibrate(llm, sample, _VARIANT))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        for tokens in arguments.tokens:
            row: dict[str, Any] = {"tokens": tokens, "KV cache MB": tokens * llm.kv_cache.bytes_per_token / 1e6}
            for what in ("save", "restore"):
                command = [sys.executable, __file__, "--child", arguments.model, str(profile)]
                command += [str(Path(directory) / f"{tokens}.pkv"), str(tokens), what]
                outcome = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
                row |= {f"{what} s": outcome["seconds"], f"{what} MB": outcome["MB"]}
            rows.append(row)
    measuring.report(f"a session coded with {_VARIANT}, {arguments.model}", rows, arguments)


if __name__ == "__main__":
    main()

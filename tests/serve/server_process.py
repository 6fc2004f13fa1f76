"""A server in a process of its own, which is always ended again."""

import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
from command import COMMAND, environment

_PATIENCE_S = 60.0


class ServerProcess:
    """`prolepsis serve` on a free port. What it says is kept in `said`."""

    def __init__(self, model: Path, *flags: str, command: Sequence[str] = COMMAND) -> None:
        self._process = subprocess.Popen(
            [*command, "serve", str(model), "--port", "0", "--threads", "1", *flags],
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said = ""
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        """Where it listens, once it does."""
        return self.await_line(r"listening on (http://\S+?),")[1]

    def await_ready(self) -> Self:
        """Wait until the model is loaded. If that fails, the process is ended: nobody else has it."""
        try:
            self.await_line("ready after")
        except BaseException:
            self._end()
            raise
        return self

    def await_line(self, pattern: str) -> re.Match[str]:
        """Wait until it says what matches."""
        with self._news:
            assert self._news.wait_for(lambda: re.search(pattern, self.said) or self._ended, _PATIENCE_S), self.said
            match = re.search(pattern, self.said)
            assert match, self.said
            return match

    def signal_until_it_ends(self, signum: signal.Signals) -> int:
        """Send it that signal again and again. Its exit code."""
        while self._process.poll() is None:
            self.signal(signum)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.1)
        return self.wait()

    def signal(self, signum: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(signum)

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        code = self._process.wait(_PATIENCE_S)
        self._reader.join(_PATIENCE_S)
        return code

    @contextmanager
    def streaming(self, **body: object) -> Iterator[Iterator[str]]:
        """The lines of a streamed completion, the first of which is there already."""
        body = {"prompt": "Once", "stream": True, "ignore_eos": True, "seed": 1, **body}
        with (
            httpx.Client(timeout=_PATIENCE_S) as client,
            client.stream("POST", f"{self.url}/v1/completions", json=body) as answer,
        ):
            assert answer.status_code == 200
            lines = (line for line in answer.iter_lines() if line)
            assert next(lines).startswith("data: {")
            yield lines

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.wait()

    @property
    def _ended(self) -> bool:
        return not self._reader.is_alive()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in stream:
                with self._news:
                    self.said += line
                    self._news.notify_all()

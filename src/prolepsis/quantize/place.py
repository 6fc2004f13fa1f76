"""Where a job's output goes: what may be replaced there, and the one rename that gives it its name."""

import os
import secrets
import shutil
from pathlib import Path

from prolepsis.errors import InputError
from prolepsis.model.checkpoint import PICKLES
from prolepsis.model.gguf_parser import MAGIC
from prolepsis.model.model_file import GGUFModel, ModelFile
from prolepsis.quantize.original import MODEL_FILES


class Place:
    """The place of the output of a job.

    path: absolute, with links followed, so that what a link names is replaced and not the link. work: the directory of
    the work in progress, beside it.
    """

    def __init__(self, output: Path, original: ModelFile, is_file: bool, force: bool) -> None:
        """output: as the user gave it; original: what is quantised, never replaced; is_file: a GGUF file is made, else
        a directory; force: whether an older model may be replaced."""
        self.path = Path(os.path.realpath(output))
        self.work = self.path.with_name(f"{self.path.name}.part") if self.path.name else self.path
        self._output, self._is_file, self._force = output, is_file, force
        files = original.file.files if isinstance(original, GGUFModel) else [original.path]
        self._sources = [file.resolve() for file in files]

    def check(self) -> None:
        """Raise InputError where the output cannot go there."""
        self._check_sources()
        if self._is_file and self.path.suffix in (".safetensors", *PICKLES):
            raise self._refused(f": a name in {self.path.suffix} says another format than GGUF")
        parent = self.path.parent
        if not parent.is_dir():
            raise self._refused(f": there is no directory {parent}")
        if not os.access(parent, os.W_OK):
            raise self._refused(f": the directory {parent} is write-protected")
        if not self.path.exists():
            return
        if self._is_file and self.path.is_dir():
            raise self._refused(" is a directory; a GGUF file is made, so name a file")
        if not self._is_file and not self.path.is_dir():
            raise self._refused(" is a file; a directory is made, so give another place, or --format gguf")
        if not self._force:
            raise self._refused(" exists; give another place, or --force to replace it")
        self._check_content()

    def take(self, made: Path) -> int:
        """Give `made` its name, in place of an older model if there is one; returns its size in bytes.

        Raises InputError where something else has come there since the job began.
        """
        self.check()
        files = list(made.iterdir()) if made.is_dir() else [made]
        nbytes = sum(file.stat().st_size for file in files)
        old = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.old")
        if self.path.is_dir():
            self.path.rename(old)
        made.rename(self.path)
        shutil.rmtree(old, ignore_errors=True)
        return nbytes

    def _check_sources(self) -> None:
        for source in self._sources:
            if self.path == source:
                raise self._refused(" is the model that is quantised; give another place")
            if self.path in source.parents:
                raise self._refused(" holds the model that is quantised; give another place")
            if source in self.path.parents:
                raise self._refused(" lies in the model that is quantised; give another place")

    def _check_content(self) -> None:
        """Only a model is replaced."""
        if self._is_file:
            if not (self.path.is_file() and os.access(self.path, os.R_OK)):
                raise self._refused(" is not a file that can be read, and will not be replaced")
            with self.path.open("rb") as file:
                found = file.read(len(MAGIC))
            if found not in (b"", MAGIC):
                raise self._refused(" is no GGUF file, and will not be replaced")
            return
        entries = sorted(self.path.iterdir())
        for entry in entries:
            if not entry.is_file() or not (entry.name in MODEL_FILES or entry.name.endswith(".safetensors")):
                raise self._refused(f" holds {entry.name}, which is no file of a model, and will not be replaced")
        if entries and self.path / "config.json" not in entries:
            raise self._refused(" is a directory that holds no model, and will not be replaced")

    def _refused(self, why: str) -> InputError:
        return InputError(f"-o {self._output}{why}")

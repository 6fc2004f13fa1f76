"""GGUF files and checkpoints from the Hugging Face hub, through its own client and into its own cache."""

from __future__ import annotations

import re
from pathlib import Path

from prolepsis.errors import InputError, ProlepsisError
from prolepsis.model.checkpoint import CONFIG, files_of

_LISTED = 40
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.IGNORECASE)
_MAX_PARTS = 1_000
_TENSORS = ".safetensors"


def fetch(name: str) -> Path:
    """The file for "owner/repo", "owner/repo:QUANT" or "owner/repo/file.gguf", downloaded if need be; the directory of
    a checkpoint for "owner/repo" without a GGUF file, and for "owner/repo/file.safetensors".

    Of a model of several parts all are, and the first is returned. Of a checkpoint, only what `Checkpoint` reads is
    fetched, all of one commit. Once downloaded, a checkpoint and a file named in full are found without a connection.
    Progress goes to standard error.

    Raises:
        InputError: no such repository or file, or several files fit.
        ProlepsisError: the hub cannot be reached or refuses.
    """
    from huggingface_hub import hf_hub_download, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, RepositoryNotFoundError

    owner, rest = name.split("/", 1)
    repo, _, file = rest.partition("/")
    repo, _, quant = repo.partition(":")
    repo = f"{owner}/{repo}"
    try:
        if file and not file.endswith(_TENSORS):
            cached = [try_to_load_from_cache(repo, part) for part in parts(file)]
            if all(isinstance(part, str) for part in cached):
                return Path(str(cached[0]))
        else:
            files = _listed(repo, file or CONFIG)
            if files is None:
                return Path(snapshot_download(repo, local_files_only=True)) / file
            if file or (not quant and CONFIG in files and not any(each.lower().endswith(".gguf") for each in files)):
                return _fetch_checkpoint(repo, files, file)
            file = choose(repo, files, quant)
        fetched = [hf_hub_download(repo, part) for part in parts(file)]
        return Path(fetched[0])
    except InputError:
        raise
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise InputError(f"{name}: no such repository on the Hugging Face hub, or it is private") from error
    except EntryNotFoundError as error:
        raise _missing(name, error) from error
    except Exception as error:
        # The client raises errors of its HTTP library, of the system and its own; to the user they are one.
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ProlepsisError(f"{name}: cannot be fetched from the Hugging Face hub: {first_line}") from error


def _listed(repo: str, file: str) -> list[str] | None:
    """Names of the files in a repository; None where the hub cannot be asked, but `file` of a checkpoint is cached."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        return HfApi().list_repo_files(repo)
    except Exception:
        if isinstance(try_to_load_from_cache(repo, file), str):
            return None
        raise


def _fetch_checkpoint(repo: str, files: list[str], file: str) -> Path:
    """Download what a checkpoint needs, the safetensors file `file` in particular if that is not empty."""
    from huggingface_hub import snapshot_download

    directory = file[: file.rfind("/") + 1]
    beside = [each.removeprefix(directory) for each in files if each.startswith(directory)]
    needed = files_of([each for each in beside if "/" not in each], file.removeprefix(directory))
    if not any(each.endswith(_TENSORS) for each in needed):
        raise InputError(f"{repo}: the repository holds neither a GGUF file nor a checkpoint in safetensors")
    return Path(snapshot_download(repo, allow_patterns=[directory + each for each in needed])) / file


def _missing(name: str, error: Exception) -> ProlepsisError:
    """A file the repository lacks, or one the local cache lacks while there is no connection."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    if isinstance(error, LocalEntryNotFoundError):
        return ProlepsisError(f"{name}: the Hugging Face hub cannot be reached, and the file is not in its cache")
    return InputError(f"{name}: the repository has no such file")


def parts(file: str) -> list[str]:
    """All parts of the model that `file` is one part of, by llama.cpp's names for them; else just `file`."""
    match = _PART.search(file)
    if match is None:
        return [file]
    count = int(match[1])
    if not 1 <= count <= _MAX_PARTS:
        raise InputError(f"{file}: names {count} parts, 1 to {_MAX_PARTS} were expected")
    return [f"{file[: match.start()]}-{i + 1:05d}-of-{match[1]}.gguf" for i in range(count)]


def choose(repo: str, files: list[str], quant: str) -> str:
    """The one GGUF among `files` whose name ends in `quant`, or the only one if `quant` is empty. Of a model of several
    parts it is the first of them.

    Raises:
        InputError: none fits, or several do; the message lists them and says how to choose.
    """
    found = sorted(file for file in files if file.lower().endswith(".gguf"))
    candidates = [file for file in found if file == parts(file)[0]]
    if not candidates:
        raise InputError(f"{repo}: the repository holds no GGUF file")
    names = {file: _PART.sub(".gguf", file) for file in candidates}
    fitting = [
        file
        for file in candidates
        if not quant or re.search(rf"(^|[-._/]){re.escape(quant)}\.gguf$", names[file], re.I)
    ]
    if len(fitting) == 1:
        return fitting[0]
    listed = "\n  ".join(candidates[:_LISTED] + ["..."] * (len(candidates) > _LISTED))
    problem = f"{len(fitting)} GGUF files fit" if fitting else f"no GGUF file fits {quant}"
    raise InputError(f"{repo}: {problem}; choose one with {repo}:QUANT or {repo}/FILE out of:\n  {listed}")

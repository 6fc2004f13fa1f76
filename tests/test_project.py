"""The project as a whole: style, types, direction of imports, what an import loads, documents that agree with it."""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "prolepsis"
DOCUMENTS = ("README*.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "tests/data/*.md")
TEST_COMMAND = "pip install '.[test]' && pytest"

needs_sources = pytest.mark.skipif(
    not (SOURCES.is_dir() and (ROOT / "pyproject.toml").is_file()),
    reason="the source tree is not beside the tests",
)


def run(*command: str | Path) -> str:
    """Run at the root, importing from the sources even where Prolepsis is installed too; fails with what was said."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    outcome = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert outcome.returncode == 0, f"{' '.join(map(str, command))}\n{outcome.stdout}{outcome.stderr}"
    return outcome.stdout


@needs_sources
def test_ruff_finds_nothing() -> None:
    run(sys.executable, "-m", "ruff", "check", ".")


@needs_sources
def test_every_file_is_formatted() -> None:
    run(sys.executable, "-m", "ruff", "format", "--check", ".")


@needs_sources
def test_types_are_sound() -> None:
    run(sys.executable, "-m", "mypy")


@needs_sources
def test_rooms_import_only_what_lies_below_them() -> None:
    run(Path(sysconfig.get_path("scripts")) / "lint-imports", "--no-cache")


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `statement`."""
    code = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(outcome.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = {"numpy", "numba", "llvmlite", "gguf", "tokenizers", "transformers", "torch", "huggingface_hub", "rich"}
    loaded = loaded_by("import prolepsis")
    assert "prolepsis" in loaded
    assert not loaded & heavy


def test_the_version_is_told_without_the_engine() -> None:
    assert not loaded_by("from prolepsis.cli.app import app_for\napp_for(['--version'])") & {"numpy", "numba"}


def test_the_engine_runs_without_what_only_tests_and_downloads_need() -> None:
    loaded = loaded_by("from prolepsis import LLM, SamplingParams")
    assert "numba" in loaded
    assert not loaded & {"torch", "transformers", "huggingface_hub", "typer", "rich"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    import prolepsis

    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        prolepsis.Nothing  # noqa: B018


@needs_sources
def test_the_changelog_begins_with_this_version() -> None:
    version = pyproject()["project"]["version"]
    newest = re.search(r"^## (\d+\.\d+\.\d+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == version


@needs_sources
def test_continuous_integration_runs_what_the_readme_says() -> None:
    for file in ("README.md", ".ci/run"):
        assert TEST_COMMAND in (ROOT / file).read_text("utf-8").splitlines(), file


@needs_sources
def test_every_dependency_is_explained() -> None:
    _, _, section = (ROOT / "docs" / "design.md").read_text("utf-8").partition("\n## Dependencies\n")
    explained = set(re.findall(r"^- \*\*`([\w.-]+)`\*\*", section, re.MULTILINE))
    project = pyproject()["project"]
    required = [project["dependencies"], *project["optional-dependencies"].values()]
    assert explained == {re.match(r"[\w.-]+", line)[0] for lines in required for line in lines}


def documents() -> list[Path]:
    return sorted(path for pattern in DOCUMENTS for path in ROOT.glob(pattern))


@needs_sources
@pytest.mark.parametrize("document", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text("utf-8")):
        if not target.startswith(("http://", "https://")):
            name, _, anchor = target.partition("#")
            linked = document.parent / name if name else document
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target


def anchors(document: Path) -> set[str]:
    """The anchors GitHub gives to a document's headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


READMES = (ROOT / "README.md", ROOT / "README.ko.md")


def sections(document: Path) -> list[str]:
    """What stands between headings, and the level of the heading before each part."""
    parts = re.split(r"^(#+) .+$", without_code(document), flags=re.MULTILINE)
    return [level + text for level, text in zip(["", *parts[1::2]], parts[::2], strict=True)]


def without_code(document: Path) -> str:
    return re.sub(r"^```.*?^```$", "(code)", document.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


@needs_sources
def test_both_readmes_have_the_same_sections_figures_links_and_tables() -> None:
    english, korean = map(sections, READMES)
    korean = [re.sub(r"(\d+)억 ([\d,]+)만", in_millions, part) for part in korean]
    assert [re.match("#*", part)[0] for part in english] == [re.match("#*", part)[0] for part in korean]
    for ours, theirs in zip(english, korean, strict=True):
        for kind in (r"\d(?:[\d,.]*\d)?", r"`[^`]+`", r"\]\((?!README)[^)]+\)", r"\(code\)"):
            found, wanted = (sorted(re.findall(kind, part)) for part in (theirs, ours))
            assert found == wanted, theirs[:80]
        rows = [[line.count("|") for line in part.splitlines() if line.startswith("|")] for part in (ours, theirs)]
        assert rows[0] == rows[1], theirs[:80]
        assert table_figures(ours) == table_figures(theirs), theirs[:80]


def in_millions(found: re.Match[str]) -> str:
    """Korean counts by ten thousands, and hundreds of millions."""
    return str(int(found[1]) * 100 + int(found[2].replace(",", "")) // 100)


def table_figures(section: str) -> list[list[str]]:
    """The figures of each row, in order."""
    return [re.findall(r"\d[\d,.]*", line) for line in section.splitlines() if line.startswith("|")]


@needs_sources
def test_both_readmes_have_the_same_code() -> None:
    blocks = [re.findall(r"^```.*?^```$", path.read_text("utf-8"), re.MULTILINE | re.DOTALL) for path in READMES]
    english, korean = ([re.sub(r"  # .*", "", block) for block in found] for found in blocks)
    assert english == korean
    assert len(english) > 8


@needs_sources
def test_each_readme_leads_to_the_other() -> None:
    for here, there in (READMES, READMES[::-1]):
        assert f"]({there.name})" in here.read_text("utf-8")


@needs_sources
def test_no_file_names_a_place_on_someones_machine() -> None:
    place = re.compile(r"(?<![\w.$}:/])(/(home|Users|root|work|opt)/\w|[A-Z]:\\Users\\)")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if place.search(line)
    ]
    assert not found


def texts() -> Iterator[tuple[Path, str]]:
    """Every text file of the project, and what it holds."""
    rooms = [ROOT / name for name in (".ci", "benchmarks", "deploy", "docs", "examples", "src", "tests")]
    for path in [*ROOT.glob("*.*"), *(path for room in rooms for path in room.rglob("*"))]:
        if path.is_file() and "__pycache__" not in path.parts:
            try:
                yield path, path.read_text("utf-8")
            except UnicodeDecodeError:
                continue


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))

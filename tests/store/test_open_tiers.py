"""Tiers from words."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
from tier_samples import key

from prolepsis.errors import InputError
from prolepsis.store import DiskTier, open_tiers


def test_every_kind_is_opened(tmp_path: Path) -> None:
    specs = ["memory:1MiB", f"disk:{tmp_path}/disk:2MiB", "redis://:secret@127.0.0.1:1/0", f"file://{tmp_path}/remote"]
    tiers = open_tiers(specs)
    statistics = tiers.statistics()
    assert [tier.kind for tier in statistics] == ["memory", "disk", "redis", "remote"]
    assert [tier.budget for tier in statistics] == [1 << 20, 2 << 20, None, None]
    assert not any("secret" in tier.name for tier in statistics)
    stored = tiers.put(key(1), b"abc", pinned=True)
    assert stored.pinned
    assert stored.tiers == ("memory", f"disk:{tmp_path}/disk", f"file://{tmp_path}/remote")
    tiers.close()
    again = open_tiers(specs[1:])
    assert again.get(key(1)).tier == f"disk:{tmp_path}/disk"  # type: ignore[union-attr]
    again.close()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "write memory:SIZE"),
        ("memory", "write memory:SIZE"),
        ("memory:", "the size '' is not a size"),
        ("memory:much", "'memory:much': the size 'much' is not a size"),
        ("disk:/somewhere", "write disk:DIRECTORY:SIZE"),
        ("disk:1GiB", "write disk:DIRECTORY:SIZE"),
        ("/var/lib/prolepsis", "write memory:SIZE"),
        ("redis:localhost", "write memory:SIZE"),
        ("redis://user:secret@host:port/0", "'redis://host:port/0' is no tier of the store: Port"),
        ("redis://host/name", "'redis://host/name' is no tier of the store: .*number"),
        ("nosuch://place", "'nosuch://place' is no tier of the store: Protocol not known"),
        ("redis://[", "is no tier of the store"),
        ("redis://me:secret/SECRET@host/0", "'redis://host/0' is no tier of the store: .* %2F"),
        ("redis://me:secret#SECRET@host", "'redis://...' is no tier of the store: .* %23"),
        ("redis://me:secret?SECRET@host", "'redis://...' is no tier of the store: .* %3F"),
        ("simplecache::s3://key:secret@bucket/prefix", "'simplecache::s3://bucket/prefix' is no tier"),
        ("s3://key:secret/SECRET@bucket/prefix", "'s3://bucket/prefix' is no tier of the store: credentials"),
        ("reference://", "'reference://' is no tier of the store: .*argument"),
    ],
)
def test_words_that_name_no_tier(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        open_tiers([spec])
    assert "secret" not in str(caught.value).lower()


def test_a_directory_may_have_any_name(tmp_path: Path) -> None:
    tiers = open_tiers([f"file://{tmp_path}/{name}/a@b" for name in "xy"])
    assert [tier.name for tier in tiers.statistics()] == [f"file://{tmp_path}/{name}/a@b" for name in "xy"]
    tiers.close()


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(import_module("fsspec.registry")._registry, "s3", raising=False)
    with pytest.raises(InputError, match=r"s3://bucket/prefix.*s3fs.*pip install 'prolepsis\[s3\]'"):
        open_tiers(["s3://bucket/prefix"])


def test_a_tier_twice_is_refused_and_what_was_opened_is_closed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="memory twice"):
        open_tiers([f"disk:{tmp_path}/disk:1MiB", "memory:1MiB", "memory:2MiB"])
    with pytest.raises(InputError, match="in use by another process"):
        open_tiers([f"disk:{tmp_path}/disk:1MiB", f"disk:{tmp_path}/disk:2MiB"])
    DiskTier(tmp_path / "disk", 1 << 20).close()

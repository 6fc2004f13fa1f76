"""API keys: who gets in, and what is told of keys."""

import os
from pathlib import Path

import pytest
from asgi_client import Echo, ask, error_of

from prolepsis.errors import InputError
from prolepsis.serve.auth import Auth, Tenant, is_readable_by_others, owner_of, read_keys
from prolepsis.serve.options import ServeOptions

KEYS = ("first-key-0123456789", "second-key-0123456789")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": f"Bearer {KEYS[0][:-1]}"},
        {"authorization": f"Bearer {KEYS[0]}x"},
        {"authorization": f"Bearer {KEYS[0]} {KEYS[1]}"},
        {"authorization": f"Basic {KEYS[0]}"},
        {"authorization": KEYS[0]},
        {"authorization": f"Bearer {owner_of(KEYS[0])}"},
        {"authorization": b"Bearer \xff\xfe"},
        {"x-api-key": KEYS[0]},
    ],
)
def test_without_a_key_nothing_is_reached(headers: dict[str, str]) -> None:
    inner = Echo()
    answer = ask(Auth(inner, KEYS), "POST", "/v1/completions", headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert error_of(answer)["code"] == "invalid_api_key"
    assert inner.calls == 0


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_every_key_gets_in_and_is_a_tenant_of_its_own(key: str, scheme: str) -> None:
    inner = Echo()
    assert ask(Auth(inner, KEYS), "GET", "/v1/models", headers={"authorization": f"{scheme} {key}"}).status_code == 200
    assert inner.scope["state"]["tenant"] == Tenant(owner_of(key))


@pytest.mark.parametrize("path", ["/", "/health", "/version", "/metrics", "/web/chat.js"])
def test_some_paths_are_open(path: str) -> None:
    assert ask(Auth(Echo(), KEYS), "GET", path).status_code == 200


@pytest.mark.parametrize("path", ["/v1", "/v1/engine", "/tokenize", "/web", "/health/", "/%2e/health", "/x"])
def test_whatever_else_there_is_is_closed(path: str) -> None:
    assert ask(Auth(Echo(), KEYS), "GET", path).status_code == 401


def test_a_server_without_keys_is_open_and_has_one_tenant() -> None:
    inner = Echo()
    assert ask(Auth(inner, ()), "GET", "/v1/models", headers={"authorization": "Bearer x"}).status_code == 200
    assert inner.scope["state"]["tenant"] == Tenant("")


def test_salts_keep_tenants_apart() -> None:
    tenants = [Tenant(owner_of(key)) for key in KEYS]
    salts = {tenant.cache_salt(wanted) for tenant in tenants for wanted in ("", "a", "b", "\ud800")}
    assert len(salts) == 8
    assert tenants[0].cache_salt("a") == Tenant(owner_of(KEYS[0])).cache_salt("a")
    assert not any(key in salt or owner_of(key) in salt for key in KEYS for salt in salts)
    assert Tenant().cache_salt("a") == "a"


def test_keys_come_from_flags_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# of the team\n\n  {KEYS[1]}  \n{KEYS[0]}\n")
    monkeypatch.setenv("PROLEPSIS_API_KEY", "from-the-environment")
    assert read_keys([KEYS[0]], file) == (*KEYS, "from-the-environment")
    file.chmod(0o600)
    assert not is_readable_by_others(file)
    for mode in (0o644, 0o640, 0o604):
        file.chmod(mode)
        assert is_readable_by_others(file)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(file.parent))
    assert is_readable_by_others(file)
    file.chmod(0o440)
    assert not is_readable_by_others(file)


@pytest.mark.parametrize("key", ["", "short", "with space inside", "tab\tinside0", "ünïcode-key-0", "x" * 513])
def test_keys_that_no_client_could_send_are_refused_and_not_told(key: str) -> None:
    with pytest.raises(InputError, match="--api-key: an API key has") as caught:
        read_keys([key], None)
    assert key == "" or key not in str(caught.value)


def test_a_key_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--api-key-file: .*missing cannot be read: No such file"):
        read_keys([], tmp_path / "missing")
    (tmp_path / "binary").write_bytes(os.urandom(8) + b"\xff")
    with pytest.raises(InputError, match="it is not ASCII text"):
        read_keys([], tmp_path / "binary")


def test_options_do_not_show_keys() -> None:
    assert KEYS[0] not in repr(ServeOptions(model="m", api_keys=KEYS))

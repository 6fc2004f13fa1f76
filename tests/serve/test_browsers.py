"""What a page of another site can have a browser do: nothing."""

from collections.abc import Sequence

import pytest
from asgi_client import Echo, ask, error_of

from prolepsis.serve.browsers import HostCheck, SecurityHeaders, is_loopback, with_cors

LOCAL = ["localhost", "localhost:8000", "LOCALHOST", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:8000"]
FOREIGN = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", "[::2]", "[", "", "a:b:c"]


@pytest.mark.parametrize("host", LOCAL)
def test_a_local_server_goes_by_local_names(host: str) -> None:
    assert ask(_check(), "GET", "/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_and_by_no_others(host: str) -> None:
    answer = ask(_check(), "GET", "/", headers={"host": host})
    assert answer.status_code == 403
    assert "--allowed-host" in error_of(answer)["message"]


def test_other_names_can_be_allowed() -> None:
    check = _check(allowed=["chat.example"])
    assert ask(check, "GET", "/", headers={"host": "Chat.Example:80"}).status_code == 200
    assert ask(check, "GET", "/", headers={"host": "evil.example"}).status_code == 403
    public = _check("0.0.0.0", allowed=["chat.example"])
    assert ask(public, "GET", "/", headers={"host": "evil.example"}).status_code == 403


def test_a_public_server_goes_by_any_name_unless_some_are_given() -> None:
    assert ask(_check("0.0.0.0"), "GET", "/", headers={"host": "whatever.example"}).status_code == 200


@pytest.mark.parametrize("bound_to", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:3000", "http://[", "file://"])
def test_pages_of_other_origins_cannot_post(bound_to: str, origin: str) -> None:
    headers = {"host": "localhost:8000", "origin": origin}
    for method in ("POST", "DELETE"):
        assert ask(_check(bound_to), method, "/v1/completions", headers=headers).status_code == 403
    assert ask(_check(bound_to), "GET", "/", headers=headers).status_code == 200


@pytest.mark.parametrize("host", ["localhost:8000", "[::1]:8000"])
def test_the_servers_own_page_can(host: str) -> None:
    headers = {"host": host, "origin": f"http://{host}"}
    assert ask(_check(), "POST", "/v1/completions", headers=headers).status_code == 200


def test_so_can_those_that_are_allowed() -> None:
    headers = {"host": "localhost:8000", "origin": "https://chat.example"}
    assert ask(_check(origins=["https://chat.example"]), "POST", "/", headers=headers).status_code == 200
    assert ask(_check(origins=["*"]), "POST", "/", headers=headers).status_code == 200
    assert ask(_check(allowed=["chat.example"]), "POST", "/", headers=headers).status_code == 200


def test_cors_is_off_unless_asked_for() -> None:
    headers = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    off = ask(with_cors(Echo(), []), "OPTIONS", "/v1/completions", headers=headers)
    assert not [name for name in off.headers if name.startswith("access-control")]
    on = ask(with_cors(Echo(), ["https://chat.example"]), "OPTIONS", "/v1/completions", headers=headers)
    assert on.headers["access-control-allow-origin"] == "https://chat.example"
    other = ask(with_cors(Echo(), ["https://other.example"]), "OPTIONS", "/v1/completions", headers=headers)
    assert "access-control-allow-origin" not in other.headers


def test_every_answer_has_headers_for_browsers_and_endpoints_may_set_their_own() -> None:
    answer = ask(SecurityHeaders(Echo()), "GET", "/")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]

    async def own(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"cache-control", b"max-age=9")]})
        await send({"type": "http.response.body", "body": b""})

    assert ask(SecurityHeaders(own), "GET", "/").headers.get_list("cache-control") == ["max-age=9"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost"])
def test_addresses_that_only_this_machine_reaches(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", ""])
def test_addresses_that_others_reach(host: str) -> None:
    assert not is_loopback(host)


def _check(bound_to: str = "127.0.0.1", allowed: Sequence[str] = (), origins: Sequence[str] = ()) -> HostCheck:
    return HostCheck(Echo(), bound_to, allowed, origins)

"""The files of the web page, as the server sends them. What they do in a browser: test_page.py."""

import re
from importlib.resources import files

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from prolepsis.serve import page
from prolepsis.serve.errors import add_handlers

WEB = files("prolepsis.serve").joinpath("web")


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    add_handlers(app)
    app.include_router(page.router)
    return TestClient(app)


def test_sends_every_file_of_the_page_and_no_other(client: TestClient) -> None:
    assert sorted(page.FILES) == sorted(entry.name for entry in WEB.iterdir())
    for name in page.FILES:
        answer = client.get(f"/web/{name}")
        assert answer.content == WEB.joinpath(name).read_bytes()
        assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert client.get("/").text == WEB.joinpath("index.html").read_text("utf-8")
    for name in ("page.py", "..%2fpage.py", "%2e%2e/page.py", "INDEX.HTML", ""):
        assert client.get(f"/web/{name}").status_code == 404


def test_a_file_that_has_not_changed_is_not_sent_again(client: TestClient) -> None:
    first = client.get("/web/main.js")
    assert first.headers["cache-control"] == "no-cache"
    assert first.headers["content-type"] == "text/javascript; charset=utf-8"
    again = client.get("/web/main.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/web/chat.js", headers={"If-None-Match": first.headers["etag"]}).status_code == 200
    assert client.head("/").content == b""


def test_the_page_needs_nothing_from_elsewhere_and_parses_no_text_as_markup() -> None:
    for name in page.FILES:
        text = WEB.joinpath(name).read_text("utf-8")
        addresses = set(re.findall(r"https?://[^\"'\s)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, name
        assert not re.search(r"(inner|outer)HTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text), name
        for imported in re.findall(r'from "\./([\w.]+)"', text) + re.findall(r'(?:src|href)="web/([\w.]+)"', text):
            assert imported in page.FILES

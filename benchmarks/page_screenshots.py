"""Pictures of the web page for the README: a chat that goes on after a restart of the server, and others beside it.

python benchmarks/page_screenshots.py [DIRECTORY]

Writes page_light.png and page_dark.png. Needs Chromium, and what the extra `test` brings.
"""

import json
import os
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path

import httpx
from playwright.sync_api import Page, expect, sync_playwright
from serving_servers import Recipe, ours, running

from prolepsis.kernels.team import default_threads
from prolepsis.model.pull import DEFAULT_MODEL, resolve

SIZE = {"width": 1280, "height": 860}
GUIDE = files("prolepsis").joinpath("data/kv-cache-guide.md").read_text("utf-8")
CHATS = {
    "A guide to KV caches": ([GUIDE], ["What is the KV cache?"]),
    "Words and plants": (
        [],
        [
            "What are the benefits of reading every day? Answer as a list with bold keywords.",
            "Explain photosynthesis to a ten-year-old.",
        ],
    ),
}
RESUMED = "Words and plants"
QUESTION = "Write a Python function that checks whether a word is a palindrome, and explain it."
OTHERS = ["Tell me a story.", "Write a poem on rain.", "List ten birds.", "What is a prime number?", "Plan a picnic."]
LONG_ENOUGH_S = 75  # for the charts to have something to show
PATIENCE_MS = 600_000


def chat(url: str, messages: list[dict[str, str]], **fields: object) -> str:
    """What the model answers."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 180, **fields}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_MS / 1000).raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


def save_chats(url: str) -> None:
    """Have the chats that the page lists."""
    for name, (systems, questions) in CHATS.items():
        messages = [{"role": "system", "content": system} for system in systems]
        for question in questions:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": chat(url, messages)})
        saved = {"id": name, "messages": messages}
        httpx.post(f"{url}/v1/sessions", json=saved, timeout=PATIENCE_MS / 1000).raise_for_status()


@contextmanager
def others(url: str) -> Iterator[None]:
    """Some who ask again and again, each about something else; half of them share a long system prompt."""
    ended = threading.Event()

    def ask(number: int) -> None:
        dice = random.Random(number)
        system = [{"role": "system", "content": GUIDE}] if number % 2 else []
        while not ended.is_set():
            question = {"role": "user", "content": f"{OTHERS[number]} {dice.randrange(100)}"}
            with suppress(httpx.HTTPError):
                chat(url, [*system, question], ignore_eos=True, max_tokens=dice.randrange(60, 240))

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(len(OTHERS))]
    for thread in threads:
        thread.start()
    yield
    ended.set()


def take(page: Page, url: str, directory: Path) -> None:
    """Resume a chat, go on with it, and take a picture in each scheme while others are answered too."""
    page.get_by_role("button", name=RESUMED).first.click()
    expect(page.locator("#notice")).to_contain_text("Resumed")
    with others(url):
        page.wait_for_timeout(LONG_ENOUGH_S * 1000)
        page.fill("#question", QUESTION)
        page.keyboard.press("Enter")
        expect(page.locator(".answer").last).not_to_have_class("answer pending")
        page.mouse.move(600, 5)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.wait_for_timeout(1500)
            page.screenshot(path=directory / f"page_{scheme}.png")


def look(recipe: Recipe, directory: Path) -> None:
    """Start the server again, and open its page."""
    settings = json.dumps({"temperature": "0", "top_p": "0.95", "max_tokens": "180"})
    with running(recipe) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("google-chrome"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        expect.set_options(timeout=PATIENCE_MS)
        page.add_init_script(f"localStorage.setItem('prolepsis-settings', {json.dumps(settings)})")
        page.goto(server.url)
        take(page, server.url, directory)
        browser.close()


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "docs").resolve()
    resolve(DEFAULT_MODEL)  # fetched here, with what there is to be told
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)  # the page tells where the store is
        store = ("--store", "memory:64MiB", "--store", "disk:kv-store:2GiB")
        recipe = ours(DEFAULT_MODEL, default_threads(), *store, "--kv-memory", "192MiB", "--draft", "ngram")
        with running(recipe) as server:
            save_chats(server.url)
        look(recipe, directory)


if __name__ == "__main__":
    main()

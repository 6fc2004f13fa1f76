"""The web page in a real browser, over a real server of the tiny model."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
from served import Served, run, serving

sync_api = pytest.importorskip("playwright.sync_api", reason="the page is tested with Playwright, which is missing")
expect = sync_api.expect
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="the page is tested in Chromium, which is missing")

expect.set_options(timeout=30_000)  # of a machine that does other things too
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
HOSTILE = (
    "<img src=x onerror=\"document.title='broken in'\">\n\n<script>document.title='broken in'</script>\n\n"
    "# <b>bold</b>\n\n- [link](javascript:alert(1))\n- ![i](http://example.com/a.png)\n\n"
    "```html\n<iframe src=http://example.com></iframe>\n```\n**<u>under</u>** `<i>`"
)
KEY = "a-key-of-the-test"
WIDE = {"width": 1280, "height": 860}


@dataclass
class Visitor:
    """Opens the page in browsers that have never seen it, and notes what goes wrong there and whom it asks.

    `agrees`: what it says when the page asks something of it, as in `asked`.
    """

    browser: Any
    troubles: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    agrees: bool = True

    def visit(self, url: str, **options: Any) -> Any:
        context = self.browser.new_context(viewport=WIDE, **options)
        context.set_default_timeout(30_000)
        page = context.new_page()
        page.on("console", self.hear)
        page.on("dialog", self.reply)
        page.on("pageerror", lambda error: self.note(True, str(error)))
        page.on("request", lambda asked: self.note(not asked.url.startswith(url), asked.url))
        page.goto(url)
        return page

    def hear(self, told: Any) -> None:
        # Chromium itself logs every answer with a status of 400 and above.
        self.note(told.type == "error" and "responded with a status" not in told.text, told.text)

    def reply(self, dialog: Any) -> None:
        self.asked.append(dialog.message)
        if self.agrees:
            dialog.accept()
        else:
            dialog.dismiss()

    def note(self, is_trouble: bool, text: str) -> None:
        if is_trouble:
            self.troubles.append(text)


@pytest.fixture(scope="module")
def served(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """As everywhere, with a store."""
    with serving(tiny, stores=("memory:64MiB", f"disk:{tmp_path_factory.mktemp('store')}:64MiB")) as served:
        yield served


@pytest.fixture(scope="module")
def browser(served: Served) -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def the_visitor(browser: Any) -> Visitor:
    return Visitor(browser)


@pytest.fixture(scope="module")
def the_page(the_visitor: Visitor, served: Served) -> Any:
    page = the_visitor.visit(served.url)
    expect(page.locator("#phase")).to_have_text("ready")
    return page


@pytest.fixture
def visitor(the_visitor: Visitor) -> Iterator[Visitor]:
    """There must be no trouble."""
    the_visitor.troubles.clear()
    the_visitor.asked.clear()
    the_visitor.agrees = True
    yield the_visitor
    assert the_visitor.troubles == []


@pytest.fixture
def page(the_page: Any, visitor: Visitor, served: Served) -> Any:
    """One page for all, as a new chat finds it: loading it takes longer than most tests."""
    served.ended.clear()
    the_page.unroute_all()
    the_page.set_viewport_size(WIDE)
    the_page.click("#new-chat")
    visitor.asked.clear()
    the_page.click("#reset-settings")
    the_page.fill("[name=seed]", "7")
    the_page.fill("[name=max_tokens]", "12")
    return the_page


def ask(page: Any, question: str) -> Any:
    """The answer, once it is complete."""
    page.fill("#question", question)
    page.keyboard.press("Enter")
    answer = page.locator(".answer").last
    expect(answer).not_to_have_class("answer pending")
    return answer


def kept_turns(page: Any) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = json.loads(page.evaluate("sessionStorage.getItem('prolepsis-chat')"))
    return turns


@pytest.fixture
def patient(page: Any, served: Served, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page, with a model that goes on for as long as it can, and takes its time."""
    step = served.state.llm.engine.step
    wait = Event().wait

    def slow_step() -> Any:
        wait(0.01)
        return step()

    monkeypatch.setattr(served.state.llm.engine, "step", slow_step)

    def longer(route: Any) -> None:
        body = route.request.post_data_json | {"ignore_eos": True, "max_tokens": 1500}
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", longer)
    return page


def answering(page: Any, *events: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
    """Have the server answer with these events, or the first alone where the status is not 200."""
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    if status != 200:
        body = json.dumps(events[0])
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(status=status, body=body, headers=headers or {}), times=1
    )


def chunk(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}


def test_an_answer_streams_and_says_how_it_fared(page: Any, served: Served) -> None:
    page.fill("[name=system]", "Be brief.")
    answer = ask(page, "Tell me of blocks.\nAll of them.")
    expect(answer.locator(".foot")).to_contain_text("to first token")
    expect(answer.locator(".foot")).to_contain_text("seed 7")
    first = served.ended[-1]
    assert kept_turns(page)[-1]["content"] == first.text
    assert page.locator("#announcer").text_content() == first.text
    again = ask(page, "And more?")
    cached = served.ended[-1].cached_tokens
    assert cached > 0
    expect(again.locator(".cached")).to_contain_text(f"{cached} of {served.ended[-1].prompt_tokens} prompt tokens")
    assert first.text not in ("", served.ended[-1].text)


def test_stopping_keeps_what_is_there_and_frees_the_sequence(patient: Any, served: Served) -> None:
    page = patient
    page.fill("#question", "Count.")
    page.keyboard.press("Enter")
    expect(page.locator(".answer .text")).not_to_be_empty()
    expect(page.locator("#stop")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".answer .foot")).to_contain_text("stopped")
    expect(page.locator(".answer .foot")).to_contain_text(re.compile(r"about \d+ token"))
    expect(page.locator("#question")).to_be_focused()
    served.wait_for(1)
    assert served.ended[0].finish_reason is None
    assert served.state.engine is not None
    assert run(served.state.engine.flush(60))  # the store lets go of what it copies
    assert served.within(lambda: served.state.llm.kv_cache.pool.num_used) == 0
    assert served.ended[0].text.startswith(kept_turns(page)[-1]["content"])


def test_answers_again_and_edits_the_last_question(page: Any) -> None:
    ask(page, "One")
    ask(page, "Two")
    before = kept_turns(page)
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator(".answer").last).not_to_have_class("answer pending")
    assert [turn["content"] for turn in kept_turns(page)] == [turn["content"] for turn in before]  # the seed is fixed
    page.locator(".question").last.hover()
    page.get_by_role("button", name="Edit question").click()
    expect(page.locator("#question")).to_have_value("Two")
    page.keyboard.press("Escape")
    expect(page.locator("#editing")).to_be_hidden()
    assert len(kept_turns(page)) == 4
    page.get_by_role("button", name="Edit question").click()
    ask(page, "Three")
    assert [turn["content"] for turn in kept_turns(page) if turn["role"] == "user"] == ["One", "Three"]
    page.reload()
    expect(page.locator(".question .text")).to_have_text(["One", "Three"])


def test_the_seed_of_an_answer_repeats_it(page: Any) -> None:
    page.fill("[name=seed]", "")
    told = ask(page, "One").locator(".foot").inner_text()
    page.fill("[name=seed]", re.findall(r"seed (\d+)", told)[0])
    before = kept_turns(page)[-1]["content"]
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator(".answer").last).not_to_have_class("answer pending")
    assert kept_turns(page)[-1]["content"] == before


def test_hostile_output_stays_text(page: Any) -> None:
    answering(page, *[chunk(character) for character in HOSTILE], chunk("", "stop"))
    answer = ask(page, HOSTILE)
    shown = answer.locator(".text")
    for text in (
        "<img src=x onerror",
        "<script>",
        "<b>bold</b>",
        "[link](javascript:",
        "<iframe",
        "<u>under</u>",
        "<i>",
    ):
        expect(shown).to_contain_text(text)
    assert page.locator(":is(.answer, .question) .text :is(img, script, iframe, a, b, i, u)").count() == 0
    assert page.locator(".question .text").inner_text() == HOSTILE
    expect(answer.locator("pre code")).to_have_text("<iframe src=http://example.com></iframe>")
    expect(answer.locator("strong")).to_have_text("<u>under</u>")
    assert page.title() == "Prolepsis"
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<p onclick=\"document.title=1\">x</p>')")
    assert page.title() == "Prolepsis"


def test_markdown_that_never_closes_is_shown_as_it_is(page: Any) -> None:
    """Each is long enough for a scan that is not linear to take minutes."""
    lost = page.evaluate(
        """async () => {
            const { render } = await import("/web/markdown.js");
            const shown = (text) => {
                const element = document.createElement("div");
                render(element, text);
                return element.textContent;
            };
            return ["a **b ", "a ` b `` c ", "a * b ", "1. x\\n", "  - x\\n", "x\\n"].filter((text) =>
                shown(text.repeat(15000)).match(/[a-cx]/g).length !== text.match(/[a-cx]/g).length * 15000);
        }"""
    )
    assert lost == []


def test_trouble_is_told_kindly(page: Any) -> None:
    busy = {"error": {"message": "too many requests", "type": "rate_limit_error"}}
    answering(page, busy, status=429, headers={"Retry-After": "7"})
    expect(ask(page, "One").locator(".trouble")).to_have_text("The server is busy. Try again in 7 seconds.")
    answering(page, chunk("half"), {"error": {"message": "the tier is on fire"}})
    answer = ask(page, "Two")
    expect(answer.locator(".trouble")).to_have_text("the tier is on fire")
    expect(answer.locator(".text")).to_have_text("half")
    answering(page, chunk("half"))
    expect(ask(page, "Three").locator(".trouble")).to_contain_text("broke off")
    expect(ask(page, "four " * 3000).locator(".trouble")).to_contain_text("context")  # the server's own words
    page.get_by_role("button", name="Edit question").click()
    expect(ask(page, "Four").locator(".foot")).to_contain_text("to first token")
    expect(page.locator(".trouble")).to_have_count(3)


def test_the_engine_is_shown_as_it_runs(patient: Any) -> None:
    page = patient
    expect(page.locator("#live")).to_have_text("live")
    blocks = page.locator("#block-map")
    expect(blocks).to_have_attribute("aria-label", re.compile("^Map of the block pool: 0 used"))
    page.fill("#question", "Fill the pool.")
    page.keyboard.press("Enter")
    expect(page.locator("#figures")).to_contain_text("Running1")
    expect(blocks).to_have_attribute("aria-label", re.compile("^Map of the block pool: [1-9]"))
    colours = page.evaluate(
        """() => {
            const map = document.getElementById("block-map");
            const { data } = map.getContext("2d").getImageData(0, 0, map.width, map.height);
            return new Set(new Uint32Array(data.buffer)).size;
        }"""
    )
    assert colours > 2
    blocks.hover(position={"x": 5, "y": 5})
    expect(page.locator("#block-tip")).to_contain_text("Block")
    page.click("#stop")
    expect(page.locator("#figures")).to_contain_text("Running0")


def test_the_map_has_a_cell_for_every_block_or_says_how_many_share_one(page: Any) -> None:
    for blocks in (1, 7, 100, 1500, 8000, 100_000):
        for width in (240, 300, 700):
            told = page.evaluate(
                "async ([blocks, width]) => (await import('/web/blockmap.js')).layout(blocks, width)", [blocks, width]
            )
            assert told["cells"] * told["each"] >= blocks > (told["cells"] - 1) * told["each"]
            assert told["columns"] * told["rows"] >= told["cells"]
            assert told["size"] >= 3.9
            assert told["rows"] * told["size"] <= 180


def save(page: Any, name: str | None = None) -> None:
    if name is not None:
        page.fill("#session-name", name)
    with page.expect_response(lambda answer: answer.request.method == "POST"):
        page.click("#save")
    expect(page.locator("#session-list")).not_to_have_attribute("aria-busy", "true")


def test_a_session_is_saved_and_resumed_after_a_reload(page: Any, served: Served) -> None:
    ask(page, "One " * 300)
    page.fill("#session-name", "about ones")
    page.click("#save")
    entry = page.locator(".session")
    expect(entry.locator(".name")).to_have_text("about ones")
    expect(entry.locator(".size")).to_have_text(re.compile(r"^[\d,]+ tokens · [\d.]+ KiB \(\d\.\d\d×\)$"))
    expect(page.locator("#notice")).to_contain_text("of KV cache in")
    before = [turn["content"] for turn in kept_turns(page)]
    page.click("#new-chat")
    page.reload()
    expect(page.locator(".answer")).to_have_count(0)
    page.get_by_role("button", name="about ones", exact=False).first.click()
    expect(page.locator("#notice")).to_contain_text("Resumed")
    assert [turn["content"] for turn in kept_turns(page)] == before
    ask(page, "And two?")
    assert served.ended[-1].cached_tokens > 300
    expect(page.locator("#tiers .tier .name")).to_have_text(["memory", "disk"])
    expect(page.locator("#store-text")).to_contain_text("×")
    page.locator(".session").hover()
    page.get_by_role("button", name="Delete session about ones").click()
    expect(page.locator(".session")).to_have_count(0)
    expect(page.locator("#no-sessions")).to_be_visible()


@pytest.fixture
def names(page: Any, served: Served) -> Iterator[Any]:
    """The names in the list of sessions, which are gone afterwards."""
    yield page.locator(".session .name")
    for session in httpx.get(f"{served.url}/v1/sessions").json()["data"]:
        httpx.delete(f"{served.url}/v1/sessions/{session['id']}").raise_for_status()


def test_no_session_is_replaced_by_another_chat_unasked(page: Any, names: Any, visitor: Visitor) -> None:
    ask(page, "One")
    save(page)
    page.click("#new-chat")
    ask(page, "One")
    save(page)  # the same first question suggests the same name
    expect(names).to_have_text(["One 2", "One"])
    save(page, "mine")
    page.reload()
    expect(names).to_have_text(["mine", "One 2", "One"])
    ask(page, "Two")
    expect(page.locator("#session-name")).to_have_value("mine")
    save(page)
    expect(names).to_have_text(["mine", "One 2", "One"])
    assert visitor.asked == []
    visitor.agrees = False
    page.fill("#session-name", "One")
    page.click("#save")
    expect(page.locator("#session-list")).not_to_have_attribute("aria-busy", "true")
    assert visitor.asked == ["Replace the session “One” by this chat?"]
    expect(page.locator("#notice")).to_contain_text("Nothing was saved")
    expect(names).to_have_text(["mine", "One 2", "One"])
    visitor.agrees = True
    save(page)
    expect(names).to_have_text(["One", "mine", "One 2"])


def test_no_chat_is_dropped_unasked_but_one_that_is_saved(page: Any, names: Any, visitor: Visitor) -> None:
    ask(page, "One")
    save(page)
    visitor.agrees = False
    ask(page, "Two")
    page.reload()
    before = kept_turns(page)
    page.click("#new-chat")
    page.locator(".session .resume").click()
    expect(page.locator("#session-list")).not_to_have_attribute("aria-busy", "true")
    assert visitor.asked == ["This chat has turns that are not saved. Drop them?"] * 2
    assert kept_turns(page) == before
    save(page)
    page.click("#new-chat")
    expect(page.locator(".question")).to_have_count(0)
    page.locator(".session .resume").click()
    expect(page.locator(".question")).to_have_count(2)
    assert len(visitor.asked) == 2
    visitor.agrees = True
    page.locator(".session").hover()
    page.get_by_role("button", name="Delete session One").click()
    expect(names).to_have_count(0)
    visitor.agrees = False
    page.click("#new-chat")  # it is nowhere else now
    expect(page.locator(".question")).to_have_count(2)
    visitor.agrees = True


def test_the_focus_is_not_lost_where_a_button_is_gone(page: Any, names: Any) -> None:
    ask(page, "One")
    for name in ("first", "second", "third"):
        page.fill("#session-name", name)
        page.locator("#save").focus()
        page.keyboard.press("Enter")
        expect(names.first).to_have_text(name)
        expect(page.locator("#save")).to_be_focused()
    for name, then in (("second", "first"), ("first", "third")):
        page.get_by_role("button", name=f"Delete session {name}").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name=f"Delete session {then}")).to_be_focused()
    page.locator(".session .resume").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#question")).to_be_focused()
    expect(page.locator("#session-list")).not_to_have_attribute("aria-busy", "true")
    page.get_by_role("button", name="Delete session third").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#new-chat")).to_be_focused()


def test_a_resumed_chat_can_be_gone_on_with_on_a_narrow_screen(page: Any, names: Any) -> None:
    ask(page, "One")
    save(page)
    page.set_viewport_size({"width": 360, "height": 720})
    page.get_by_role("button", name="Sessions", exact=True).click()
    page.locator(".session .resume").click()
    expect(page.locator("#notice")).to_contain_text("Resumed")
    page.click("#question")
    notice, field = (page.locator(name).bounding_box() for name in ("#notice", ".field"))
    assert page.locator("#question").bounding_box()["height"] > 20
    assert notice["y"] + notice["height"] <= field["y"]


def test_a_session_that_another_client_saved_is_resumed_whole_or_not_at_all(page: Any, served: Served) -> None:
    def parts(*texts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts]

    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = {"role": "user", "content": parts("One", "two")}
    sessions = {
        "told": [{"role": "developer", "content": parts("Be", "brief.")}, asked, {"role": "assistant", "content": "3"}],
        "untold": [asked],
        "calls": [asked, {"role": "assistant", "content": None, "tool_calls": [call]}],
    }
    for name, messages in sessions.items():
        httpx.post(f"{served.url}/v1/sessions", json={"id": name, "messages": messages}).raise_for_status()
    page.reload()
    page.set_viewport_size({"width": 360, "height": 720})
    for name, system in (("told", "Be\nbrief."), ("untold", "")):
        page.get_by_role("button", name="Sessions", exact=True).click()
        page.locator(f".session[data-id={name}] .resume").click()
        expect(page.locator(".question .text")).to_be_visible()
        expect(page.locator(".question .text")).to_have_text("One\ntwo")
        expect(page.locator("[name=system]")).to_have_value(system)
    page.get_by_role("button", name="Sessions", exact=True).click()
    page.locator(".session[data-id=calls] .resume").click()
    expect(page.locator("#notice")).to_contain_text("has tool calls")
    for name in sessions:
        httpx.delete(f"{served.url}/v1/sessions/{name}").raise_for_status()
    page.click("#new-chat")


def test_dark_and_light(visitor: Visitor, served: Served) -> None:
    page = visitor.visit(served.url, color_scheme="dark")

    def brightness() -> int:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))

    assert brightness() < 100
    page.get_by_role("button", name="Colours: as the system").click()
    assert brightness() > 600
    page.reload()
    assert brightness() > 600
    page.get_by_role("button", name="Colours: light").click()
    page.emulate_media(color_scheme="light")
    assert brightness() < 100
    page.context.close()


def test_the_keyboard_is_enough(page: Any) -> None:
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#question")).to_be_focused()
    page.keyboard.type("A line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("and another")
    page.keyboard.press("Enter")
    expect(page.locator(".question .text")).to_have_text("A line\nand another")
    expect(page.locator(".answer .foot")).to_contain_text("to first token")
    for _ in range(12):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.getAttribute('aria-label')") == "Answer again":
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.locator("#question")).to_be_focused()
    expect(page.locator(".answer")).to_have_count(1)
    expect(page.locator(".answer .foot")).to_contain_text("to first token")


def test_a_narrow_screen_shows_one_view_at_a_time(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 720})
    for name, seen in (("Sessions", "#settings"), ("Engine", "#block-map"), ("Chat", "#question")):
        page.get_by_role("button", name=name, exact=True).click()
        expect(page.locator(seen)).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
    expect(page.locator("#block-map")).to_be_hidden()
    page.get_by_role("button", name="Sessions", exact=True).click()
    page.click("#new-chat")
    expect(page.locator("#question")).to_be_focused()


def test_a_key_is_asked_for_and_forgotten_with_the_tab(visitor: Visitor, tiny: Path) -> None:
    with serving(tiny, api_keys=(KEY,)) as locked:
        page = visitor.visit(locked.url)
        expect(page.locator("#key-dialog")).to_be_visible()
        expect(page.locator("#key-why")).to_contain_text("asks for an API key")
        page.fill("#key-input", "not-this-one")
        page.keyboard.press("Enter")
        expect(page.locator("#key-why")).to_contain_text("does not know this key")
        page.fill("#key-input", KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#phase")).to_have_text("ready")
        expect(page.locator("#live")).to_have_text("live")
        page.fill("[name=max_tokens]", "3")
        expect(ask(page, "Hello").locator(".foot")).to_contain_text("3 tokens")
        assert KEY not in page.evaluate("JSON.stringify(localStorage) + document.cookie + location.href")
        page.context.close()

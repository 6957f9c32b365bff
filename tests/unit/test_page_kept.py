"""Tests of what the page keeps, in a real browser: conversations, versions, pictures, settings."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.browser import Visit, axe_findings, axe_script, chromium, visiting
from helpers.fake_service import FakeChatModel
from helpers.patience import PATIENCE_S, until
from helpers.server_case import Case

from moegraph.engine.chat import ChatRequest, Prompt
from moegraph.server.info import FILES
from moegraph.text.chat.prompting import Encoded

# one pixel
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9Q"
    "DwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
HAS_LIBRARIES = (FILES / "lib" / "katex.min.js").is_file()
RICH = (
    "Formulas $a^2$ and \\(b_1\\), not $5 and $10:\n\n$$\n\\int_0^1 x\\,dx\n$$\n\n"
    "```python\ndef f(x):\n    return x < 1  # <b>\n```\n"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


class Seeing(FakeChatModel):
    """Takes pictures too."""

    def prompt(self, chat: ChatRequest) -> Prompt:
        text = "\n".join(f"{one['role']}: {one['content']!s:.20}" for one in chat.messages)
        return Prompt(text, Encoded(list(text.encode()), [(0, 0)]), (), 0)


def seeing_case(*scripts: Any) -> Case:
    """Return a server whose model has an encoder for pictures."""
    case = Case(*scripts, chat=Seeing())
    case.state.backend.facts = replace(case.state.backend.facts, reads_pictures=True)
    return case


def titles(page: Any) -> list[str]:
    found: list[str] = page.locator("#list .title").all_inner_texts()
    return found


def ask(visit: Visit, *texts: str) -> None:
    for text in texts:
        visit.ask(text)
        visit.wait_until_idle()


def database(page: Any) -> tuple[list[Any], list[Any]]:
    """Return the conversations and messages in the browser's database."""
    heads, messages = page.evaluate(
        "() => new Promise((done) => { const asked = indexedDB.open('moegraph');"
        " asked.onsuccess = () => { const names = ['conversations', 'messages'];"
        " const held = asked.result.transaction(names); const found = [];"
        " for (const name of names) held.objectStore(name).getAll().onsuccess ="
        " (event) => found.push(event.target.result);"
        " held.oncomplete = () => { asked.result.close(); done(found); }; }; })"
    )
    return heads, messages


def stored(page: Any) -> list[int]:
    """Return how many conversations and messages are in the browser's database."""
    return [len(found) for found in database(page)]


def content_of_leaf(page: Any) -> str:
    (head,), messages = database(page)
    (found,) = [one["content"] for one in messages if one["id"] == head["leaf"]]
    return str(found)


def asked_of(case: Case) -> list[tuple[str, Any]]:
    """Return roles and contents of the messages of the last request."""
    return [(one["role"], one["content"]) for one in case.model.chats[-1].messages]


def test_a_reload_shows_the_conversation_again(browser: Any) -> None:
    case = Case(["<think>hm</think>", "Hello **you**"], n_cached=2)
    with visiting(browser, case) as visit:
        page = visit.page
        ask(visit, "first line\nsecond")
        before = page.inner_html("#messages"), page.inner_text(".figures")
        assert "2 kept" in before[1]
        page.reload()
        page.wait_for_selector(".answer strong")
        assert (page.inner_html("#messages"), page.inner_text(".figures")) == before
        ask(visit, "again")
        said = [("user", "first line\nsecond"), ("assistant", "Hello **you**"), ("user", "again")]
        assert asked_of(case) == said
        page.click("#new")
        assert page.is_visible("#empty") and titles(page) == ["first line"]
        page.click("#list .title")
        page.wait_for_selector(".answer >> nth=1")
        assert page.get_attribute("#list .title", "aria-current") == "true"


def test_a_reload_keeps_what_was_written_of_an_answer(browser: Any) -> None:
    case = Case(["begun"] + [" on"] * 100_000, step_s=0.01)
    with visiting(browser, case) as visit:
        visit.ask("hi")
        visit.page.wait_for_selector(".answer .text p")
        until(lambda: content_of_leaf(visit.page).startswith("begun on"))
        visit.page.reload()
        visit.page.wait_for_selector(".answer .text p")
        assert visit.answers[0].startswith("begun on")
        assert "not complete" in visit.page.inner_text(".answer > .note")
        assert case.service.tickets[0].gone.wait(PATIENCE_S)


def test_edited_messages_and_other_answers_are_versions(browser: Any) -> None:
    case = Case(*[[f"answer {i}"] for i in range(9)])
    with visiting(browser, case) as visit:
        page = visit.page
        ask(visit, "one", "two")
        page.locator(".question .change").first.click()
        assert page.input_value("#prompt") == "one" and page.is_visible("#editing")
        ask(visit, "uno")
        assert asked_of(case) == [("user", "uno")] and visit.answers == ["answer 2"]
        page.click(".answer .change")
        visit.wait_for("document.querySelector('.answer .text').innerText === 'answer 3'")
        visit.wait_until_idle()
        assert asked_of(case) == [("user", "uno")]
        assert page.locator(".count:visible").all_inner_texts() == ["2/2", "2/2"]
        # back to the first question, with the keyboard alone, and all below it is there again
        page.locator(".question [aria-label='Version before']").focus()
        page.keyboard.press("Enter")
        assert visit.answers == ["answer 0", "answer 1"]
        assert page.evaluate("document.activeElement.ariaLabel") == "Version before"
        assert page.inner_text("#said") == "Version 1 of 2"
        page.keyboard.press("Enter")  # there is none before
        until(lambda: content_of_leaf(page) == "answer 1")
        page.reload()
        page.wait_for_selector(".answer >> nth=1")
        assert visit.answers == ["answer 0", "answer 1"]
        ask(visit, "three")
        said = [text for _, text in asked_of(case)]
        assert said == ["one", "answer 0", "two", "answer 1", "three"]
        page.locator("[aria-label='Next version']:visible").focus()
        page.keyboard.press("Enter")
        assert visit.answers == ["answer 3"]


# A tab that hears nothing of other tabs while window.isDeaf is set.
DEAF = """const Own = BroadcastChannel; window.BroadcastChannel = class extends Own {
  addEventListener(kind, act) {
    super.addEventListener(kind, (event) => window.isDeaf || act(event));
  }
};"""


def test_two_tabs_lose_nothing_of_each_other(browser: Any) -> None:
    hold = threading.Event()
    hold.set()
    case = Case(*[[f"answer {i}"] for i in range(9)], hold=hold)
    with visiting(browser, case) as visit:
        visit.context.add_init_script(DEAF)
        ask(visit, "one")
        other = visit.tab()
        other.page.click("#list .title")
        other.page.wait_for_selector(".answer")
        ask(visit, "two")
        other.page.wait_for_selector(".answer >> text=answer 1")
        # both go on at the same place at the same time: two versions, in both tabs
        other.page.evaluate("window.isDeaf = true")
        hold.clear()
        visit.ask("left")
        visit.page.wait_for_selector("#stop:visible")
        other.ask("right")
        other.page.wait_for_selector("#stop:visible")
        hold.set()
        visit.wait_until_idle()
        other.wait_until_idle()
        other.page.evaluate("window.isDeaf = false")
        visit.page.click("text=Rename")
        visit.page.fill("#question-text", "New name")
        visit.page.keyboard.press("Enter")
        for one, last in ((visit, "left"), (other, "right")):
            one.page.wait_for_selector("#list >> text=New name")
            one.page.wait_for_selector(".question >> nth=2 >> text=/2$/")
            assert one.page.locator(".question .text").all_inner_texts() == ["one", "two", last]
            assert not one.page.is_visible(".answer > .note")
        assert stored(visit.page) == [1, 8]
        visit.page.click("#list >> text=Delete")
        visit.page.click("#question-act")
        for one in (visit, other):
            one.page.wait_for_selector("#empty:visible")
            one.wait_for("document.getElementById('list').children.length === 0")
        assert stored(visit.page) == [0, 0] and visit.answers == other.answers == []


def test_search_export_and_import(browser: Any, tmp_path: Path) -> None:
    case = Case(["Bread needs flour"], ["Soup needs salt"])
    with visiting(browser, case, accept_downloads=True) as visit:
        page = visit.page
        ask(visit, "bake")
        page.click("#new")
        ask(visit, "cook")
        assert titles(page) == ["cook", "bake"]
        page.fill("#search", "NEEDS flour")
        visit.wait_for("document.getElementById('list').children.length === 1")
        assert "Bread needs flour" in titles(page)[0] and page.inner_text("#found")[:1] == "1"
        page.fill("#search", "sugar")
        visit.wait_for("document.getElementById('list').children.length === 0")
        page.fill("#search", "")
        page.wait_for_selector("#list .title >> nth=1")
        with page.expect_download() as found:
            page.click("#export-all")
        text = Path(found.value.path()).read_text("utf-8")
        file = json.loads(text)
        assert (file["format"], file["version"]) == ("moegraph.conversations", 1)
        assert [len(one["messages"]) for one in file["conversations"]] == [2, 2]
        page.click("#list >> text=Delete")
        page.click("#question-act")
        visit.wait_for("document.getElementById('list').children.length === 1")
        for n in (2, 2):  # what is there already is not there twice
            page.set_input_files("#import-file", [payload(text)])
            page.wait_for_selector(f"#list .title >> nth={n - 1}")
            visit.wait_for("document.getElementById('said').textContent.includes('imported')")
        assert sorted(titles(page)) == ["bake", "cook"] and stored(page) == [2, 4]
        page.click("#list .title >> text=cook")
        page.wait_for_selector(".answer >> text=Soup needs salt")
        for change, why in BROKEN:
            wrong = json.loads(text)
            change(wrong)
            page.set_input_files("#import-file", [payload(json.dumps(wrong))])
            page.wait_for_selector(f"#trouble >> text={why}")
        page.set_input_files("#import-file", [payload("{")])
        page.wait_for_selector("#trouble >> text=the file is not JSON")
        assert stored(page) == [2, 4]


def payload(text: str) -> Any:
    return {"name": "x.json", "mimeType": "application/json", "buffer": text.encode()}


def message(file: Any, index: int = 0) -> Any:
    return file["conversations"][0]["messages"][index]


BROKEN: list[tuple[Any, str]] = [
    (lambda f: f.update(version=2), "is not of the format"),
    (lambda f: f.update(conversations=[None]), "conversation 1: id is no string"),
    (lambda f: message(f).update(parent="x"), "its parent does not stand before it"),
    (lambda f: message(f).update(parent=message(f)["id"]), "its parent does not stand before it"),
    (lambda f: message(f, 1).update(id=message(f)["id"]), "its id is another one's"),
    (lambda f: message(f, 1).update(parent=None), "an answer whose parent is no question"),
    (lambda f: message(f).update(role="system"), "role is unknown"),
    (lambda f: message(f).update(content=[1]), "content is no string"),
    (lambda f: message(f).update(pictures=["http://x/y.png"]), "a picture is no data URI"),
    (lambda f: message(f).update(pictures=["data:image/svg+xml;base64,AA"]), "is no data URI"),
    (lambda f: message(f).update(pictures=[["data:image/png;base64,AA"]]), "is no data URI"),
]

HTML = "<img src=x onerror=alert(1)> $\\href{javascript:alert(2)}{a}$ [a](javascript:alert(3))"
CODE = "```html\n<a href='javascript:alert(4)' onclick=alert(5)>x</a><script>alert(6)</script>\n```"
# What others have written may be in a file that is imported.
HOSTILE = {
    "format": "moegraph.conversations", "version": 1, "conversations": [
        {"id": "a", "title": HTML, "changed": 1e300, "messages": [
            {"id": "1", "role": "user", "content": HTML, "created": "x", "__proto__": {"id": 1}},
            {"id": "2", "role": "assistant", "parent": "1", "content": f"{HTML}\n\n{CODE}",
             "note": HTML, "figures": HTML, "reasoning": HTML, "thought": "1e999"},
        ], "settings": {"__proto__": {"top_k": "1"}, "top_k": {}, "model": HTML}, "leaf": "9"},
        {"id": "b", "title": " \n ", "messages": []},
    ],
}  # fmt: skip


def test_what_is_imported_is_text(browser: Any) -> None:
    with visiting(browser, Case()) as visit:
        page = visit.page
        page.on("dialog", lambda dialog: visit.complaints.append(dialog.message))
        page.set_input_files("#import-file", [payload(json.dumps(HOSTILE))])
        page.wait_for_selector("#list .title >> nth=1")
        assert titles(page) == [HTML, "Untitled"]
        page.click("#list .title >> nth=0")
        page.wait_for_selector(".answer pre")
        inside = page.locator("#messages, #list").locator("img, script, a, iframe, [onclick]")
        assert inside.count() == 0 and page.inner_text(".question .text") == HTML
        assert page.inner_text(".answer pre") == CODE.split("\n")[1]
        ask(visit, "on")
        assert len(visit.answers) == 2 and titles(page)[0] == HTML  # the newest, after all
        page.reload()
        page.wait_for_selector(".answer >> nth=1")


def test_what_is_being_written_is_not_lost(browser: Any) -> None:
    hold = threading.Event()
    hold.set()
    with visiting(browser, Case(hold=hold)) as visit:
        page = visit.page
        ask(visit, "one")
        page.fill("#prompt", "half")
        page.click(".question .change")
        assert page.input_value("#prompt") == "one"
        page.keyboard.press("Escape")
        assert page.input_value("#prompt") == "half"
        page.click(".question .change")
        ask(visit, "uno")
        page.click("#new")
        assert page.input_value("#prompt") == "half"
        assert page.evaluate("document.activeElement.id") == "prompt"
        page.click("#list .title")
        page.wait_for_selector(".answer")
        assert page.input_value("#prompt") == "half"
        # the keyboard goes on where a button has gone, and elsewhere it stays
        hold.clear()
        page.focus(".answer .change")
        page.keyboard.press("Enter")
        page.wait_for_selector("#stop:visible")
        assert page.evaluate("document.activeElement.id") == "stop"
        page.focus(".question [aria-label='Copy your message']")
        hold.set()
        visit.wait_until_idle()
        assert page.evaluate("document.activeElement.ariaLabel") == "Copy your message"
        # a text can be dropped, too
        drag = "new DragEvent('dragover', { dataTransfer: new DataTransfer(), cancelable: true })"
        assert page.evaluate(f"document.dispatchEvent({drag})")


FORBIDDEN = """for (const name of ["localStorage", "sessionStorage", "indexedDB"]) {
  Object.defineProperty(window, name, { get() { throw new DOMException(name, "SecurityError"); } });
}"""


def test_a_browser_that_keeps_nothing_chats(browser: Any) -> None:
    with visiting(browser, Case()) as visit:
        visit.context.add_init_script(FORBIDDEN)
        page = visit.page
        page.reload()
        page.wait_for_selector("#trouble >> text=is not kept")
        ask(visit, "one", "two")
        assert len(visit.answers) == 2 and titles(page) == ["one"]
        assert not page.is_checked("#keep-them")
        page.click("#keep-them")
        page.wait_for_selector("#trouble >> text=cannot be kept")
        visit.wait_for("!document.getElementById('keep-them').checked")


FULL = """() => {
  const begin = IDBDatabase.prototype.transaction;
  IDBDatabase.prototype.transaction = function (names, mode) {
    if (mode === "readwrite") throw new DOMException("the disk is full", "QuotaExceededError");
    return begin.call(this, names, mode);
  };
}"""


def test_a_full_disk_is_told(browser: Any) -> None:
    with visiting(browser, Case()) as visit:
        ask(visit, "one")
        visit.page.evaluate(FULL)
        ask(visit, "two")
        visit.page.wait_for_selector("#trouble >> text=is not kept: the disk is full")
        assert len(visit.answers) == 2 and stored(visit.page) == [1, 2]


def test_keeping_nothing_deletes_all_in_every_tab(browser: Any) -> None:
    with visiting(browser, Case()) as visit:
        ask(visit, "one")
        other = visit.tab()
        ask(other, "two")
        visit.page.wait_for_selector("#list .title >> nth=1")
        visit.page.click("#keep-them")
        visit.page.click("#question-no")
        visit.wait_for("document.getElementById('keep-them').checked")
        assert stored(visit.page) == [2, 4]
        visit.page.click("#keep-them")
        visit.page.click("#question-act")
        for one, title in ((visit, "one"), (other, "two")):
            one.wait_for("document.getElementById('list').children.length === 1")
            assert titles(one.page) == [title] and one.answers == ["Hello world"]
            assert not one.page.is_checked("#keep-them")
        ask(visit, "more")
        assert stored(visit.page) == [0, 0] and len(visit.answers) == 2
        other.page.reload()
        other.wait_for("!document.getElementById('keep-them').checked")
        assert other.answers == [] and titles(other.page) == []
        visit.page.click("#keep-them")
        visit.wait_for("document.getElementById('keep-them').checked")
        other.page.wait_for_selector("#list >> text=one")
        visit.page.reload()
        visit.page.wait_for_selector(".answer >> nth=1")
        assert stored(visit.page) == [1, 4] and visit.page.evaluate("localStorage.length") == 0


def test_each_conversation_has_its_settings(browser: Any) -> None:
    case = Case()
    facts = case.state.backend.models[0].facts
    case.state.backend.models.append(replace(case.state.backend.models[0]))
    case.state.backend.models[1].facts = replace(facts, name="second")
    with visiting(browser, case) as visit:
        page = visit.page
        visit.wait_for("document.getElementById('model-name').options.length === 3")
        ask(visit, "one")
        page.click("#open-settings")
        page.select_option("#model-name", "second")
        page.fill("#system", "Be brief.")
        page.fill("#top_k", "7")
        page.click("#settings >> text=Done")
        page.click("#new")
        ask(visit, "two")  # begins with what was set last
        assert case.service.requests[-1].sampling.top_k == 7
        page.click("#open-settings")
        page.click("#clear-settings")
        page.click("#settings >> text=Done")
        visit.wait_for("!document.getElementById('settings').open")
        page.click("#list .title >> text=one")
        visit.wait_for("document.getElementById('top_k').value === '7'")
        page.click("#list .title >> text=two")
        visit.wait_for("document.getElementById('top_k').value === ''")
        assert page.input_value("#model-name") == page.input_value("#system") == ""
        page.click("#list .title >> text=one")
        visit.wait_for("document.getElementById('top_k').value === '7'")
        page.reload()
        visit.wait_for("document.getElementById('top_k').value === '7'")
        assert page.input_value("#system") == "Be brief."
        visit.wait_for("document.getElementById('model-name').options.length === 3")
        assert page.input_value("#model-name") == "second"


PASTE = """(bytes) => {
  const data = new DataTransfer();
  data.items.add(new File([new Uint8Array(bytes)], 'a.png', { type: 'image/png' }));
  const drop = new DragEvent('drop', { dataTransfer: data, bubbles: true, cancelable: true });
  const paste = new ClipboardEvent('paste', { clipboardData: data, bubbles: true });
  document.querySelector('main').dispatchEvent(drop);
  document.getElementById('prompt').dispatchEvent(paste);
}"""


def test_pictures_are_chosen_dropped_and_pasted(browser: Any) -> None:
    case = seeing_case()
    with visiting(browser, case) as visit:
        page = visit.page
        page.wait_for_selector("#attach:visible")
        page.evaluate(PASTE, list(PNG))
        with page.expect_file_chooser() as chooser:
            page.click("#attach")
        chooser.value.set_files([{"name": "a.png", "mimeType": "image/png", "buffer": PNG}])
        page.wait_for_selector("#attached li >> nth=2")
        page.click("[aria-label='Remove picture 3']")
        ask(visit, "What is it?")
        url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
        picture = {"type": "image_url", "image_url": {"url": url}}
        said = [("user", [picture, picture, {"type": "text", "text": "What is it?"}])]
        assert asked_of(case) == said and not page.is_visible("#attached")
        page.reload()
        page.wait_for_selector(".question img >> nth=1")
        visit.wait_for("document.querySelector('.question img').naturalWidth === 1")
        page.click(".question .change")
        assert page.locator("#attached li").count() == 2
        page.click("#keep")
        assert not page.is_visible("#attached")


def test_a_server_without_an_encoder_takes_no_picture(browser: Any) -> None:
    with visiting(browser, Case()) as visit:
        visit.wait_for("document.title.includes('moegraph')")
        visit.page.evaluate(PASTE, list(PNG))
        visit.page.wait_for_selector("#trouble >> text=reads no pictures")
        assert not visit.page.is_visible("#attach") and not visit.page.is_visible("#attached")


@pytest.mark.parametrize("has_libraries", [True, False])
def test_formulas_and_code(browser: Any, has_libraries: bool) -> None:
    if has_libraries and not HAS_LIBRARIES:
        pytest.skip("the build has not fetched KaTeX and highlight.js: scripts/build")
    with visiting(browser, Case([RICH])) as visit:
        page = visit.page
        if not has_libraries:
            page.route("**/page/lib/*", lambda route: route.fulfill(status=404))
            page.reload()
        ask(visit, "hi")
        assert page.inner_text(".answer pre") == "def f(x):\n    return x < 1  # <b>"
        assert "not $5 and $10" in visit.answers[0]
        if not has_libraries:
            assert page.locator(".answer math, .answer pre span").count() == 0
            assert "$$\n\\int_0^1 x\\,dx\n$$" in visit.answers[0] and "$a^2$" in visit.answers[0]
            return
        assert page.locator(".answer math").count() == 3
        assert page.get_attribute(".formula math", "display") == "block"
        assert page.inner_text(".answer .hljs-keyword >> nth=0") == "def"
        assert page.inner_text(".answer .hljs-comment") == "# <b>"


@pytest.mark.parametrize("size", [(1280, 800), (360, 740)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser: Any, scheme: str, size: tuple[int, int]) -> None:
    axe, case = axe_script(), seeing_case([RICH])
    view = {"width": size[0], "height": size[1]}
    with visiting(browser, case, color_scheme=scheme, viewport=view) as visit:
        page = visit.page
        page.wait_for_selector("#attach:visible")
        assert axe_findings(page, axe) == []
        page.evaluate(PASTE, list(PNG))
        page.wait_for_selector("#attached li")
        ask(visit, "hi")
        page.click(".answer .change")
        page.wait_for_selector(".versions:visible")
        page.wait_for_selector(".answer pre")
        for name in ("conversations", "status"):
            if not page.is_visible(f"#{name}"):
                page.click(f"#open-{name}")
        page.evaluate(PASTE, list(PNG))
        page.wait_for_selector("#attached li")
        assert axe_findings(page, axe) == []
        # nothing is beside the screen
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        for opener, dialog in (("#open-settings", "#settings"), ("text=Rename", "#question")):
            page.click(opener)
            page.wait_for_selector(f"{dialog}:modal")
            assert axe_findings(page, axe) == []
            page.keyboard.press("Escape")


def test_the_keyboard_reaches_everything(browser: Any) -> None:
    case = Case([RICH])
    with visiting(browser, case) as visit:
        page = visit.page
        page.keyboard.type("hi")
        page.keyboard.press("Enter")
        page.wait_for_selector(".figures >> text=tokens/s")
        visit.wait_until_idle()
        reached: list[str] = []
        for _ in range(60):
            page.keyboard.press("Tab")
            reached.append(page.evaluate(
                "(document.activeElement.innerText || '').trim() || document.activeElement.id"
            ))  # fmt: skip
        wanted = {"Conversations", "New chat", "Settings", "Status", "search", "hi", "Rename",
                  "Export", "Delete", "keep-them", "Export all", "Import", "Edit", "Copy",
                  "Try again", "prompt", "Send"}  # fmt: skip
        assert wanted - set(reached) == set()


def test_the_page_can_be_installed(browser: Any) -> None:
    with visiting(browser, Case()) as visit:
        session = visit.context.new_cdp_session(visit.page)
        found = session.send("Page.getAppManifest")
        assert found["errors"] == [] and found["url"].endswith("/page/manifest.webmanifest")
        manifest = json.loads(found["data"])
        assert manifest["display"] == "standalone" and manifest["icons"]
        assert session.send("Page.getInstallabilityErrors")["installabilityErrors"] in (
            [], [{"errorId": "in-incognito", "errorArguments": []}],
        )  # fmt: skip


def test_what_is_asked_before_the_database_is_open_is_kept(browser: Any) -> None:
    with visiting(browser, Case()) as visit:
        visit.context.add_init_script(
            "const open = indexedDB.open.bind(indexedDB); IDBFactory.prototype.open = (...given) =>"
            " { const asked = open(...given); const late = {};"
            " asked.onupgradeneeded = () => { late.result = asked.result;"
            " late.onupgradeneeded(); };"
            " asked.onsuccess = () => setTimeout(() => { late.result = asked.result;"
            " late.onsuccess(); }, 1000); return late; };"
        )
        page = visit.page
        page.reload()
        visit.wait_for("document.title.includes('fake')")
        ask(visit, "early")
        assert titles(page) == ["early"]
        until(lambda: stored(page) == [1, 2])
        ask(visit, "later")
        assert stored(page) == [1, 4] and len(visit.answers) == 2

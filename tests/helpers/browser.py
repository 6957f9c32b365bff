"""A real browser without a window, for tests of the page."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .patience import PATIENCE_S
from .served import served
from .server_case import Case

# Debian's, Ubuntu's, and that of GitHub's runners.
NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_MS = 1000 * PATIENCE_S


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield Playwright's browser on the Chromium of this machine; skip the test without one."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no Chromium here: none of {', '.join(NAMES)} is on the PATH")
    # Chromium's sandbox refuses to work for root, as in a container
    args = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=args)
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A tab with the page of a server, and what it asked for and complained of.

    urls: of all requests. complaints: errors of scripts and of the Content-Security-Policy.
    """

    def __init__(self, browser: Any, url: str, context: Any = None, **given: Any) -> None:
        self.url, self.context = url, context or browser.new_context(**given)
        self.context.set_default_timeout(PATIENCE_MS)
        self._page = self.context.new_page()
        self.urls: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._note)
        self.page.goto(url)

    def _note(self, message: Any) -> None:
        # a status such as 401 is no mistake of the page
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)

    @property
    def page(self) -> Any:
        """The tab, before all others: behind one, a click waits for a frame a second long."""
        if len(self.context.pages) > 1:
            self._page.bring_to_front()
        return self._page

    def tab(self) -> Visit:
        """Open a second tab of the same browser."""
        other = Visit(None, self.url, self.context)
        other.complaints = self.complaints
        return other

    def ask(self, text: str) -> None:
        """Send a message with the keyboard."""
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def wait_until_idle(self) -> None:
        """Wait until an answer is complete."""
        self.page.wait_for_selector("#send:visible")

    def wait_for(self, condition: str) -> None:
        """Wait until an expression is true; Playwright's own way is against the page's policy."""
        end = time.monotonic() + PATIENCE_S
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"not true: {condition}"
            self.page.wait_for_timeout(20)

    @property
    def answers(self) -> list[str]:
        """The texts of the answers."""
        found: list[str] = self.page.locator(".answer > .text").all_inner_texts()
        return found

    def close(self) -> None:
        """Close the tab."""
        self.context.close()


@contextmanager
def visiting(browser: Any, case: Case, **context: Any) -> Iterator[Visit]:
    """Open the page of a server; at the end, it must have asked nobody else, nor failed."""
    with served(case.app) as url:
        visit = Visit(browser, url, **context)
        try:
            yield visit
            assert visit.complaints == []
            assert [one for one in visit.urls if not one.startswith(f"{url}/")] == []
        finally:
            visit.close()


def axe_script() -> str:
    """Return axe-core; skip the test without it."""
    axe = pytest.importorskip("axe_playwright_python", reason="no axe-playwright-python")
    return (Path(axe.__file__).parent / "axe.min.js").read_text("utf-8")


def axe_findings(page: Any, script: str) -> list[str]:
    """Return what axe-core finds against accessibility."""
    page.evaluate(script)
    found = page.evaluate("() => axe.run()")
    return [
        f"{one['id']}: {node['html']} {node['failureSummary']}"
        for one in found["violations"]
        for node in one["nodes"]
    ]

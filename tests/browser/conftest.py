"""A real browser for the tests of the page: Chromium of the system, through Playwright. Without either, they are skipped."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamarl.view.data import ViewData
from llamarl.view.server import ViewServer

pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-view")
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium: make test-view")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page on a laptop's screen. The test fails if it writes any error into the console."""
    context = browser.new_context(viewport={"width": 1366, "height": 768}, color_scheme="light")
    context.set_default_timeout(30_000)
    found = context.new_page()
    errors: list[str] = []
    found.on("pageerror", lambda error: errors.append(str(error)))
    found.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    yield found
    context.close()
    assert errors == []


class Served:
    """Servers of run folders, ended with the test."""

    def __init__(self) -> None:
        self._servers: list[tuple[ViewServer, threading.Thread]] = []

    def __call__(self, *runs: Path, gpu: str = "") -> str:
        data = ViewData(runs, gpu)
        data.follow()
        server = ViewServer(data)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self._servers.append((server, thread))
        return server.url

    def close(self) -> None:
        for server, thread in self._servers:
            server.shutdown()
            server.server_close()
            server.data.close()
            thread.join()


@pytest.fixture
def serve() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()

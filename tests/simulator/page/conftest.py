"""A Chromium with the page."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_qrl.simulator.page import write_page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, BROWSERS)), None)
        own = playwright.chromium.executable_path
        executable = found or (own if Path(own).exists() else None)
        if executable is None:
            pytest.skip("no Chromium on this machine: playwright install chromium")
        chromium = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_page(tmp_path / "page.html")
    return tmp_path / "page.html"


@pytest.fixture
def page(browser, file) -> Iterator[Any]:
    """The page, opened; it may load nothing else, and must not complain."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    requests: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(file.as_uri())
    yield page
    context.close()
    assert {url.partition("#")[0] for url in requests} - {"data:,"} == {file.as_uri()}
    assert not complaints

"""The server's page in a browser: a chat, and the cache's fill layer by layer."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exportable_cache import load

pytest.importorskip("fastapi", reason="the serve extra is not installed")
pytest.importorskip("selenium", reason="no selenium: pip install selenium, and Chromium with its driver, run the page")

from .serving import MAX_CACHE_LEN, QUESTION, served

pytestmark = [pytest.mark.usefixtures("fake_backend"), pytest.mark.full]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium import webdriver

    driver = shutil.which("chromedriver")
    if driver is None:
        pytest.skip("there is no chromedriver (Debian and Ubuntu: chromium-driver)")
    options = webdriver.ChromeOptions()
    for option in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"):
        options.add_argument(option)
    found = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield found
    found.quit()


#: The page knows the model.
READY = "document.getElementById('model').textContent === 'demo'"


def wait_for(browser: Any, script: str, seconds: float = 20) -> Any:
    """What a script returns, once that is something."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, seconds).until(lambda driver: driver.execute_script(f"return {script}"))


def ask(browser: Any, question: str) -> str:
    """What is answered, when the answer has ended."""
    from selenium.webdriver.common.by import By

    browser.find_element(By.ID, "prompt").send_keys(question)
    browser.find_element(By.ID, "send").click()
    wait_for(browser, "!document.getElementById('send').disabled")
    return browser.find_elements(By.CSS_SELECTOR, "#turns > *")[-1].text


def test_a_chat_in_the_page(browser: Any, server_bundle: Path) -> None:
    expected = "".join(load(server_bundle).stream_text([{"role": "user", "content": QUESTION}]))
    with served(load(server_bundle), api_key="secret") as address:
        browser.get(f"{address}/#key=secret")
        wait_for(browser, READY)
        assert ask(browser, QUESTION).strip() == expected.strip()
        layers = wait_for(browser, "[...document.querySelectorAll('#cache .layer')].map(row => row.textContent)")
        filled = wait_for(browser, "[...document.querySelectorAll('#cache .bar > div')].map(bar => bar.style.width)")
        assert len(layers) == 4 and f"of {MAX_CACHE_LEN}" in layers[1] and layers[0].endswith("16 of 16")
        assert filled[0] == "100%" and 0 < float(filled[1].rstrip("%")) < 100
        # What a page writes of a model is text, whatever it looks like.
        ask(browser, "<img src=x onerror=document.title='run'>")
        assert browser.title == "exportable-cache"
        assert [entry["message"] for entry in browser.get_log("browser") if "favicon" not in entry["message"]] == []


def test_long_words_wrap_and_the_newest_answer_stays_in_view(browser: Any, server_bundle: Path) -> None:
    bottom = "document.documentElement.scrollHeight - innerHeight"
    with served(load(server_bundle)) as address:
        browser.get(f"{address}/#long")
        browser.set_window_size(500, 400)
        wait_for(browser, READY)
        ask(browser, "x" * 90)
        ask(browser, QUESTION)
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        assert browser.execute_script(f"return {bottom} > 100 && Math.abs(scrollY - ({bottom})) < 3")
        # A reader who has scrolled up is left there; the next question goes to the end.
        browser.execute_script("scrollTo(0, 0)")
        browser.execute_script("turn('text', 'more '.repeat(200))")
        assert browser.execute_script("return scrollY") == 0
        ask(browser, QUESTION)
        assert browser.execute_script(f"return Math.abs(scrollY - ({bottom})) < 3")


def test_a_system_message_and_a_new_conversation(browser: Any, server_bundle: Path) -> None:
    from selenium.webdriver.common.by import By

    system, question = "the code of amber is 7.", {"role": "user", "content": "amber?"}
    told = "".join(load(server_bundle).stream_text([{"role": "system", "content": system}, question]))
    alone = "".join(load(server_bundle).stream_text([question]))
    with served(load(server_bundle)) as address:
        browser.get(f"{address}/#system")
        wait_for(browser, READY)
        ask(browser, QUESTION)
        browser.find_element(By.ID, "new").click()
        assert browser.find_elements(By.CSS_SELECTOR, "#turns > *") == []
        assert ask(browser, "amber?").strip() == alone.strip()
        browser.find_element(By.ID, "new").click()
        browser.find_element(By.ID, "system").send_keys(system)
        assert ask(browser, "amber?").strip() == told.strip() != alone.strip()


def test_a_refusal_is_shown_in_the_page(browser: Any, server_bundle: Path) -> None:
    with served(load(server_bundle)) as address:
        browser.get(f"{address}/#again")
        wait_for(browser, READY)
        assert f"the cache holds {MAX_CACHE_LEN}" in ask(browser, "the code of amber " * 240)
    browser.get("about:blank")


def test_without_its_key_the_page_says_so(browser: Any, server_bundle: Path) -> None:
    with served(load(server_bundle), api_key="secret") as address:
        browser.get(address)
        found = wait_for(browser, "document.getElementById('turns').textContent")
        assert "API key is missing" in found

"""Tests of the documentation site in a headless Chromium."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
from playwright.sync_api import Browser, Route

ADDRESS = "http://localhost/"
PAGES = [
    "index",
    "get_started/concepts",
    "tutorials/callbacks",
    "how_to/choose_an_algorithm",
    "how_to/custom_networks",
    "algorithms/ppo",
    "algorithms/td3",
    "algorithms/iqn",
    "reference/api_agents",
    "reference/handlers",
    "reference/file_format",
    "project/results",
]
FIRST_RESULT = {
    "curriculum": "how_to/curricula",
    "early stopping": "reference/handlers",
    "HER": "how_to/goals",
    "learn": "get_started/first_run",
    "predict": "how_to/use_a_policy",
}
# Elements that end right of the column and are not in a part that scrolls, and equations that are higher or wider than
# their box. The theme lets headings and tables reach 8 pixels beyond the column.
FAULTS = """() => {
    const column = document.querySelector("article"), right = column.getBoundingClientRect().right + 8.5;
    const scrolls = element => element !== column
        && (getComputedStyle(element).overflowX !== "visible" || scrolls(element.parentElement));
    const wide = element => element.getBoundingClientRect().right > right && !scrolls(element.parentElement);
    const clipped = element => element.scrollHeight > element.clientHeight || element.scrollWidth > element.clientWidth;
    const faults = [...column.querySelectorAll("*")].filter(wide);
    return faults.concat([...column.querySelectorAll(".math")].filter(clipped))
        .map(element => `${element.tagName}.${element.className}: ${element.textContent.slice(0, 40)}`);
}"""


@pytest.fixture
def site(built: Path) -> Path:
    folder = built.parent / "docs"
    if not folder.exists():
        pytest.skip("make docs builds the site")
    return folder


def answer(site: Path, route: Route) -> None:
    assert route.request.url.startswith(ADDRESS), "the site loads something from the network"
    route.fulfill(path=site / urlsplit(route.request.url).path[1:])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_its_column_and_no_equation_is_clipped(
    width, scheme, site, browser: Browser, screenshots
):
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.route("**/*", lambda route: answer(site, route))
    faults = {}
    for name in PAGES:
        page.goto(f"{ADDRESS}{name}.html")
        faults[name] = page.evaluate(FAULTS)
        page.screenshot(path=screenshots / f"site-{name.replace('/', '-')}-{width}-{scheme}.png", full_page=True)
    assert {name: found for name, found in faults.items() if found} == {}


@pytest.mark.parametrize("query", FIRST_RESULT)
def test_search_finds_the_page_first(query, site, browser: Browser):
    page = browser.new_page()
    page.route("**/*", lambda route: answer(site, route))
    page.goto(f"{ADDRESS}search.html?q={quote(query)}")
    first = page.locator("ul.search li a").first
    assert (first.get_attribute("href") or "").startswith(f"{FIRST_RESULT[query]}.html")

"""The report in a real browser: quiet, offline, and usable with a keyboard, a phone, a printer."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oasis_eval.record import read_records
from oasis_eval.report.html.page import build_report
from tests.report import browser
from tests.report.html_records import EVIL, many, write_gallery

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.find() is None, reason=browser.MISSING),
]
VISIBLE = "[...document.querySelectorAll('{}')].filter(n => n.getClientRects().length)"


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Page]:
    with browser.opened() as page:
        yield page


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the golden file."""
    folder = write_gallery(tmp_path_factory.mktemp("browser") / "runs")
    path = folder.parent / "report.html"
    text = build_report(list(read_records([folder])), folders=[folder])
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def page(chromium: browser.Page, report: Path) -> browser.Page:
    """The report as a desktop in daylight shows it."""
    chromium.size(1280, 900)
    chromium.media()
    chromium.open(report)
    return chromium


def column(page: browser.Page, table: str, at: int) -> list[str]:
    """Return the texts of a column's visible cells, without note letters."""
    rows = VISIBLE.format(f"{table} > tbody > tr")
    script = f"""{rows}.map(row => {{
        const cell = row.cells[{at}].cloneNode(true);
        cell.querySelectorAll('sup').forEach(note => note.remove());
        return cell.textContent;
    }})"""
    return list(page.run(script))


def choose(page: browser.Page, identifier: str, value: str) -> None:
    """Set a filter as a reader does, and wait for it."""
    page.run(
        f"""new Promise(done => {{
            const field = document.getElementById('{identifier}');
            field.value = {value!r};
            field.dispatchEvent(new Event('input', {{bubbles: true}}));
            setTimeout(done, 200);
        }})"""
    )


def test_opens_quietly_and_offline(page: browser.Page, report: Path) -> None:
    """No error, no warning, no violated policy, no request but for the file itself."""
    assert page.complaints() == []
    assert page.requests() == [report.resolve().as_uri()]


def test_policy_stops_what_is_not_ours(page: browser.Page) -> None:
    """Even markup that got in could not run or load anything."""
    page.run(
        """(() => {
            const box = document.createElement('div');
            box.innerHTML = '<img src="https://example.org/x.png" onerror="window.bad = 1">';
            const script = document.createElement('script');
            script.textContent = 'window.bad = 1';
            document.body.append(box, script);
        })()"""
    )
    page.run("new Promise(done => setTimeout(done, 200))")
    failed = [e["params"] for e in page.events if e.get("method") == "Network.loadingFailed"]

    assert [item["blockedReason"] for item in failed] == ["csp"]
    assert page.run("window.bad === undefined")


def test_hostile_text_is_text(page: browser.Page) -> None:
    """The name in a script-made row and the completion in markup read as they were stored."""
    name = EVIL.replace("\u202e", r"\u202e").replace("\u2066", r"\u2066")
    name = name.replace("\x00", r"\u0000").replace("\x1b", r"\u001b").replace("\u2028", "\n")

    assert name in column(page, "table.records", 2)
    texts = page.run("[...document.querySelectorAll('pre')].map(node => node.textContent)")
    assert texts.count(name) >= 3
    assert page.run("document.images.length + document.scripts.length") == 2


def test_sorting_with_the_keyboard(page: browser.Page) -> None:
    """Enter on a header's button sorts, says so, and turns round; marks come last both ways."""
    header = "document.querySelector('#table-perplexity th.num[data-sort]')"
    page.run(f"{header}.querySelector('button').focus()")
    page.press("Enter")
    rising = column(page, "#table-perplexity table", 2)
    stated = page.run(f"{header}.getAttribute('aria-sort')")
    page.press("Enter")
    falling = column(page, "#table-perplexity table", 2)

    def numbers(cells: list[str]) -> list[float]:
        return [float(cell.split(" ")[0]) for cell in cells if cell[0].isdigit()]

    assert stated == "ascending"
    assert page.run(f"{header}.getAttribute('aria-sort')") == "descending"
    assert len(numbers(rising)) > 6
    assert numbers(rising) == sorted(numbers(rising))
    assert numbers(falling) == sorted(numbers(rising), reverse=True)
    for cells in (rising, falling):
        assert not any(cell[0].isdigit() for cell in cells[len(numbers(cells)) :])


def test_records_sort_by_value_and_by_name(page: browser.Page) -> None:
    """The list of records sorts by number where there is one, else by text."""
    buttons = "document.querySelectorAll('table.records > thead button')"
    page.run(f"{buttons}[6].click()")
    values = column(page, "table.records", 7)
    page.run(f"{buttons}[2].click()")
    schemes = column(page, "table.records", 3)

    finite = [float(value) for value in values if value[0].isdigit()]
    assert finite == sorted(finite)
    assert set(values[len(finite) :]) == {"inf", "NaN", "failed", "n/a"}
    assert schemes == sorted(schemes)


def test_filters_reach_tables_records_figures_and_answers(page: browser.Page) -> None:
    """One choice of model, scheme and task holds everywhere; reset shows everything again."""
    everything = column(page, "table.records", 3)
    choose(page, "scheme", "w4a4")

    assert set(column(page, "table.records", 3)) == {"w4a4"}
    assert set(column(page, "#table-perplexity table", 1)) == {"w4a4"}
    assert page.run("document.querySelector('#count').textContent").startswith("9 of 24")
    choose(page, "task", "gsm8k")
    assert set(column(page, "table.records", 4)) == {"gsm8k"}
    assert page.run(VISIBLE.format("#table-perplexity td[data-task]") + ".length") == 0
    assert page.run(VISIBLE.format("#figures figure[data-task]") + ".length") == 0
    page.run("document.querySelector('#reset').click()")
    assert everything == column(page, "table.records", 3)


def test_text_filter(page: browser.Page) -> None:
    """Words find records, rows and questions."""
    choose(page, "find", "OUT OF memory")
    found = column(page, "table.records", 2)
    choose(page, "find", "how many 12?")
    questions = page.run(VISIBLE.format(".question > h4") + ".map(node => node.textContent)")

    assert found == ["SmolLM2-135M (from Q4)"]
    assert questions == ["Question 12"]


def test_flips_only(page: browser.Page) -> None:
    """The box leaves the questions whose answer changes."""
    before = page.run(VISIBLE.format(".question") + ".length")
    page.run("document.querySelector('#flips').click()")
    page.run("new Promise(done => setTimeout(done, 200))")
    after = page.run(VISIBLE.format(".question") + ".length")
    marked = page.run("document.querySelectorAll('.question[data-flips]').length")

    assert 0 < after < before
    assert after == marked


def test_details_of_a_record(page: browser.Page) -> None:
    """The button unfolds what is known, and its links open what they lead to."""
    button = "window.button"
    page.run(
        f"{button} = [...document.querySelectorAll('table.records > tbody > tr')]"
        ".find(row => row.querySelector('.status.ok')).querySelector('button')"
    )
    page.run(f"{button}.focus()")
    page.press("Enter")
    text = page.run("document.querySelector('.inside').textContent")
    page.run("document.querySelector('.inside a[href^=\"#protocol\"]').click()")
    page.run("new Promise(done => setTimeout(done, 100))")

    assert page.run(f"{button}.getAttribute('aria-expanded')") == "true"
    assert "checkpoint sha256" in text
    assert "Numbers" in text
    assert page.run("document.querySelector(location.hash).open")


def test_figures_speak_to_the_keyboard(page: browser.Page) -> None:
    """A figure is one stop of Tab; arrows move through its marks and say each value."""
    page.run("document.querySelector('#figures svg.chart [tabindex]').focus()")
    first = page.run("document.querySelector('#tip').textContent")
    page.press("ArrowRight")
    second = page.run("document.querySelector('#tip').textContent")

    assert first != second
    assert "w8a8" in first
    assert (
        page.run(
            "document.querySelectorAll('#figures svg.chart')[0]"
            ".querySelectorAll('[tabindex]').length"
        )
        == 1
    )
    assert page.run("document.activeElement.getAttribute('aria-label')") == second


def test_skip_link_is_the_first_stop(page: browser.Page) -> None:
    """Tab shows the link over the head of the page."""
    page.press("Tab")

    assert page.run("document.activeElement.className") == "skip"
    assert page.run("document.activeElement.getBoundingClientRect().left") >= 0


def _colours(page: browser.Page) -> list[int]:
    script = "[document.body, document.querySelector('.panel'), document.querySelector('h2')]"
    text = page.run(
        f"{script}.map(n => getComputedStyle(n).backgroundColor + getComputedStyle(n).color)"
    )
    assert all(item.startswith("rgb") for item in text)
    return text


def test_dark_mode(page: browser.Page) -> None:
    """The reader's system decides; the whole page follows."""
    light = _colours(page)
    picture = page.picture()
    page.media(scheme="dark")
    dark = _colours(page)

    assert all(one != other for one, other in zip(light, dark, strict=True))
    assert page.picture() != picture


def test_phone_scrolls_down_alone(page: browser.Page, report: Path) -> None:
    """At 390 pixels nothing sticks out; wide tables scroll in their own box."""
    page.size(390, 800)
    page.open(report)

    assert page.run("document.documentElement.scrollWidth") == 390
    wide = "[...document.querySelectorAll('.scroll')].filter(n => n.scrollWidth > n.clientWidth)"
    moved = page.run(f"{wide}.map(n => (n.scrollLeft = 20, n.scrollLeft))")
    assert moved
    assert set(moved) <= set(range(1, 21))


def test_print_has_everything_but_the_controls(page: browser.Page) -> None:
    """On paper there are no buttons, and nothing is folded away or cut off."""
    page.media("print")
    hidden = page.run("getComputedStyle(document.querySelector('.controls')).display")
    page.run("dispatchEvent(new Event('beforeprint'))")
    folded = page.run("document.querySelectorAll('details:not([open])').length")
    page.run("dispatchEvent(new Event('afterprint'))")
    pages = page.call("Page.printToPDF")["data"]

    assert hidden == "none"
    assert folded == 0
    assert page.run("document.querySelectorAll('details:not([open])').length") > 0
    assert len(pages) > 10_000


def test_readable_without_script(chromium: browser.Page, report: Path) -> None:
    """Verdict, tables and the list of records are there; controls that would be dead are not."""
    chromium.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        chromium.open(report)
        chromium.call("Emulation.setScriptExecutionDisabled", value=False)
        rows = chromium.run("document.querySelectorAll('table.records tbody tr').length")
        buttons = chromium.run(VISIBLE.format("button") + ".length")
        verdict = chromium.run("document.querySelector('#verdict').textContent")
    finally:
        chromium.call("Emulation.setScriptExecutionDisabled", value=False)

    assert rows == 24
    assert buttons == 0
    assert "Worst: " in verdict


def test_thousand_records_open_in_two_seconds(chromium: browser.Page, tmp_path: Path) -> None:
    """Rows come in chunks, so that a large report is as quick as a small one."""
    path = tmp_path / "many.html"
    path.write_text(build_report(many(1000)), encoding="utf-8")
    start = time.perf_counter()
    chromium.open(path)
    shown = chromium.run("document.querySelectorAll('table.records tbody tr').length")
    seconds = time.perf_counter() - start
    chromium.run("document.querySelector('table.records').parentElement.nextElementSibling.click()")

    assert chromium.complaints() == []
    assert shown == 100
    assert chromium.run("document.querySelectorAll('table.records tbody tr').length") == 600
    assert seconds < 6.0  # two on a quiet machine


def test_picture_has_the_size_of_the_window(page: browser.Page) -> None:
    """Screenshots are of what was set: the other tests look at the right window."""
    width, height = struct.unpack(">II", page.picture()[16:24])

    assert (width, height) == (1280, 900)

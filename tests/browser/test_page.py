"""A page of plans in a real browser: what it shows, and how it answers to mouse and keys."""

import json
import shutil
from contextlib import contextmanager
from dataclasses import replace

import pytest

from megatron_epp.plan.chunk import Borrowed
from megatron_epp.plan.simulation import simulate
from megatron_epp.tools.report.page.html import Shown, save_page
from tests.support.plan.report_plans import measured_run, sliced_plan, with_offload
from tests.support.plan.small_plans import chunk, make_plan

webdriver = pytest.importorskip("selenium.webdriver", reason='needs selenium: pip install "megatron-epp[dev]"')
CHROMIUM, DRIVER = (shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver"))
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs Chromium and its driver: apt-get install chromium chromium-driver"
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--window-size=1400,900"),
)


@contextmanager
def started(folder):
    """A browser with a new profile in a folder."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield Page(driver)
    finally:
        driver.quit()


class Page:
    """A page in a browser, with what its user does."""

    def __init__(self, driver):
        self.driver = driver

    def show(self, folder, *plans, scheme="light"):
        """Open the page of plans, which is written into a folder."""
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
        for log in ("browser", "performance"):
            self.driver.get_log(log)  # what was written so far is of other pages
        save_page(plans, folder / "page.html")
        self.driver.get((folder / "page.html").as_uri())
        self.wait("return document.querySelectorAll('#chunks tbody tr').length > 0")

    def ask(self, script, *arguments):
        return self.driver.execute_script(f"return {script}", *arguments)

    def wait(self, script):
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 20).until(lambda driver: driver.execute_script(script))

    def settle(self):
        """Wait until what is due is drawn."""
        self.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")

    def press(self, *keys):
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()
        self.settle()

    def click(self, selector):
        self.driver.find_element("css selector", selector).click()
        self.settle()

    def point(self, pane, rank, time_us):
        """Pixels of a time on a rank's lane, from the corner of the window."""
        script = """((number, rank, time) => {
            const pane = epp.panes[number], area = pane.holder.getBoundingClientRect(), lane = epp.laneBox(pane, rank);
            return [Math.round(area.left + epp.scaleOf(pane).x(time)), Math.round(area.top + lane.top + lane.height / 2)];
        })(...arguments)"""
        return self.ask(script, pane, rank, time_us)

    def move_to(self, pane, rank, time_us, *, click=False):
        from selenium.webdriver.common.actions.action_builder import ActionBuilder

        builder = ActionBuilder(self.driver)
        builder.pointer_action.move_to_location(*self.point(pane, rank, time_us))
        if click:
            builder.pointer_action.click()
        builder.perform()
        self.settle()

    def text(self, selector):
        return self.driver.find_element("css selector", selector).text

    def visible(self):
        return self.ask("[epp.state.from, epp.state.to]")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with started(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def plan():
    return with_offload(sliced_plan(num_ranks=3, slices=3, batched=4), chunk=0)


@pytest.fixture
def page(browser, plan, tmp_path):
    """The page of a plan, a run of it, and another plan of the batch."""
    browser.show(tmp_path, Shown("one", plan, measured_run(plan, 1.5)), Shown("two", sliced_plan(3, 3, 4)))
    return browser


def middle(plan, rank, position):
    timeline = simulate(plan)
    return (timeline.start_us[rank][position] + timeline.end_us[rank][position]) / 2


def test_it_opens_without_errors_and_without_requests(page):
    assert [entry for entry in page.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    assert page.ask("performance.getEntriesByType('resource').length") == 0
    messages = [json.loads(entry["message"])["message"] for entry in page.driver.get_log("performance")]
    sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    here = page.driver.current_url
    assert [one["request"]["url"] for one in sent if one["documentURL"] == here] == [here], (
        "of the browser's own tabs, no matter"
    )


def test_the_browser_counts_the_simulators_memory_and_times(page, plan):
    timeline = simulate(plan)
    peaks = page.ask("epp.plans[0].memory.peak.map((_, rank) => Math.max(...epp.plans[0].live(rank).bytes))")
    assert peaks == list(timeline.peak_bytes)
    assert max(page.ask("Array.from(epp.plans[0].planned.end)")) == pytest.approx(timeline.makespan_us, abs=2e-3)


def test_the_pointer_tells_what_a_box_is_and_what_an_idle_rank_waits_for(page, plan):
    step = plan.ranks[1][2]
    page.move_to(0, 1, middle(plan, 1, 2))
    shown = page.text("#tooltip")
    assert shown.startswith(f"{step.action}: forward of chunk {step.action.chunk}")
    assert f"{plan.chunks[step.action.chunk].num_tokens:,} tokens" in shown
    assert "1.50 times as planned" in shown
    page.move_to(1, 1, 1.5 * middle(plan, 1, 2))
    assert page.text("#tooltip").startswith(f"{step.action}: forward"), "a run has its own boxes"
    page.move_to(0, 2, 100.0)
    shown = page.text("#tooltip")
    assert shown.startswith("rank 2 is idle")
    assert "1F0 of rank 1" in shown
    assert "activation" in shown


def test_the_details_say_how_much_of_the_time_a_rank_waits_and_for_what(page, plan):
    timeline = simulate(plan)
    page.driver.execute_script("document.querySelector('.lanes').focus()")
    page.press("\ue015")
    shown = page.text("#details")
    busy = timeline.busy_us[1] / timeline.makespan_us
    assert f"computes {100 * busy:.1f}" in shown
    assert "before its first action" in shown
    assert "waits for a backward of rank 2" in shown


def test_keys_zoom_pan_and_show_the_whole(page):
    assert page.visible() == [0, 1]
    page.press("+")
    start, end = page.visible()
    assert end - start == pytest.approx(0.5)
    page.press("\ue014")
    assert page.visible()[0] > start
    page.press("-", "-")
    assert page.visible() == [0, 1]
    page.click("#zoom-in")
    page.press("0")
    assert page.visible() == [0, 1]


def test_a_row_of_the_table_highlights_its_chunk_in_all_plans_of_the_batch(page):
    page.click("#chunks tbody tr:nth-child(3)")
    assert page.ask("epp.state.chunk.chunk") == 2
    assert page.ask("epp.state.chunk.marks.map((marks) => Array.from(marks))") == [[0, 0, 1, 0, 0, 0, 0]] * 2
    assert page.text("#details h3") == "chunk 2"
    page.press("\ue00c")
    assert page.ask("epp.state.chunk") is None


def test_a_chunk_names_what_its_sequences_borrow_and_its_trees_are_highlighted_half_as_much(browser, tmp_path):
    """Sequences 1 and 2 begin as sequence 0, and 4 as 3."""
    chunks = chunk((0, 0, 3000)), chunk((1, 2000, 3000), (2, 2500, 2600)), chunk((3, 0, 900), (4, 500, 900)), chunk((5, 0, 9))
    plan, none = make_plan(["0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0"], chunks, static_bytes=0), Borrowed(-1, 0)
    borrowed = none, Borrowed(0, 2000), Borrowed(0, 2500), none, Borrowed(3, 500), none
    plan = replace(plan, lengths=(3000, 3000, 2600, 900, 900, 9), borrowed=borrowed)
    browser.show(tmp_path, Shown("trees", plan))
    browser.move_to(0, 0, middle(plan, 0, 1), click=True)
    shown = (
        "1, tokens 2,000 to 3,000 of 3,000, its first 2,000 from sequence 0; 2, tokens 2,500 to 2,600 of 2,600, its first 2,500"
    )
    assert shown in browser.text("#details")
    assert "1[2000:3000]<0 2[2500:2600]<0" in browser.text("#chunks tr[data-chunk='1']")
    assert browser.ask("Array.from(epp.state.chunk.marks[0])") == [2, 1, 0, 0]
    assert browser.text("#chunks tr[data-chunk='3']").endswith(" 5")


def test_a_click_on_a_box_selects_its_row_and_its_rank(page, plan):
    page.move_to(0, 2, middle(plan, 2, 4), click=True)
    step = plan.ranks[2][4]
    assert page.text("#details h3").startswith(f"{step.action}: ")
    row = page.driver.find_element("css selector", "#chunks tr[aria-selected=true]")
    assert row.text.startswith(f"{step.action.chunk} ")
    assert page.ask("epp.state.rank") == 2
    page.press(".")
    assert page.text("#details h3").startswith(f"{plan.ranks[2][5].action}: ")


def test_the_table_is_sorted_and_searched(page, plan):
    page.click("#chunks th button[data-column=tokens]")
    page.click("#chunks th button[data-column=tokens]")
    most = max(range(len(plan.chunks)), key=lambda chunk: plan.chunks[chunk].num_tokens)
    assert page.text("#chunks tbody tr").startswith(f"{most} ")
    page.driver.find_element("id", "find").send_keys("0")
    assert page.ask("document.querySelectorAll('#chunks tbody tr').length") == 3, "sequence 0 has three slices"


def test_tab_reaches_timelines_and_table_and_arrows_choose_there(page):
    page.ask("document.querySelector('.lanes').focus()")
    page.press("\ue015")
    assert page.ask("epp.state.rank") == 1
    page.ask("document.querySelector('#chunks tbody tr').focus()")
    page.press("\ue015")
    assert page.ask("epp.state.chunk.chunk") == 1
    reached = set()
    for _ in range(25):
        page.press("\ue004")
        reached.add(page.ask("document.activeElement.className || document.activeElement.id || document.activeElement.tagName"))
    assert {"lanes", "find", "TR", "theme", "help"} <= reached


def test_dark_and_light_are_the_systems_until_one_is_chosen(page, browser, plan, tmp_path):
    surface = "getComputedStyle(document.body).backgroundColor"
    light = page.ask(surface)
    page.press("t")
    dark = page.ask(surface)
    assert dark != light
    browser.show(tmp_path, Shown("one", plan), scheme="dark")
    assert browser.ask(surface) == dark
    browser.click("#theme")
    assert browser.ask(surface) == light


def test_a_slow_run_shares_the_time_axis_of_its_plan_and_a_far_slower_one_has_its_own_and_says_so(browser, plan, tmp_path):
    ends = "epp.panes.map((pane) => epp.scaleOf(pane).x(pane.makespanUs))"
    for slowdown, is_equal in ((6.0, False), (15.0, True)):
        browser.show(tmp_path, Shown("one", plan, measured_run(plan, slowdown)))
        planned, measured = browser.ask(ends)
        assert (planned == pytest.approx(measured)) is is_equal
        assert browser.driver.find_element("id", "own-scale").get_attribute("aria-pressed") == str(is_equal).lower()
        assert ("on a time axis of its own" in browser.text(".head")) is is_equal
        browser.press("s")
        planned, measured = browser.ask(ends)
        assert (planned == pytest.approx(measured)) is not is_equal


def test_a_note_with_markup_is_shown_as_text(browser, tmp_path):
    bad = "</script><img src=x onerror=document.title='broken'>"
    browser.show(tmp_path, Shown(bad, replace(sliced_plan(), notes=(bad,))))
    assert bad in browser.text("#details")
    assert browser.ask("document.querySelectorAll('img').length") == 0
    assert browser.ask("document.title").startswith("megatron-epp: ")


def test_many_narrow_boxes_are_drawn_as_shares_and_found_again_by_zooming(browser, tmp_path):
    plan = sliced_plan(num_ranks=8, slices=100, batched=400)
    browser.show(tmp_path, Shown("many", plan))
    step, at = plan.ranks[3][250], middle(plan, 3, 250)
    browser.move_to(0, 3, at, click=True)
    assert browser.ask("epp.state.selected !== null")
    browser.press("z")
    browser.move_to(0, 3, at)
    assert browser.text("#tooltip").startswith(f"{step.action}: ")
    assert [entry for entry in browser.driver.get_log("browser") if entry["level"] == "SEVERE"] == []

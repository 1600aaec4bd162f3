"""The HTML page in a real browser: controls, links and keyboard; light, dark and printed; at three widths."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings

from ampdbg.diagnosis.ranges import window
from ampdbg.record.findings import Finding, Source
from ampdbg.record.run import Record, Site
from ampdbg.report import suggestion
from scripts.browser import Tab, browser, installed
from tests.report.page.samples import HOSTILE, hostile, large, write_page
from tests.report.records import healthy, healthy_step, run
from tests.report.runs import RUNS, record_of
from tests.strategies import records

PROGRAM = installed()

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed (Debian's package: chromium)")

WIDTHS = (390, 900, 1440)


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    assert PROGRAM is not None
    with browser(PROGRAM) as opened:
        yield opened


@pytest.fixture
def shown(tab: Tab, tmp_path: Path) -> Iterator[Tab]:
    """A tab for one page. At the end the browser must have reported no problem and loaded nothing else."""
    tab.problems.clear()
    tab.requests.clear()
    tab.see()
    yield tab
    assert tab.problems == []
    assert {address.partition(":")[0] for address in tab.requests} <= {"file"}
    assert len(tab.requests) <= 1 + tab.requests.count("about:blank")


RANGES = "ranges_example"


def open_page(tab: Tab, record: Record, folder: Path, width: int = 1280) -> None:
    tab.open(write_page(record, folder / "page.html"), width)


def is_marked(site: Site, power: int) -> str:
    """The mark of a site at a loss scale of 2**power, by the record's own window of the site."""
    if site.phase == "forward":
        return "over" if site.overflow else ""
    scale = 2.0**power
    if site.scale_ceiling is not None and scale > site.scale_ceiling:
        return "over"
    return "under" if site.scale_floor is not None and scale < site.scale_floor and not site.is_noise else ""


@pytest.mark.parametrize("name", RUNS)
def test_every_page_is_drawn_without_a_problem(name: str, shown: Tab, tmp_path: Path) -> None:
    open_page(shown, record_of(name), tmp_path)
    assert shown.ask("document.documentElement.dataset.done") == "true"
    assert shown.ask("document.getElementById('trouble').hidden")


def with_noise() -> Record:
    """A profile in which only a gradient of rounding errors would raise the floor of the window."""
    record = large(60, 6)
    tight = max((one for one in record.sites if one.phase == "backward"), key=lambda one: one.scale_floor or 0.0)
    noise = replace(tight, is_noise=True)
    return replace(record, sites=tuple(noise if one is tight else one for one in record.sites))


SLID = {"real": record_of(RANGES), "without a window": record_of("ranges_no_scale"), "with noise": with_noise()}


@pytest.mark.parametrize("name", SLID)
def test_the_slider_marks_sites_by_the_windows_of_the_record(name: str, shown: Tab, tmp_path: Path) -> None:
    record = SLID[name]
    open_page(shown, record, tmp_path)
    low, count = shown.ask("[page.sites.scales.low, page.sites.scales.words.length]")
    whole = window(record.sites)
    seen = set()
    for power in range(low, low + count):
        shown.ask(
            f"(() => {{ const it = byId('scale'); it.value = {power}; it.dispatchEvent(new Event('input')); }})()"
        )
        states = shown.ask("page.sites.line.map((_, site) => state(site))")
        assert states == [is_marked(site, power) for site in record.sites], power
        says = shown.ask("byId('scale-says').textContent")
        gradients = [state for state, site in zip(states, record.sites, strict=True) if site.phase == "backward"]
        assert says.startswith(f"{gradients.count('over')} of {len(gradients)} gradients overflow")
        assert (not any(gradients)) == (whole.floor <= 2.0**power <= whole.ceiling)
        seen.add(tuple(states))
    assert len(seen) > 3, "the marks do not move"
    assert ("No scale works for the whole model" in says) == (not whole.is_open)


GRADIENTS = """(() => {
  const canvas = byId('map'), box = geometry(canvas), turn = page.sites.phase.indexOf('b');
  const left = box.left + (turn / page.sites.phase.length) * box.room + 3;
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d', { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const pixels = (x, width) => copy.getImageData(x, MAP.top + 2, width, box.height - MAP.top - 26).data.join();
  return [pixels(box.left + 1, left - box.left - 8), pixels(left, box.width - left - 10)];
})()"""
"""The pixels of the forward pass and of the gradients."""


def test_arrow_keys_on_the_slider_redraw_only_the_gradients(shown: Tab, tmp_path: Path) -> None:
    open_page(shown, record_of(RANGES), tmp_path)
    shown.ask("byId('scale').focus()")
    shown.settle()
    before, (forward, gradients) = shown.ask("page.power"), shown.ask(GRADIENTS)
    shown.press("ArrowRight")
    forward_now, gradients_now = shown.ask(GRADIENTS)
    assert shown.ask("page.power") == before + 1
    assert forward_now == forward
    assert gradients_now != gradients
    shown.press("Home")
    assert shown.ask("page.power === page.sites.scales.low")
    assert shown.ask("byId('scale').getAttribute('aria-valuetext') === byId('scale-value').textContent")


def test_sites_are_found_by_module(shown: Tab, tmp_path: Path) -> None:
    record = record_of(RANGES)
    open_page(shown, record, tmp_path)
    module = record.sites[0].module
    expected = sum(module in site.module for site in record.sites)
    shown.ask(
        f"(() => {{ byId('find').value = {json.dumps(module)}; byId('find').dispatchEvent(new Event('input')); }})()"
    )
    shown.wait_for(f"byId('found').textContent.startsWith('{expected} of {len(record.sites)} sites')")
    rows = shown.ask("[...document.querySelectorAll('#sites .row')].map((row) => row.textContent)")
    assert rows
    assert all(module in row for row in rows)
    shown.ask("(() => { byId('find').value = 'no such thing'; byId('find').dispatchEvent(new Event('input')); })()")
    shown.wait_for("byId('found').textContent.startsWith('0 of ')")


def test_the_danger_filter_keeps_marked_and_nearly_overflowing_sites(shown: Tab, tmp_path: Path) -> None:
    record = large(200, 20)
    open_page(shown, record, tmp_path)
    power = shown.ask("page.power")
    near = [site.phase == "forward" and site.headroom_bits < 2.0 for site in record.sites]
    expected = sum(bool(is_marked(site, power)) or is_near for site, is_near in zip(record.sites, near, strict=True))
    assert 0 < sum(near) < expected < len(record.sites)
    shown.click("#only-marked")
    assert shown.ask("byId('found').textContent").startswith(f"{expected} of ")


def test_the_link_of_a_finding_shows_its_line_in_any_file(shown: Tab, tmp_path: Path) -> None:
    record = large(200, 20)
    places = [Source(one.file, number, "forward", one.lines[number - 1].strip()) for one, number in
              ((record.listings[0], 3), (record.listings[3], 290), (record.listings[3], 17))]  # fmt: skip
    findings = tuple(Finding("forward-overflow", "error", 0, "forward", f"at {one.line}", source=one) for one in places)
    open_page(shown, replace(record, findings=findings), tmp_path)
    shown.click("details.rest summary")
    for number, place in enumerate(places):
        shown.click(f"#finding-{number} a[data-line]")
        assert shown.ask("document.querySelector('.code .here').dataset.line") == str(place.line)
        assert shown.ask("document.querySelector('.code .here .text').textContent").strip() == place.text
        assert shown.ask("document.querySelector('.code .here').nextElementSibling.textContent").endswith(
            f"at {place.line}"
        )
        assert shown.ask("document.querySelector('#files [aria-selected=true] bdi').textContent") in place.file
        assert shown.ask(IS_IN_SIGHT), place


IS_IN_SIGHT = """(() => {
  const row = document.querySelector('.code .here').getBoundingClientRect(), box = byId('code').getBoundingClientRect();
  return row.top >= box.top && row.bottom <= box.bottom;
})()"""


def test_a_link_to_a_folded_finding_unfolds_it(shown: Tab, tmp_path: Path) -> None:
    finding = Finding("forward-overflow", "error", 0, "forward", "too large", module="model.layers.0")
    open_page(shown, replace(large(40, 8), findings=(finding,) * 3 + (replace(finding, module="model"),)), tmp_path)
    assert not shown.ask("document.querySelector('details.rest').open")
    shown.click("#tree a[href='#finding-3']")
    shown.wait_for("document.querySelector('details.rest').open")


def test_the_copy_button_copies_the_exact_patch(shown: Tab, tmp_path: Path) -> None:
    record = record_of("suggestion")
    open_page(shown, record, tmp_path)
    shown.ask("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }")
    shown.click(".diff .copy")
    content = suggestion.content(record)
    assert content is not None
    assert shown.ask("window.copied") == content.decode()


def test_arrow_keys_select_sites_and_enter_opens_the_source_line(shown: Tab, tmp_path: Path) -> None:
    record = record_of(RANGES)
    open_page(shown, record, tmp_path)
    shown.ask("byId('sites').focus()")
    for key, chosen in (
        ("ArrowDown", 0),
        ("ArrowDown", 1),
        ("End", len(record.sites) - 1),
        ("ArrowUp", len(record.sites) - 2),
    ):
        shown.press(key)
        assert shown.ask("page.chosen") == chosen
        assert shown.ask("byId('sites').getAttribute('aria-activedescendant')") == f"site-{chosen}"
        assert shown.ask("document.querySelector('#sites [aria-selected=true]').dataset.site") == str(chosen)
    shown.press("Enter")
    source = record.sites[-2].source
    assert source is not None
    assert shown.ask("document.querySelector('.code .here').dataset.line") == str(source.line)


def test_the_map_selects_and_zooms_by_keyboard(shown: Tab, tmp_path: Path) -> None:
    open_page(shown, record_of(RANGES), tmp_path)
    shown.ask("byId('map').focus()")
    shown.press("ArrowRight")
    assert shown.ask("page.chosen") == 0
    assert shown.ask("byId('map-readout').textContent.length") > 20
    shown.press("+")
    size = shown.ask("map.to - map.from")
    assert size < shown.ask("page.sites.line.length")
    shown.press("0")
    assert shown.ask("map.to - map.from === page.sites.line.length")


def test_the_module_tree_folds_and_searches_by_keyboard(shown: Tab, tmp_path: Path) -> None:
    open_page(shown, record_of(RANGES), tmp_path)
    rows = "document.querySelectorAll('#tree tbody tr').length"
    everything = shown.ask(rows)
    shown.ask("document.querySelector('#tree tbody tr').focus()")
    shown.press("ArrowLeft")
    assert shown.ask(rows) == 1
    assert shown.ask("document.activeElement.getAttribute('aria-expanded')") == "false"
    shown.press("ArrowRight")
    assert shown.ask(rows) == everything
    shown.press("ArrowDown")
    assert shown.ask("document.activeElement.dataset.at") == "1"
    shown.ask("byId('find-module').focus()")
    for char in "attn":
        shown.press(char)
    names = shown.ask("[...document.querySelectorAll('#tree .module')].map((it) => it.textContent)")
    assert names
    assert len(names) < everything
    assert any("attn" in name for name in names)


def test_arrow_keys_on_the_timeline_show_the_values_of_a_step(shown: Tab, tmp_path: Path) -> None:
    record = record_of("scan_runaway_scale")
    open_page(shown, record, tmp_path)
    shown.ask("document.querySelector('#timeline svg').focus()")
    shown.press("Home")
    assert shown.ask("byId('timeline-readout').textContent").startswith(f"step {record.steps[0].step} · loss ")
    skipped = next(at for at, step in enumerate(record.steps) if step.skipped)
    for _ in range(skipped):
        shown.press("ArrowRight")
    assert "skipped" in shown.ask("byId('timeline-readout').textContent")
    drawn = shown.ask("document.querySelectorAll('#timeline .skipped').length")
    assert drawn == sum(step.skipped for step in record.steps)


@pytest.mark.parametrize("norms", [(1.3e17, 1.3e17), (-1.7e308, 1.7e308), (0.0, 0.0), (5e-324, 1e-310)])
def test_gradient_norms_of_any_size_are_drawn(norms: tuple[float, ...], shown: Tab, tmp_path: Path) -> None:
    steps = [replace(healthy_step(number), grad_norm=norm) for number, norm in enumerate(norms)]
    open_page(shown, run(steps), tmp_path)
    assert shown.ask("document.querySelectorAll('#timeline .curve').length") == 3


def test_user_texts_are_shown_and_not_executed(shown: Tab, tmp_path: Path) -> None:
    open_page(shown, hostile(), tmp_path)
    shown.click("#unfold")
    for selector in ("#sites", "#tree", "#files button", "#map", "#timeline svg"):
        shown.click(selector)
    assert shown.ask("document.title").startswith("ampdbg suggest-fp32")
    assert shown.ask("document.querySelectorAll('img, iframe, object, main script').length") == 0
    text = shown.ask("document.body.innerText")
    assert HOSTILE[1] in text
    assert "\\x1b[31mred" in text
    assert "\\u202egnp.exe" in text


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_each_width_with_enough_contrast(scheme: str, width: int, shown: Tab, tmp_path: Path) -> None:
    shown.see(scheme=scheme)
    open_page(shown, record_of("ranges_overflow"), tmp_path, width)
    assert shown.ask("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert shown.ask(CONTRAST) == []
    shown.screenshot(tmp_path / "page.png", whole=True)
    assert (tmp_path / "page.png").stat().st_size > 20_000


CONTRAST = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")
"""Lists the texts with a contrast below WCAG's 4.5 : 1."""


def test_the_page_prints_in_light_colors_without_cut_code(shown: Tab, tmp_path: Path) -> None:
    shown.see(media="print", scheme="dark")
    open_page(shown, record_of("ranges_overflow"), tmp_path)
    assert shown.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not shown.ask("byId('find').checkVisibility()")
    assert not shown.ask("document.querySelector('.top').checkVisibility()")
    assert shown.ask("byId('code').scrollHeight <= byId('code').clientHeight + 2"), "code is cut off"
    shown.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


def test_the_page_shows_the_patch_if_scripts_are_disabled(shown: Tab, tmp_path: Path) -> None:
    shown.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        shown.call("Page.navigate", url=write_page(record_of("suggestion"), tmp_path / "page.html").as_uri())
        time.sleep(0.5)
        document = shown.call("DOM.getDocument", depth=-1)["root"]
        text = json.dumps(document, ensure_ascii=False)
    finally:
        shown.call("Emulation.setScriptExecutionDisabled", value=False)
    record = record_of("suggestion")
    assert "are drawn by a script, which does not run here" in text
    assert record.handover is not None
    assert record.handover.files[0].path in text
    assert "the patch for" in text


def test_a_large_page_renders_only_the_visible_part(shown: Tab, tmp_path: Path) -> None:
    """Asserts no time, but that all sites are there and that the document holds only the visible ones."""
    open_page(shown, large(20_000, 2000), tmp_path)
    assert shown.ask("byId('found').textContent") == "20,000 of 20,000 sites"
    assert shown.ask("page.levels.length") > 20_000
    assert shown.ask("document.querySelectorAll('*').length") < 8000
    shown.ask("byId('map').focus()")
    shown.press("End")
    assert shown.ask("page.chosen") == 19_999
    assert shown.ask("document.querySelector('#sites [aria-selected=true]').dataset.site") == "19999"


def test_a_page_without_sites_or_steps_omits_their_sections(shown: Tab, tmp_path: Path) -> None:
    open_page(shown, replace(healthy(), steps=(), groups=()), tmp_path)
    assert shown.ask("document.querySelector('#timeline, #ranges, #modules, #source')") is None


@pytest.mark.slow
@given(record=records())
@settings(max_examples=60, phases=[Phase.explicit, Phase.generate])
def test_every_record_is_drawn(record: Record, tab: Tab, tmp_path_factory: pytest.TempPathFactory) -> None:
    tab.problems.clear()
    open_page(tab, record, tmp_path_factory.mktemp("page"))
    assert tab.problems == []
    assert tab.ask("document.getElementById('trouble').hidden")

"""The HTML page: its contents without the script, the script's data, its size, and its content security policy."""

import base64
import hashlib
import json
import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings

from ampdbg.diagnosis.ranges import module_windows, window
from ampdbg.escapes import printable
from ampdbg.record.file import from_json
from ampdbg.record.pins import FileDiff, Handover, Trial
from ampdbg.record.run import Record
from ampdbg.report.formats.html import NOT_EXACT, NOT_WHOLE, drawn
from tests.report.page.samples import HOSTILE, Parsed, data_of, hostile, html, large, unpacked
from tests.report.pages import rendered
from tests.report.records import healthy, healthy_step, run, skipped_step
from tests.report.runs import RUNS, json_of, record_of
from tests.strategies import records


def words(text: str) -> list[str]:
    """The words of a text, independent of line breaks and drawing."""
    return re.findall(r"[\w.,:/()'-]*\w[\w.,:/()'-]*", text)


DRAWN = re.compile(r"[┤└│━┃]|^ *(step|skipped|loss inf/NaN)  |ampdbg explain|^  *[\d…]+  |^(Record:|Loss scale$)")
"""Lines that the script draws, and lines with another order on the page."""


@pytest.mark.parametrize("name", RUNS)
def test_the_html_page_has_every_word_of_the_terminal_page(name: str) -> None:
    record = record_of(name)
    shown = " ".join(words(Parsed(html(record)).text))
    for line in rendered(record, width=400).splitlines():
        if not DRAWN.search(line):
            assert [word for word in words(line) if word not in shown] == [], line
    assert "(words=" not in shown, "data as Python has it, not as text"


def test_the_html_page_has_the_patch_without_its_script() -> None:
    page = html(record_of("suggestion"))
    shown = Parsed(page).text
    assert all(line in shown for line in handover().files[0].diff.splitlines())
    assert "<noscript>" in page
    assert "Copy" in shown


def handover() -> Handover:
    made = record_of("suggestion").handover
    assert made is not None
    return made


def test_the_content_policy_allows_only_the_pages_own_script_and_style() -> None:
    page = html(hostile())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    texts = [text for tag in ("script", "style") for text in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)]
    hashes = ["sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
    assert len(hashes) == 2
    assert policy[1] == (
        f"default-src 'none'; script-src '{hashes[0]}'; style-src '{hashes[1]}'; base-uri 'none'; form-action 'none'"
    )
    names = {name for name, _ in Parsed(page).attributes}
    assert not names & {"src", "style", "onload", "onerror", "onclick", "srcset", "action"}
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page), "an address to load from"


def test_user_texts_are_shown_and_never_become_markup() -> None:
    page = html(hostile())
    parsed, healthy_page = Parsed(page), Parsed(html(healthy()))
    assert parsed.tags.count("script") == healthy_page.tags.count("script") == 3
    assert not {"img", "iframe", "object", "embed", "link", "base", "form"} & set(parsed.tags)
    for text in HOSTILE:
        assert printable(f"message {text}") in parsed.text
        assert printable(f"+{text}") in parsed.text
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "49" not in re.findall(r"message (\d+)", parsed.text)


def test_user_texts_in_the_script_data_are_escaped() -> None:
    data = data_of(html(hostile()))
    texts = json.dumps(data, ensure_ascii=False)
    assert texts.isprintable()
    assert {printable(text) for text in HOSTILE} <= set(data["names"])


def test_an_escaped_or_truncated_patch_has_no_copy_button() -> None:
    long = FileDiff("x.py", "utf-8", "+x = 1\n" * 20_000)
    truncated = replace(record_of("suggestion"), handover=replace(handover(), files=(long,)))
    pages = [html(record) for record in (hostile(), truncated, record_of("suggestion"))]
    assert [NOT_EXACT in page for page in pages] == [True, False, False]
    assert [NOT_WHOLE in page for page in pages] == [False, True, False]
    assert ['aria-label="Copy the patch"' in page for page in pages] == [False, False, True]


def test_the_script_data_has_the_window_and_marks_of_the_record() -> None:
    record = record_of("ranges_example")
    sites = data_of(html(record))["sites"]
    whole = window(record.sites)
    assert 2.0 ** sites["window"]["floor"] == whole.floor
    assert 2.0 ** sites["window"]["ceiling"] == whole.ceiling
    assert whole.highest_floor is not None
    assert sites["window"]["low"] == record.sites.index(whole.highest_floor)
    scales = sites["scales"]
    for at, (over, lost) in enumerate(zip(scales["overflow"], scales["lost"], strict=True)):
        power = 2.0 ** (scales["low"] + at)
        assert (over == 0 and lost == 0) == (whole.floor <= power <= whole.ceiling), power
        gradients = [one for one in record.sites if one.phase == "backward"]
        assert over == sum(one.scale_ceiling is not None and one.scale_ceiling < power for one in gradients)


def test_the_slider_starts_at_the_config_loss_scale_if_no_step_was_taken() -> None:
    ranged = record_of("ranges_example")
    scales = [
        data_of(html(replace(ranged, config={"precision": {"loss_scale": one}})))["sites"]["scales"]
        for one in ({"init": 1024.0}, 256.0, None)
    ]
    assert [one["of_run"] for one in scales] == [10, 8, 16]


def test_the_module_tree_has_the_window_of_each_leaf_and_of_the_model() -> None:
    record = record_of("ranges_example")
    data = data_of(html(record))
    tree = data["modules"]
    rows = {data["names"][name]: at for at, name in enumerate(tree["name"])}
    leaves = [one for one in module_windows(record.sites) if not any(f"{one.module}." in name for name in rows)]
    assert leaves
    for one in leaves:
        at = rows[one.module]
        assert 2.0 ** tree["floor"][at] == (one.floor or 2.0 ** tree["floor"][at]), one.module
        assert tree["ceiling"][at] == (math.log2(one.ceiling) if math.isfinite(one.ceiling) else 9999)
    whole = window(record.sites)
    assert (2.0 ** tree["floor"][0], 2.0 ** tree["ceiling"][0]) == (whole.floor, whole.ceiling)


def test_each_exponent_of_a_site_is_a_byte_that_encodes_its_share() -> None:
    record = record_of("ranges_example")
    page = html(record)
    levels, sites = unpacked(page, "levels"), data_of(page)["sites"]
    start = 0
    for site, count in zip(record.sites, sites["counts"], strict=True):
        for level, values in zip(levels[start : start + count], site.exponents, strict=True):
            share = values / sum(site.exponents)
            assert (level == 0) == (share == 0)
            if share > 2**-20:
                assert 2 ** ((level - 255) / sites["per_bit"]) == pytest.approx(share, rel=0.03)
        start += count
    assert start == len(levels)


def test_a_page_is_below_200_kb_and_deterministic() -> None:
    for record in (healthy(), record_of("ranges_example")):
        assert len(html(record).encode()) < 200_000
        assert html(record) == html(record)


@pytest.mark.slow
def test_a_page_with_20000_sites_is_below_2_mb() -> None:
    page = html(large(20_000, 2000))
    assert len(page.encode()) < 2_000_000
    assert "sites are drawn" not in page
    assert len(html(large(21_000, 5000)).encode()) < 2_500_000


def test_a_page_with_too_many_sites_keeps_the_tightest_and_states_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn, "MOST_SITES", 2000)
    monkeypatch.setattr(drawn, "MOST_MODULES", 400)
    record = large(2100, 500)
    page = html(record)
    sites = data_of(page)["sites"]
    assert f"{len(sites['line']):,} of 2,100 sites are drawn" in page
    assert "modules are listed" in page
    assert sites["window"]["low"] >= 0, "a site that bounds the scales is left out"
    whole = window(record.sites)
    assert sites["scales"]["overflow"][int(math.log2(whole.ceiling)) + 1 - sites["scales"]["low"]] > 0
    shown = [at for at, bits in enumerate(sites["bits"]) if bits < 1.0]
    assert len(shown) == sum(site.headroom_bits < 1.0 for site in record.sites), "what is nearest to the limit is kept"


@pytest.mark.slow
def test_a_record_with_huge_texts_makes_a_page_below_12_mb() -> None:
    long = "x<&\"'" * 5_000
    finding = replace(hostile().findings[0], message=long, module=long, remedy=long)
    record = replace(
        hostile(),
        findings=(finding,) * 300,
        trials=(Trial((long,), False, long, long),) * 400,
        config={long: [long] * 20, "many": list(range(60_000))},
        error=long + "\nline" * 60_000,
    )
    diff = FileDiff("x.py", "utf-8", "--- a/x.py\n+++ b/x.py\n" + f"+{long}\n" * 30 + "+x\n" * 60_000)
    full = replace(handover(), files=(diff,), refused=(long,) * 1000, notes=(long,) * 50)
    record = replace(record, handover=full, environment=replace(record.environment, notes=(long,) * 50))
    page = html(record)
    assert len(page.encode()) < 12_000_000
    assert NOT_WHOLE in page or NOT_EXACT in page


def test_the_timeline_of_a_long_run_keeps_its_ends_and_extremes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn, "MOST_STEPS", 400)
    steps = [replace(healthy_step(number), loss=1.0 + number % 7) for number in range(3000)]
    steps[1234] = replace(steps[1234], loss=99.0)
    steps[2001] = skipped_step(2001, 32768.0, ())
    page = html(run(steps))
    timeline = data_of(page)["timeline"]
    assert timeline["shown"] <= 400
    assert f"{timeline['shown']:,} of 3,000 steps are drawn" in page
    assert {0, 1234, 2001, 2999} <= set(timeline["step"])
    assert max(timeline["series"][0]["values"]) == 99.0
    assert timeline["series"][0]["words"][timeline["step"].index(1234)] == "99"


def test_an_optimizer_without_a_scaler_is_not_in_the_loss_scale_curve() -> None:
    scaled = replace(healthy_step(0), scale=65536.0, scaler=1)
    bare = replace(healthy_step(1), scale=1.0, scaler=0, optimizer=1)
    _, scale, _ = data_of(html(run([scaled, bare])))["timeline"]["series"]
    assert (scale["values"], scale["words"]) == ([65536.0, None], ["65,536", "-"])
    alone, static = (data_of(html(run([one])))["timeline"]["series"] for one in (bare, replace(bare, scale=128.0)))
    assert [one["name"] for one in alone] == ["loss", "norm"]
    assert static[1]["words"] == ["128"], "the loop's own scale, where no scaler has any part"


def test_infinite_and_missing_numbers_have_only_a_text_in_the_timeline() -> None:
    steps = [healthy_step(0), skipped_step(1, 32768.0, (), math.nan), replace(healthy_step(2), grad_norm=None)]
    loss, scale, norm = data_of(html(run(steps)))["timeline"]["series"]
    assert (loss["values"][1], loss["words"][1]) == (None, "NaN")
    assert (norm["values"][1:], norm["words"][1:]) == ([None, None], ["inf", "-"])
    assert scale["words"] == ["65,536", "32,768", "65,536"]


def test_a_record_without_listings_shows_the_source_lines_of_its_sites() -> None:
    old = json.loads(json_of("ranges_example"))
    del old["listings"]
    record = from_json(json.dumps(old))
    (file,) = data_of(html(record))["files"]
    known = {(one.source.line, one.source.text) for one in record.sites if one.source}
    assert {(first, text) for first, texts in file["pieces"] for text in texts} == known


def test_the_page_lists_all_trials() -> None:
    trials = tuple(Trial((f"layer{number}",), False, "the loss is NaN") for number in range(90))
    text = Parsed(html(replace(record_of("bisect_example"), trials=trials))).text
    assert all(f"layer{number}" in text for number in range(90))


@pytest.mark.slow
@given(records())
@settings(max_examples=60)
def test_every_record_makes_an_html_page(record: Record) -> None:
    page = html(record)
    data_of(page)
    assert page.startswith("<!doctype html>\n<!-- A report of ampdbg ")

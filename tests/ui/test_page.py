"""The operator's page in a real browser, over a scripted cluster."""

import pytest

from common.cluster.reports import LoadingWorker, RouterReport
from common.values.messages import Role
from tests.router.front.keys_for_tests import ACME, ADMIN, access
from tests.ui.browser import ENTER, ESCAPE, SPACE, TAB, Browser
from tests.ui.page_service import HOSTILE_ID, LONG_ID, Served, record, served, worker
from tests.ui.steps import select


def test_the_last_minute_is_shown_in_tiles(tab: Browser) -> None:
    tiles = tab.script(
        "return [...document.querySelectorAll('.tile')].map(t => t.innerText.replace(/\\s*\\n\\s*/, ': '))"
    )
    assert tiles == [
        "TTFT p50: 42.1 ms", "TTFT p99: 318 ms", "ITL p50: 11.3 ms", "ITL p99: 45.2 ms", "Errors: 0.8 %",
        "Retries: 1.6 %", "Prefix hits: 62 %", "Transfer exposed: 8.5 %", "Prompt: 5210 tok/s", "Output: 813 tok/s",
        "Running: 21", "Queued: 4",
    ]  # fmt: skip


def test_topology_shows_every_worker_and_wider_edges_for_faster_transfers(tab: Browser) -> None:
    names = tab.script("return [...document.querySelectorAll('.node .name')].map(t => t.textContent)")
    widths = tab.script(
        "return [...document.querySelectorAll('.transfer path')].map(p => +p.getAttribute('stroke-width'))"
    )
    assert names == ["router-a", "prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 2 * widths[2] > 2 * widths[3]


def test_rates_of_transfers_are_a_list_and_lie_on_no_edge(tab: Browser) -> None:
    rates = tab.script("return [...document.querySelectorAll('.flows li')].map(l => l.textContent)")
    assert rates == ["480 MB/s prefill-0 → decode-0", "12 MB/s prefill-0 → decode-1", "900 kB/s prefill-1 → decode-1"]
    assert tab.script("return document.querySelectorAll('.transfer text').length") == 0


@pytest.mark.parametrize("width", [375, 700, 1280])
def test_every_worker_is_in_view_whatever_the_width(tab: Browser, width: int) -> None:
    tab.set_window(width, 900)
    tab.wait("return document.querySelector('#topology svg').getBoundingClientRect().right <= innerWidth")
    boxes = tab.script(
        "return [...document.querySelectorAll('.node rect')].map(r => [r.getBoundingClientRect().left,"
        " r.getBoundingClientRect().right])"
    )
    tab.set_window(1400, 1300)
    assert len(boxes) == 6
    assert all(left >= 0 and right <= width for left, right in boxes)


def test_several_routers_are_shown_with_their_loads_and_the_tiles_add_them_up(tab: Browser, page: Served) -> None:
    other = RouterReport("router-b", "http://10.0.0.2:8000", "10.0.0.2:50051", 12, True, 100, 7)
    page.service.other_routers = (other,)
    tab.wait("return document.querySelectorAll('.node.router').length === 2")
    shown = tab.script("return [...document.querySelectorAll('.node.router .what')].map(t => t.textContent)")
    here = tab.script("return [...document.querySelectorAll('.node.here .name')].map(t => t.textContent)")
    tiles = tab.text("#tiles")
    page.service.other_routers = ()
    assert (shown, here) == (["21 running, 4 queued", "100 running, 7 queued"], ["router-a"])
    assert "121" in tiles
    assert "Latencies, rates, transfers" in tab.text("#topology")
    tab.wait("return document.querySelectorAll('.node.router').length === 1")


def test_block_bars_have_the_proportions_of_the_blocks(tab: Browser) -> None:
    bar = "document.querySelector('.pool.decode li[data-key=decode-0] .bar')"
    tab.wait(f"return {bar}.children[0].getBoundingClientRect().width > {bar}.getBoundingClientRect().width * .5")
    shares = tab.script(
        f"const bar = {bar}; return [...bar.children].map(s => s.getBoundingClientRect().width / bar.clientWidth)"
    )
    assert shares == pytest.approx([0.52, 0.04, 0.3, 0.14], abs=0.02)
    assert tab.script(f"return {bar}.getAttribute('aria-label')").endswith("520 used, 40 held, 300 cached, 140 free")


def test_pools_say_what_is_wanted(tab: Browser) -> None:
    assert tab.text(".pool.decode .plan") == "2 wanted"
    assert tab.script("return document.querySelector('.pool.prefill .plan').textContent") == ""


def test_a_worker_that_loads_is_shown_with_its_phase_and_how_far_it_is(tab: Browser, page: Served) -> None:
    loads = LoadingWorker("prefill-7", "prefill", "reading weights", 0.43, 12.0)
    page.service.loading = (loads, LoadingWorker("decode-7", "decode", "self-test", 0.0, 1.0))
    tab.wait("return document.querySelectorAll('.loading li').length === 2")
    assert "reading weights, 43 %, for 12 s" in tab.text(".pool.prefill .loading")
    assert tab.script("return document.querySelector('.pool.prefill progress').position") == pytest.approx(0.43)
    assert tab.script("return document.querySelector('.pool.decode progress').position") == -1
    page.service.loading = ()
    tab.wait("return document.querySelectorAll('.loading li').length === 0")


def test_the_prefix_index_is_shown_by_worker(tab: Browser, page: Served) -> None:
    rows = tab.script("return [...document.querySelectorAll('#index tr')].map(r => r.innerText.split('\\t'))")
    assert rows == [
        ["decode-0", "300", "4,800", "25 %", "prefill-0, 75 %"],
        ["prefill-0", "1,200", "19,200", "100 %", "–"],
    ]


def test_events_are_listed_newest_first_and_are_text(tab: Browser, page: Served) -> None:
    entries = "[...document.querySelectorAll('#events li')].map(e => [...e.children].slice(1).map(s => s.innerText))"
    assert tab.script(f"return {entries}") == [
        ["left", "<img src=x>: stream ended"], ["joined", "decode-0, decode at 127.0.0.1:4000"],
    ]  # fmt: skip
    page.service.events.add("drain", "decode-0 is to finish")
    tab.wait(f"return {entries}[0][0] === 'drain'")


def test_changes_arrive_without_a_reload(tab: Browser, page: Served) -> None:
    before = page.service.workers
    page.service.workers = (*before, worker("decode-9", Role.DECODE, used=1, held=0, cached=0))
    tab.wait("return document.querySelector('.pool.decode').innerText.includes('decode-9')")
    page.service.workers = before
    tab.wait("return !document.querySelector('.pool.decode').innerText.includes('decode-9')")


def test_what_tooltips_say_is_also_text(tab: Browser) -> None:
    select(tab, LONG_ID)
    assert "210 used, 90 held, 400 cached, 300 free of 1,000 KV blocks" in tab.text(".pool.prefill")
    assert "3 ranks: 4711, 4712, 4713 silent for 5 s" in tab.text(".pool.prefill")
    tab.script("document.querySelector('.marks').open = true")
    rows = tab.script("return [...document.querySelectorAll('.marks tr')].map(r => r.innerText.split('\\t'))")
    assert rows[0] == ["24.0 ms", "prefill chunk 1", "512 tokens in 100 ms"]
    assert rows[3] == ["60.0 ms", "KV of layers 0 to 9", "512 tokens in place"]


def test_rows_stay_under_the_pointer_until_it_leaves(tab: Browser, page: Served) -> None:
    before = page.service.records
    tab.point("#requests tr:nth-child(3)")
    page.service.records = (record("req-new"), *before)
    tab.wait("return document.querySelector('#new-requests').textContent.startsWith('1 new')")
    third = tab.script("return document.querySelector('#requests tr:nth-child(3)').dataset.key")
    tab.point("h1")
    tab.wait("return document.querySelector('#requests tr').dataset.key === 'req-new'")
    page.service.records = before
    assert third == before[2]["request_id"]
    tab.wait("return document.querySelector('#requests tr').dataset.key !== 'req-new'")


def test_a_pointed_row_and_a_selected_one_look_different(tab: Browser) -> None:
    select(tab, LONG_ID)
    tab.point("#requests tr:first-child")
    colours = tab.script(
        "return ['#requests tr:first-child', '#requests tr.selected', '#requests tr:nth-child(4)']"
        ".map(s => getComputedStyle(document.querySelector(s)).backgroundColor)"
    )
    tab.point("h1")
    assert len(set(colours)) == 3


def test_escape_closes_the_detail(tab: Browser) -> None:
    select(tab, LONG_ID)
    tab.press(ESCAPE)
    assert tab.script("return document.querySelector('#detail').hidden")
    assert tab.script("return document.activeElement.textContent") == LONG_ID


def test_the_decision_is_shown_with_its_costs_and_refusals(tab: Browser) -> None:
    select(tab, LONG_ID)
    rows = tab.script("return [...document.querySelectorAll('.decisions tbody tr')].map(r => r.innerText.split('\\t'))")
    assert rows[0][1:] == ["prefill", "prefill-0", "0.412", "0.100", "512", "chosen: lowest cost"]
    assert rows[1][-1] == "queue is full"
    assert "decode-1 lost: silent for 4 s" in tab.text(".attempts")


def test_names_from_outside_are_text_and_never_markup(tab: Browser) -> None:
    select(tab, HOSTILE_ID)
    assert tab.script("return document.querySelectorAll('img').length") == 0
    assert tab.text("#detail h3") == HOSTILE_ID


def test_a_pool_is_scaled(tab: Browser, page: Served) -> None:
    page.rig.scaled.clear()
    tab.script("document.querySelector('#size-decode').value = '5'")
    tab.click(".pool.decode form button")
    tab.wait("return document.querySelector('#toast').textContent.includes('decode pool')")
    assert page.rig.scaled == [{"decode": 5}]


def test_a_worker_is_drained_after_a_question(tab: Browser, page: Served) -> None:
    page.service.drained.clear()
    tab.click("[aria-label='Drain decode-0']")
    assert tab.accept_dialog().startswith("Drain decode-0?")
    tab.wait("return document.querySelector('#toast').textContent.includes('is draining')")
    assert page.service.drained == [("decode-0", 30.0)]
    assert tab.script("return document.querySelector(`[aria-label='Drain decode-2']`).disabled")


def test_chat_streams_an_answer(tab: Browser) -> None:
    tab.type("#message", "Where is Paris?" + ENTER)
    tab.wait("return document.querySelector('.bubble.assistant')?.innerText.includes('Where the time went')")
    bubbles = tab.script("return [...document.querySelectorAll('.bubble p:first-of-type')].map(p => p.textContent)")
    assert bubbles == ["Where is Paris?", "Paris is nice."]
    assert not tab.script("return document.querySelector('#chat [type=submit]').disabled")


def test_everything_is_reached_by_keyboard(tab: Browser) -> None:
    """Tab goes through all controls with a visible focus; a request opens by Space, and Close gives the focus back."""
    seen = []
    for _ in range(16):
        tab.press(TAB)
        seen.append(
            tab.script(
                "const e = document.activeElement, s = getComputedStyle(e);"
                "return [e.tagName, e.getAttribute('aria-label') ?? e.innerText ?? '', s.outlineStyle]"
            )
        )
    names = [name for _, name, _ in seen]
    assert names[0] == "Skip to requests"
    assert {"Scale the prefill pool", "Drain prefill-1", "Scale the decode pool", "Drain decode-1"} <= set(names)
    assert all(outline != "none" for _, _, outline in seen)
    tab.script("document.querySelector('#requests button').focus()")
    tab.press(SPACE)
    tab.wait("return document.querySelector('#detail h3')?.textContent === 'req-running'")
    tab.script("[...document.querySelectorAll('.detail-head button')].at(-1).focus()")
    tab.press(ENTER)
    assert tab.script("return document.activeElement.textContent") == "req-running"


def test_every_control_and_picture_has_a_name(tab: Browser) -> None:
    select(tab, LONG_ID)
    nodes = tab.devtools("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "textbox", "spinbutton", "image", "img", "table", "log", "region", "link")
    unnamed = [
        node["role"]["value"]
        for node in nodes
        if not node.get("ignored") and node["role"]["value"] in roles and not node.get("name", {}).get("value")
    ]
    assert unnamed == []


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_contrast(tab: Browser, dark: bool) -> None:
    """WCAG AA: 4.5 to 1 between text and card, for text, muted text, links and problems."""
    tab.set_dark(dark=dark)
    colours = tab.script(
        "const s = getComputedStyle(document.documentElement);"
        "return Object.fromEntries(['card','page','text','muted','accent','bad','good','warn']"
        ".map(n => [n, s.getPropertyValue('--' + n).trim()]))"
    )
    tab.set_dark(dark=False)
    for name in ("text", "muted", "accent", "bad", "good", "warn"):
        assert contrast(colours[name], colours["card"]) >= 4.5, (name, colours)
    assert (luminance(colours["page"]) < 0.1) == dark


def test_a_narrow_window_does_not_scroll_sideways(tab: Browser) -> None:
    tab.set_window(390, 900)
    select(tab, LONG_ID)
    width = tab.script("return document.documentElement.scrollWidth")
    tab.set_window(1400, 1300)
    assert width <= 390


def test_nothing_is_loaded_from_elsewhere(tab: Browser, page: Served) -> None:
    urls = tab.script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert urls
    assert all(url.startswith(page.rig.url) for url in urls)


def test_a_lost_router_is_said_and_found_again(tab: Browser, page: Served) -> None:
    page.service.is_broken = True
    tab.wait("return document.querySelector('#readiness').textContent === 'no connection'")
    tab.wait("return /What is shown is \\d+ s old/.test(document.querySelector('#connection').textContent)")
    assert tab.script("return getComputedStyle(document.querySelector('main > section')).filter") == "grayscale(1)"
    assert tab.script("return document.querySelector('#pools').inert && document.querySelector('#chat').inert")
    page.service.is_broken = False
    tab.wait("return document.querySelector('#readiness').textContent === 'ready'")
    assert not tab.script("return document.querySelector('#pools').inert || document.body.className")
    tab.console()  # the refused reconnections


def test_a_router_that_cannot_be_reached_is_said_in_words(tab: Browser) -> None:
    with served() as gone:
        tab.open(gone.url)
        tab.wait("return document.querySelectorAll('#requests tr').length > 3")
    said = "the router cannot be reached; trying"
    tab.wait("return document.querySelector('#connection').textContent.startsWith(arguments[0])", said)
    tab.open("about:blank")
    tab.console()  # the refused reconnections


def test_another_router_at_the_same_place_begins_with_fresh_fields(tab: Browser, page: Served) -> None:
    tab.script("document.querySelector('#size-decode').value = '9'")
    select(tab, LONG_ID)
    page.service.router_pid += 1
    tab.wait("return document.querySelector('#size-decode').value === '3'")
    assert tab.script("return document.querySelector('#detail').hidden")


def test_with_an_admin_key_the_page_asks_for_it(tab: Browser) -> None:
    with served(admin_key="s3cret") as guarded:
        tab.open(guarded.url)
        tab.wait("return document.querySelector('#key-dialog').open")
        tab.type("#key", "wrong" + ENTER)
        tab.wait("return document.querySelector('#key-problem').textContent.includes('not accepted')")
        tab.type("#key", "s3cret" + ENTER)
        tab.wait("return document.querySelectorAll('#requests tr').length > 3")
        assert "s3cret" not in tab.script("return document.documentElement.outerHTML")
    tab.open("about:blank")
    tab.console()  # the two 401 answers


def test_where_tenants_have_keys_the_chat_asks_for_one(tab: Browser) -> None:
    with served(access=access()) as guarded:
        tab.open(guarded.url)
        tab.wait("return document.querySelector('#key-dialog').open")
        tab.type("#key", ADMIN + ENTER)
        tab.wait("return document.querySelectorAll('#requests tr').length > 3")
        tab.type("#message", "Where is it nice?" + ENTER)
        tab.wait("return document.querySelector('#key-dialog').open")
        assert tab.script("return document.getElementById('key-title').textContent") == "API key"
        tab.type("#key", ACME + ENTER)
        tab.wait("return document.getElementById('transcript').textContent.includes('Paris is nice.')")
        assert ACME not in tab.script("return document.documentElement.outerHTML")
    tab.open("about:blank")
    tab.console()  # the two 401 answers


def luminance(colour: str) -> float:
    channels = [int(colour[idx : idx + 2], 16) / 255 for idx in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)

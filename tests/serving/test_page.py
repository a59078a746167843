"""The page at `/` in a real browser, against the real application and a small random model."""

import json
import re
import shutil
from pathlib import Path

import httpx
import numpy as np
import pytest

from recsys.artifacts import read_manifest
from recsys.interactions import Histories
from recsys.retrieval import Retrieval
from recsys.retrieval.item_item import ItemItem
from recsys.retrieval.reranker import Reranker
from recsys.serving.settings import ServingSettings

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the path")

ITEMS, CODES, LEVELS = 1200, 32, 3  # more than a draft tree has room for
HISTORY = ["B0003", "B0014", "B0015", "B0092"]
VIEWS = ("recommend", "decode", "catalog", "evaluation", "operations")
PROBES = Path(__file__).with_name("page_probes.js").read_text(encoding="utf-8")
COUNT_FETCHES = """
window.underWay = 0;
const ask = window.fetch;
window.fetch = (...what) => {
  window.underWay++;
  return ask(...what).finally(() => setTimeout(() => window.underWay--, 50));
};
"""
PATIENCE_MS = 120_000  # of a loaded machine; nothing waits that long on an idle one

RERANKER = Reranker({"item_item.value": 1.0, "model.value": 1.0})


def title(item):
    colour = ("Red", "Green", "Blue")[item % 3]
    return f"{colour} thing no. {item}" if item != 3 else "<img src=/x onerror=alert(1)> & co."


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, random_bundle):
    rng = np.random.default_rng(0)
    walks = Histories.of(rng.integers(0, ITEMS, (200, 6)).tolist())
    counts = np.bincount(walks.items, minlength=ITEMS).astype(float)
    path = random_bundle(
        tmp_path_factory.mktemp("home") / "bundles" / "shop",
        ITEMS,
        codes=CODES,
        draft=True,
        retrieval=Retrieval(ItemItem.directional(walks, ITEMS), counts, reranker=RERANKER),
        evaluation={
            "target": {"recall@10": 0.5, "users": 40},
            "retrieval": {
                "users": 9,
                "model": {"recall@10": 0.5},
                "blended": {"recall@10": 0.6},
            },
        },
        title=[title(i) for i in range(ITEMS)],
        price=[i / 4 for i in range(ITEMS)],
        colours=[[("red", "green", "blue")[i % 3]] for i in range(ITEMS)],
        used=[i % 2 == 0 for i in range(ITEMS)],
    )
    about = {"metric": "recall", "k": 10, "seen": "masked", "targets": "next"}
    report = {
        "made_from": {"bundle": read_manifest(path, "bundle").digest},
        "rankers": ["model", "popularity"],
        "headline": {"k": 10, "seen": "masked", "targets": "next"},
        "metrics": [
            {**about, "ranker": "model", "mean": 0.5, "low": 0.4, "high": 0.6},
            {**about, "ranker": "popularity", "mean": 0.1, "low": 0.05, "high": 0.15},
            {**about, "ranker": "model", "k": 5, "mean": 0.3, "low": 0.2, "high": 0.4},
        ],
    }
    reports = path.parent.parent / "reports" / path.name
    reports.mkdir(parents=True)
    (reports / "report.json").write_text(json.dumps(report))
    return path


@pytest.fixture(scope="module")
def site(bundle, tmp_path_factory, serving):
    """Address of the running application; user `ada` has a history."""
    store = tmp_path_factory.mktemp("store") / "h.db"
    settings = ServingSettings(
        bundle=bundle, histories=None, store=store, threads=1, deadline_ms=60_000
    )
    events = [
        {"user": user, "item": item, "type": "purchase", "timestamp": 1_700_000_000 + n}
        for user in ("ada", "bob")
        for n, item in enumerate(HISTORY if user == "ada" else HISTORY[:1])
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECSYS_HOME", str(bundle.parent.parent))
        with serving(settings) as url:
            assert httpx.post(f"{url}/v1/events", json={"events": events}).json()["accepted"] == 5
            yield url


@pytest.fixture(scope="module")
def browser():
    playwright.expect.set_options(timeout=PATIENCE_MS)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, site):
    """Open the page at a fragment; nothing may be wrong on the console, or leave this host."""
    wrong: list[str] = []
    contexts = []

    def opened(fragment="", *, problems=False, routes=None, **options):
        given = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"} | options
        context = browser.new_context(base_url=site, **given)
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        page = context.new_page()
        page.add_init_script(COUNT_FETCHES)
        page.on("pageerror", lambda error: wrong.append(f"exception: {error}"))
        if not problems:
            page.on(
                "console",
                lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None,
            )
        page.on(
            "request",
            lambda sent: None if sent.url.startswith(site) else wrong.append(f"left: {sent.url}"),
        )
        for path, answer in (routes or {}).items():
            page.route(path, answer)
        page.goto(f"/#{fragment}")
        page.wait_for_selector("#body:not(.waiting)")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


def expect(locator):
    return playwright.expect(locator)  # with PATIENCE_MS, not five seconds: see `browser`


def settle(page):
    """Wait until nothing is being asked, and what was answered is drawn."""
    page.wait_for_function("() => window.underWay === 0")


def listed(page):
    """Ids on the cards, once the list is of the present state."""
    settle(page)
    page.wait_for_selector(".card")
    return page.eval_on_selector_all(".card", "all => all.map(one => one.dataset.id)")


def asked(site, **body):
    response = httpx.post(f"{site}/v1/recommendations", json=body, timeout=PATIENCE_MS / 1000)
    assert response.status_code == 200, response.text
    return [item["item_id"] for item in response.json()["items"]]


def test_user_filter_and_clicked_item_survive_a_reload(visit, site):
    page = visit()
    page.fill("#user", "ada")
    page.click("text=Go")
    expect(page.locator(".event")).to_have_count(len(HISTORY))
    expect(page.locator(".event-title").last).to_have_text(title(92))
    page.wait_for_function("() => document.querySelector('.summary').textContent.includes('1,196')")
    first = listed(page)
    assert first == asked(site, user="ada")

    page.click("[aria-label='Add a condition to must']")
    page.select_option("[aria-label=Attribute]", "price")
    page.fill("[aria-label='price at most']", "20")
    expect(page.locator(".verdict")).to_have_text(re.compile(r"^81\s+of 1,200 items match"))
    page.press("[aria-label='price at most']", "Enter")
    page.wait_for_function("() => location.hash.includes('filter')")
    page.wait_for_function(
        "() => !document.querySelector('.summary').textContent.includes('1,196')"
    )
    cheap = {"must": [{"key": "price", "range": {"lte": 20}}]}
    second = listed(page)
    assert second == asked(site, user="ada", filter=cheap) != first
    page.click("text=As JSON")
    assert json.loads(page.input_value("#filter-json")) == cheap

    page.click(".card-add >> nth=1")
    expect(page.locator(".event")).to_have_count(len(HISTORY) + 1)
    page.wait_for_function("id => !document.querySelector(`[data-id='${id}']`)", arg=second[1])
    third = listed(page)
    assert third == asked(site, history=[*HISTORY, second[1]], filter=cheap)

    page.reload()
    expect(page.locator(".event")).to_have_count(len(HISTORY) + 1)
    assert listed(page) == third
    page.go_back()
    expect(page.locator(".event")).to_have_count(len(HISTORY))
    page.wait_for_selector(f"[data-id={second[1]}]")
    assert listed(page) == second
    page.go_back()
    expect(page.locator(".verdict")).to_have_text("No filter: all 1,200 items.")
    page.wait_for_function("() => document.querySelector('.summary').textContent.includes('1,196')")
    assert listed(page) == first


def test_the_decode_is_drawn_stepped_and_compared(visit, site):
    page = visit("view=decode&user=ada&k=12")
    expect(page.locator("#compare .same")).to_have_text("The same 12 items in the same order.")
    body = {"user": "ada", "k": 12, "mode": "strict", "blend": False, "include": ["trace"]}
    trace = httpx.post(f"{site}/v1/recommendations", json=body, timeout=PATIENCE_MS / 1000).json()[
        "trace"
    ]
    page.check("#every")
    expect(page.locator(".mark.node")).to_have_count(len(trace["nodes"]))
    for fate in ("accepted", "rejected", "patched"):
        count = sum(node["fate"] == fate for node in trace["nodes"])
        expect(page.locator(f".mark.{fate}")).to_have_count(count)
    assert page.locator(".mark.item").count() == 12
    assert f"{trace['blocked']['2']:,} blocked" in page.inner_text(".levels")

    best = max(trace["nodes"], key=lambda n: (n["depth"] == 1, n["target_log_prob"]))
    page.hover(f".mark.node[aria-label^='Level 1 of {LEVELS}, code {best['code']},'] .shape")
    told = page.inner_text("#look")
    assert best["fate"] in told
    assert f"{best['target_log_prob']:.2f}".replace("-", "−") in told

    assert trace["passes"] > 1
    expect(page.locator("#pass-text")).to_contain_text(f"pass {trace['passes']} of")
    page.click("#back")
    later = sum(node["pass"] == trace["passes"] for node in trace["nodes"])
    expect(page.locator(".mark.node.later")).to_have_count(later)
    page.click("#again")
    expect(page.locator("#compare")).to_contain_text("median of 2")


def test_everything_can_be_done_by_keyboard(visit):
    page = visit()
    listed(page)
    pressed = page.keyboard.press

    def tab_to(wanted):
        for _ in range(80):
            if page.evaluate("s => document.activeElement.matches(s)", wanted):
                return
            pressed("Tab")
        pytest.fail(f"Tab does not lead to {wanted}")

    tab_to("#user")
    page.keyboard.type("ada")
    pressed("Enter")
    expect(page.locator(".event")).to_have_count(4)
    tab_to(".event-name")
    pressed("Alt+ArrowLeft")
    expect(page.locator(".event-title >> nth=2")).to_have_text(title(92))
    assert page.evaluate("document.activeElement.dataset.place") == "2"
    pressed("ArrowLeft")
    pressed("Delete")
    expect(page.locator(".event")).to_have_count(3)
    titles = page.locator(".event-title").all_text_contents()
    assert titles == [title(i) for i in (3, 92, 15)]
    settle(page)

    tab_to(".card-add")
    name = page.evaluate("document.activeElement.textContent")
    pressed("Enter")
    expect(page.locator(".event-title").last).to_have_text(name)
    settle(page)
    assert page.evaluate("document.activeElement.matches('.card-add')")  # focus is not lost

    tab_to(".card .more")
    pressed("Enter")
    page.wait_for_selector("dialog[open] h2")
    pressed("Escape")
    page.wait_for_selector("dialog:not([open])", state="attached")
    page.wait_for_function("() => document.activeElement.matches('.card .more')")

    page.evaluate("document.activeElement.blur()")
    tab_to("[data-view=decode]")
    pressed("Enter")
    page.wait_for_selector(".tree")
    tab_to(".mark")
    pressed("ArrowRight")
    pressed("ArrowRight")
    assert "Level 2" in page.evaluate("document.activeElement.getAttribute('aria-label')")
    pressed("ArrowLeft")
    pressed("ArrowDown")
    label = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert re.match(r"Level 1 of 3, code \d+, \w+, (draft −|not drafted)", label)


def test_the_catalog_is_walked_by_code_and_by_words(visit, site):
    page = visit("view=catalog")
    expect(page.locator(".view.catalog .summary")).to_have_text("1,200 items")
    page.click(".code-button >> nth=2")
    expect(page.locator(".crumbs .chip")).to_have_count(2)
    page.click(".code-button >> nth=0")
    page.wait_for_function("() => /prefix=\\d+\\.\\d+/.test(location.hash)")
    prefix = page.evaluate("new URLSearchParams(location.hash.slice(1)).get('prefix')")
    found = httpx.get(f"{site}/v1/items", params={"prefix": prefix}).json()
    expect(page.locator(".line")).to_have_count(found["total"])
    page.click("text=all codes")
    page.fill("#q", "no. 23")
    page.press("#q", "Enter")
    expect(page.locator(".line")).to_have_count(11)  # 23, 230 to 239
    page.click("[aria-label='Add Red thing no. 231 to the session']")
    expect(page.locator(".event-title")).to_have_text(["Red thing no. 231"])
    page.click(".line .link >> text=Blue thing no. 230")
    page.wait_for_selector("dialog[open] .facts")
    page.click("dialog .facts >> text=blue")
    assert '"match":"blue"' in page.evaluate("decodeURIComponent(location.hash)")


def test_evaluation_and_operations_are_charts_that_can_be_read(visit):
    page = visit("view=evaluation")
    captions = page.locator(".bars caption")
    expect(captions).to_have_text(["Recall@10, with 95 % intervals", "Recall@10"])
    expect(page.locator(".bars th")).to_have_text(
        ["model", "popularity", "target", "retrieval, model", "retrieval, blended"]
    )
    expect(page.locator(".figure").first).to_have_text("0.500 0.400–0.600")
    assert page.locator(".interval").count() == 2
    page.click("[data-view=operations]")
    page.wait_for_selector(".spark")
    labels = page.eval_on_selector_all(".spark", "all => all.map(s => s.ariaLabel)")
    assert any(re.match(r"Latency: now p50 [\d.]+ ms, p99", label) for label in labels)
    expect(page.locator(".view.operations tbody th").first).to_have_text("shop")
    with page.expect_response("**/v1/stats"):
        pass  # it asks again by itself


def test_a_phone_scrolls_in_one_direction(visit):
    page = visit("user=ada", viewport={"width": 390, "height": 844})
    for view in VIEWS:
        page.evaluate(
            "v => location.hash = location.hash.replace(/view=\\w+&|^#?/, `view=${v}&`)", view
        )
        page.wait_for_selector(f".view.{view}:not([hidden]) h2")
        settle(page)
        assert page.evaluate("document.documentElement.scrollWidth") == 390, view


def test_the_page_shows_problems_in_place(visit, site):
    page = visit("user=nobody", problems=True)
    expect(page.locator(".strip .problem")).to_contain_text("no events of user 'nobody'")
    broken = json.dumps({"must": [{"key": "colours", "range": {"lt": 3}}]})
    page.click("text=As JSON")
    page.fill("#filter-json", broken)
    page.press("#filter-json", "Tab")
    expect(page.locator(".verdict [role=alert]")).to_contain_text("attribute 'colours' is a text")
    expect(page.locator(".view.recommend [role=alert]")).to_contain_text("invalid_filter")
    page.fill("#filter-json", "{")
    page.press("#filter-json", "Tab")
    expect(page.locator(".verdict [role=alert]")).to_contain_text("This is not JSON")
    page.click("text=Clear the filter")
    page.route("**/v1/recommendations", lambda route: route.abort())
    page.fill("#k", "7")
    page.press("#k", "Tab")
    expect(page.locator(".view.recommend [role=alert]")).to_contain_text("cannot be reached")
    page.unroute("**/v1/recommendations")
    page.click(".view.recommend >> text=Try again")
    assert len(listed(page)) == 7


def test_the_page_waits_for_the_model_and_asks_for_a_key(visit):
    def problem(code, status, detail):
        body = {"code": code, "status": status, "title": code, "detail": detail}
        return {"status": status, "json": body, "headers": {"retry-after": "1"}}

    answers = [problem("not_ready", 503, "It is being loaded.") for _ in range(2)]
    asked: list[str] = []

    def loading(route):
        asked.append(route.request.url)
        if answers:
            route.fulfill(**answers.pop())
        else:
            route.continue_()

    page = visit("user=ada", problems=True, routes={"**/v1/models": loading})
    assert len(asked) == 3
    listed(page)
    expect(page.locator(".samples .chip")).to_have_text(["ada", "bob"])

    refused = problem("unauthenticated", 401, "Send a key.")
    page = visit(problems=True, routes={"**/v1/**": lambda route: route.fulfill(**refused)})
    expect(page.locator("#key")).to_be_visible()
    expect(page.locator(".view.recommend [role=alert]")).to_contain_text("Send a key.")


def test_a_key_stays_in_the_tab_and_out_of_the_curl_line(visit):
    page = visit("user=ada")
    page.click("summary >> text=Settings")
    page.fill("#key", "rk_secret")
    with page.expect_request("**/v1/recommendations") as sent:
        page.press("#key", "Enter")
    assert sent.value.headers["authorization"] == "Bearer rk_secret"
    listed(page)
    assert page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 1]
    curl = page.locator(".request code").text_content()
    assert "$RECSYS_KEY" in curl
    assert "rk_secret" not in curl + page.url


def test_the_curl_command_equals_the_request_of_the_page(visit, site):
    page = visit("h=B0003&h=B0014&k=3&seen=1")
    shown = listed(page)
    curl = page.locator(".request code").text_content()
    body = re.search(r"-d '(.*)'$", curl)
    assert body is not None
    assert curl.startswith(f"curl -s '{site}/v1/recommendations'")
    assert asked(site, **json.loads(body[1])) == shown


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_things_have_names_and_text_has_contrast(visit, scheme):
    condition = json.dumps({"must": [{"key": "colours", "any": ["red"]}]})
    page = visit(f"user=ada&filter={condition}", color_scheme=scheme)
    for view in VIEWS:
        page.click(f"[data-view={view}]")
        page.wait_for_selector(f".view.{view}:not([hidden]) h2")
        settle(page)
        assert page.evaluate(f"({PROBES}).names()") == [], view
        assert page.evaluate(f"({PROBES}).contrast()") == [], view
    # the probes see what they look for
    page.evaluate("document.documentElement.style.setProperty('--muted', '#777')")
    page.evaluate("document.querySelector('.tools label').textContent = ''")
    page.click("summary >> text=Settings")
    assert page.evaluate(f"({PROBES}).contrast()") != []
    (nameless,) = page.evaluate(f"({PROBES}).names()")
    assert "password" in nameless


def test_the_focus_is_always_visible(visit):
    page = visit("view=decode&user=ada")
    page.wait_for_selector("#again")
    for _ in range(45):
        page.keyboard.press("Tab")
        assert page.evaluate(f"({PROBES}).focus()") in (True, None)


def test_static_files_have_types_and_etags_and_no_other_paths(site, bundle):
    with httpx.Client(base_url=site) as client:
        page = client.get("/")
        assert "<style" not in page.text
        assert not re.search(r"<script(?![^>]* src=)|\son\w+=|\sstyle=", page.text)
        for name, kind in (("app.js", "text/javascript"), ("app.css", "text/css")):
            found = client.get(f"/static/{name}")
            assert found.headers["content-type"] == f"{kind}; charset=utf-8"
            known = {"if-none-match": found.headers["etag"]}
            assert client.get(f"/static/{name}", headers=known).status_code == 304
        for path in ("../index.html", "..%2Findex.html", "%2e%2e/app.py", "/etc/passwd", "none.js"):
            assert client.get(f"/static/{path}").status_code == 404

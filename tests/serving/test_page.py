"""The page at `/` in a real browser, against the real application and a small random model."""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import httpx
import numpy as np
import pytest

from recsys.interactions import Histories
from recsys.recommender import Recommender
from recsys.retrieval import Retrieval
from recsys.retrieval.item_item import ItemItem
from recsys.retrieval.reranker import Reranker
from recsys.serving import cached_results, daily_figures
from recsys.serving.settings import ServingSettings

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the path")

ITEMS, CODES, LEVELS = 1200, 32, 3  # more than a draft tree has room for
HISTORY = ["B0003", "B0014", "B0015", "B0092"]
VIEWS = ("today", "recommend", "compare", "catalog", "experiments", "decode")
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

FIRST_VIEW_BYTES = 200_000
DOT = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWj"
    "R9awAAAABJRU5ErkJggg=="
)
RERANKER = Reranker({"item_item": 1.0, "model": 1.0})


def title(item):
    colour = ("Red", "Green", "Blue")[item % 3]
    return f"{colour} thing no. {item}" if item != 3 else "<img src=/x onerror=alert(1)> & co."


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, random_bundle):
    rng = np.random.default_rng(0)
    walks = Histories.of(rng.integers(0, ITEMS, (200, 6)).tolist())
    counts = np.bincount(walks.items, minlength=ITEMS).astype(float)
    return random_bundle(
        tmp_path_factory.mktemp("home") / "bundles" / "shop",
        ITEMS,
        codes=CODES,
        draft=True,
        retrieval=Retrieval(ItemItem.count(walks, ITEMS), counts, reranker=RERANKER),
        title=[title(i) for i in range(ITEMS)],
        price=[i / 4 for i in range(ITEMS)],
        colours=[[("red", "green", "blue")[i % 3]] for i in range(ITEMS)],
        used=[i % 2 == 0 for i in range(ITEMS)],
        image=[
            DOT if i == 7 else "https://cdn.example/8.jpg" if i == 8 else "" for i in range(ITEMS)
        ],
    )


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
        patch.setattr(daily_figures, "MAX_AGE_S", 0.0)  # figures are those of the moment
        patch.setattr(cached_results, "REST", 0.0)
        with serving(settings) as url:
            assert httpx.post(f"{url}/v1/events", json={"events": events}).json()["accepted"] == 5
            yield url


@pytest.fixture(scope="module")
def browser():
    playwright.expect.set_options(timeout=PATIENCE_MS)
    # Chromium does not always remove what it made for itself.
    with (
        tempfile.TemporaryDirectory(prefix="c-") as folder,
        playwright.sync_playwright() as started,
    ):
        browser = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], env={**os.environ, "TMPDIR": folder}
        )
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

    cheap = {"must": [{"key": "price", "range": {"lte": 20}}]}
    page.evaluate("text => { location.hash += `&filter=${text}` }", json.dumps(cheap))
    page.wait_for_function(
        "() => !document.querySelector('.summary').textContent.includes('1,196')"
    )
    second = listed(page)
    assert second == asked(site, user="ada", filter=cheap) != first
    expect(page.locator("#filter-panel .tag")).to_have_text("price ≤ 20 ×")

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
    page.wait_for_function("() => document.querySelector('.summary').textContent.includes('1,196')")
    assert listed(page) == first


def test_the_decode_is_drawn(visit, site):
    page = visit("view=decode&user=ada&k=12")
    body = {"user": "ada", "k": 12, "mode": "strict", "blend": False, "include": ["trace"]}
    trace = httpx.post(f"{site}/v1/recommendations", json=body, timeout=PATIENCE_MS / 1000).json()[
        "trace"
    ]
    for fate in ("accepted", "patched"):
        count = sum(node["fate"] == fate for node in trace["nodes"])
        assert count > 0
        expect(page.locator(f".tree .{fate} > .node")).to_have_count(count)
    assert page.locator(".tree .item").count() == 12
    assert f"{trace['blocked']['2']:,} blocked" in page.inner_text(".levels")

    best = max(trace["nodes"], key=lambda n: (n["depth"] == 1, n["target_log_prob"]))
    scores = [f"{best[f'{by}_log_prob']:.2f}".replace("-", "−") for by in ("target", "draft")]
    expect(page.locator(".tree .node").first).to_have_text(
        "{fate} code {code}{} ({})".format(*scores, **best)
    )


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
    tab_to(".event-remove")
    pressed("Enter")
    expect(page.locator(".event")).to_have_count(3)
    assert page.evaluate("document.activeElement.dataset.key") == "event-0"
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
    tab_to(".tree summary")
    pressed("Enter")
    expect(page.locator(".tree .rejected:visible").first).to_contain_text("rejected code")


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


def test_the_page_shows_problems_in_place(visit, site):
    page = visit("user=nobody", problems=True)
    expect(page.locator(".strip .problem")).to_contain_text("no events of user 'nobody'")
    broken = json.dumps({"must": [{"key": "colours", "range": {"lt": 3}}]})
    page.evaluate("text => { location.hash += `&filter=${text}` }", broken)
    refused = page.locator(".view.recommend [role=alert]")
    expect(refused).to_contain_text("attribute 'colours' is a text")
    expect(refused).to_contain_text("invalid_filter")
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

    def loading(route):
        if answers:
            route.fulfill(**answers.pop())
        else:
            route.continue_()

    page = visit("user=ada", problems=True, routes={"**/v1/models": loading})
    assert not answers
    listed(page)

    refused = problem("unauthenticated", 401, "Send a key.")
    routes = {"**/v1/**": lambda route: route.fulfill(**refused)}
    for view in ("recommend", "compare", "today"):
        page = visit(f"view={view}", problems=True, routes=routes)
        expect(page.locator("#key")).to_be_visible()
        expect(page.locator(f".view.{view} [role=alert]")).to_contain_text("Send a key.")


def test_a_key_stays_in_the_tab_and_out_of_the_address(visit):
    page = visit("user=ada")
    page.click("summary >> text=Settings")
    page.fill("#key", "rk_secret")
    with page.expect_request("**/v1/recommendations") as sent:
        page.press("#key", "Enter")
    assert sent.value.headers["authorization"] == "Bearer rk_secret"
    listed(page)
    assert page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 1]
    assert "rk_secret" not in page.url


@pytest.mark.parametrize("includes", [False, True])
def test_the_box_of_seen_items_says_what_the_bundle_does_until_it_is_changed(
    visit, monkeypatch, includes
):
    monkeypatch.setattr(Recommender, "exclude_seen", not includes)
    page = visit("h=B0092&h=B0015&k=4")
    box = page.locator("#seen")

    def asked_by(action):
        with page.expect_request("**/v1/recommendations") as sent:
            action()
        return sent.value.post_data_json.get("exclude_seen")

    assert asked_by(page.reload) is None
    expect(box).to_be_checked(checked=includes)
    assert asked_by(lambda: box.set_checked(not includes)) is includes
    assert f"seen={int(not includes)}" in page.url
    assert asked_by(page.reload) is includes
    expect(box).to_be_checked(checked=not includes)
    assert asked_by(lambda: box.set_checked(includes)) is not includes


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


# The views of a shop


@pytest.fixture
def shop(site):
    """A client of the service; changes of rules and aliases are undone."""
    with httpx.Client(base_url=site, timeout=PATIENCE_MS / 1000) as client:
        yield client
        for alias in client.get("/v1/models").json()["aliases"]:
            client.put(f"/v1/aliases/{alias['name']}", json={"rules": []}).raise_for_status()
        for rule in client.get("/v1/rules").json()["rules"]:
            client.delete(f"/v1/rules/{rule['name']}").raise_for_status()


def recommend(shop, **body):
    response = shop.post("/v1/recommendations", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_today_shows_what_was_recommended_and_what_came(visit, shop):
    for user in ("ada", "bob", "ada"):
        answer = recommend(shop, user=user, k=5)
        first = answer["items"][0]
        told = {"user": user, "item": first["item_id"], "type": "click"}
        told["recommendation_id"] = answer["recommendation_id"]
        if user == "ada":
            shop.post("/v1/events", json={"events": [told]}).raise_for_status()
    page = visit("view=today")
    found = shop.get("/v1/today").json()
    trends = shop.get("/v1/lists/trending").json()
    assert found["rates"][0]["followed"] >= 2
    tiles = page.locator(".view.today .tile")
    expect(tiles).to_have_count(4)
    expect(tiles.nth(0)).to_contain_text(f"{found['answers']}")
    click = found["rates"][0]
    expect(tiles.nth(1)).to_contain_text(f"{click['followed']} of {found['answers']}")
    expect(page.locator(".view.today .ranked").last.locator("tbody th").first).to_have_text("click")
    percents = re.findall(r"[\d.]+(?= %)", tiles.nth(1).inner_text())
    expected = [100 * click[name] for name in ("rate", "low", "high")]
    assert [float(one) for one in percents[:3]] == pytest.approx(expected, abs=0.5)
    expect(tiles.nth(3)).to_contain_text(f"{found['coverage']['shown']:,} of 1,200 items")
    panels = page.locator(".view.today section.panel")
    expect(panels.locator("h3")).to_have_text(
        [
            "Trending", "Never shown", "Shown, and nothing came of it", "Most shown",
            "What came of recommendations", "How to read this",
        ]
    )  # fmt: skip
    expect(panels.nth(0).locator("tbody th")).to_have_text(
        [row["title"] for row in trends["items"]]
    )
    assert panels.nth(1).locator("tbody tr").count() == 10
    page.select_option("#days", "7")
    page.wait_for_function("() => location.hash.includes('days=7')")
    panels.nth(3).locator("button").first.click()
    page.wait_for_selector("dialog[open] .facts")


def test_a_picture_of_another_host_is_not_loaded(visit):
    page = visit("view=catalog&q=no. 8")  # a request to another host, or a warning, is an error
    page.click(".line .link >> text=/no. 8$/")
    expect(page.locator("dialog .picture")).to_contain_text("a host that this page may not load")


def test_two_models_are_compared_for_one_user(visit, shop):
    page = visit("view=compare&user=ada&k=5")
    expect(page.locator(".view.compare")).to_contain_text("There is one model")
    shop.put("/v1/aliases/other", json={"bundle": "shop"}).raise_for_status()
    try:
        page.reload()
        expect(page.locator(".view.compare .facts-line")).to_have_text(
            "The same 5 items in the same order."
        )
        shop.put("/v1/rules/top", json={"pin": ["B0500"]}).raise_for_status()
        shop.put("/v1/aliases/other", json={"rules": ["top"]}).raise_for_status()
        page.reload()
        expect(page.locator(".view.compare .facts-line")).to_have_text(
            "4 of 5 items in both lists."
        )
        left, right = page.locator(".side").all()
        expect(right.locator("li").first).to_contain_text("only here")
        expect(left.locator("li").first).to_contain_text("place 2")
        expect(left.locator(".link")).to_have_text(
            [item["title"] for item in recommend(shop, user="ada", k=5)["items"]]
        )
        page.select_option("#left", "other")
        expect(page.locator(".side").first.locator("li").first).to_contain_text("only here")
        settle(page)
        page.close()  # it asks for the alias no longer
    finally:
        shop.delete("/v1/aliases/other").raise_for_status()


def test_experiments_can_be_read(visit, shop):
    page = visit("view=experiments")
    expect(page.locator(".view.experiments")).to_contain_text("No experiment")
    shop.put("/v1/aliases/other", json={"bundle": "shop"}).raise_for_status()
    arms = [{"alias": "champion", "weight": 1}, {"alias": "other", "weight": 3}]
    shop.put("/v1/experiments/homepage", json={"arms": arms}).raise_for_status()
    try:
        page.reload()
        first = page.locator(".view.experiments section.panel").first
        expect(first).to_contain_text("champion 25 %, other 75 %")
        shown = {"observed": 50, "waiting": 2, "exposures": 90, "followed": 9}
        results = {
            "name": "homepage", "level": 0.95, "ratio_p_value": 1.0, "verdict": "Undecided.",
            "arms": [
                {**shown, "alias": "champion", "rate": 0.1, "verdict": "first"},
                {**shown, "alias": "other", "rate": 0.12, "verdict": "undecided",
                 "difference": 0.02, "low": 0.01, "high": 0.03},
            ],
        }  # fmt: skip
        page.route("**/homepage/results", lambda route: route.fulfill(json=results))
        page.reload()
        expect(first).to_contain_text("Undecided.")
        expect(first.locator("tbody td").last).to_have_text("2.00 (1.00 to 3.00)")
        settle(page)
        page.close()
    finally:
        shop.delete("/v1/experiments/homepage").raise_for_status()
        shop.delete("/v1/aliases/other").raise_for_status()


@pytest.mark.parametrize("view", ["recommend", "today"])
def test_the_first_view_takes_less_than_200_kb(visit, view):
    sizes = []

    def weigh(route):
        answer = route.fetch()
        sizes.append(len(answer.body()))
        route.fulfill(response=answer)

    page = visit(f"view={view}&user=ada", routes={"**/*": weigh})
    settle(page)
    assert 50_000 < sum(sizes) < FIRST_VIEW_BYTES

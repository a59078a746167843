"""Make the pictures of docs/page.md from a running service: python docs/screenshots.py [URL].

It sends events, and sets up a rule and an alias: use that of `make serve` with an
empty store.
Needs the `dev` extra and a Chromium on the path.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import sync_playwright

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

IMAGES = Path(__file__).parent / "images"
MOST_BYTES = 200_000
FILTER = {
    "must": [{"key": "price", "range": {"lte": 25}}],
    "must_not": [{"key": "categories", "match": "Kits"}],
}


def visit(browser: Browser, url: str, scheme: str, size: tuple[int, int], **state: str) -> Page:
    """The page in a state, drawn to the end."""
    context = browser.new_context(
        base_url=url,
        color_scheme="dark" if scheme == "dark" else "light",
        viewport={"width": size[0], "height": size[1]},
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.goto(f"/#{urlencode(state)}")
    page.wait_for_load_state("networkidle")
    return page


def keep(page: Page, name: str) -> None:
    """Write a picture."""
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(300)
    picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
    # 256 colours that cover all there are: rare ones, such as a patched node's, stay what they are
    picture = picture.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    path = IMAGES / f"page-{name}.png"
    picture.save(path, optimize=True)
    if path.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{path} takes {path.stat().st_size:,} bytes")
    page.context.close()


def patched(browser: Browser, url: str, users: list[str]) -> str:
    """A user whose decode took a patch, if one of them has; else the first."""
    api = browser.new_context(base_url=url).request
    for user in users:
        asked = {"user": user, "mode": "strict", "blend": False, "include": ["trace"]}
        trace = api.post("/v1/recommendations", data=asked).json()["trace"]
        if any(node["fate"] == "patched" for node in trace["nodes"]):
            return user
    return users[0]


def live(browser: Browser, url: str, users: list[str]) -> str:
    """Let users follow some of their recommendations; returns an item that one of them got."""
    api = browser.new_context(base_url=url).request
    draw, events = random.Random(0), []  # noqa: S311
    for user in [user for user in users for _ in range(draw.randint(1, 4))]:
        answer = api.post("/v1/recommendations", data={"user": user}).json()
        for kind, chance in (("click", 0.15), ("cart", 0.06), ("purchase", 0.04)):
            item = draw.choice(answer["items"])["item_id"]
            told = {"user": user, "item": item, "type": kind}
            if draw.random() < chance:
                events.append(told | {"recommendation_id": answer["recommendation_id"]})
    api.post("/v1/events", data={"events": events})
    return str(answer["items"][0]["item_id"])


def challenge(browser: Browser, url: str, item: str) -> None:
    """Give the champion's bundle, with a rule, another alias."""
    api = browser.new_context(base_url=url).request
    (model,) = api.get("/v1/models").json()["models"]
    api.put("/v1/rules/merchandising", data={"pin": [item]})
    api.put("/v1/aliases/challenger", data={"bundle": model["name"]})
    api.put("/v1/aliases/challenger", data={"rules": ["merchandising"]})


def main(url: str) -> None:
    """Make all of them."""
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        users = [f"u{number:04}" for number in range(1, 101)]  # of `make quickstart`
        desk = (1360, 900)

        page = visit(browser, url, "light", desk, user=users[3], k="12")
        page.click(".card-add >> nth=1")  # the cards say what moved
        page.mouse.move(0, 0)
        keep(page, "light")

        page = visit(browser, url, "dark", desk, user=users[1], filter=json.dumps(FILTER))
        keep(page, "dark")

        user = patched(browser, url, users)
        page = visit(browser, url, "light", (1360, 1080), view="decode", user=user)
        page.wait_for_selector(".tree")
        keep(page, "decode")

        keep(visit(browser, url, "light", desk, view="catalog", prefix="0"), "catalog")
        item = live(browser, url, users)
        keep(visit(browser, url, "light", (1360, 1180), view="today"), "today")
        challenge(browser, url, item)
        keep(visit(browser, url, "light", desk, view="compare", user=users[3]), "compare")
        keep(visit(browser, url, "light", (390, 844), user=users[2]), "phone")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")

"""How long the views of the page take in Chromium: python benchmarks/page.py [URL].

Each view is opened in a new, empty browser context. The time is from the navigation to the first
content of the view, when it can be used; bytes are of everything that was loaded until then.
Needs the `dev` extra, a Chromium on the path, and a running service.
"""

from __future__ import annotations

import shutil
import statistics
import sys

from playwright.sync_api import sync_playwright

TIMES = 9
READY = {
    "recommend": ".card",
    "today": ".view.today .tile",
    "experiments": ".view.experiments .panel",
}
BYTES = """performance.getEntriesByType("resource").concat(
  performance.getEntriesByType("navigation")).reduce((sum, one) => sum + one.transferSize, 0)"""


def main(url: str) -> None:
    """Measure the views in turns."""
    times: dict[str, list[float]] = {view: [] for view in READY}
    sizes = dict.fromkeys(READY, 0)
    with sync_playwright() as started:
        path = shutil.which("chromium")
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for _ in range(TIMES):
            for view, selector in READY.items():
                context = browser.new_context(base_url=url)
                page = context.new_page()
                page.goto(f"/#view={view}", wait_until="commit")
                page.wait_for_selector(selector)
                times[view].append(page.evaluate("performance.now()"))
                sizes[view] = max(sizes[view], page.evaluate(BYTES))
                context.close()
        browser.close()
    print(f"{'view':12}  median ms  largest ms  bytes")
    for view, found in times.items():
        print(f"{view:12}  {statistics.median(found):9.0f}  {max(found):10.0f}  {sizes[view]:,}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")

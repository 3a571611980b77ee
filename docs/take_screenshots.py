"""Takes the pictures of docs/app.md: tabs of the app with trained models, a model card, two pages of the docs.

    python docs/take_screenshots.py --sudoku runs/sudoku_demo --text runs/hrm_lm --go runs/go_demo \
        --mhc runs/rlm_mhc --cosmology runs/cosmo --card runs/sudoku_demo --site site

Only the pictures whose models are given are taken. Needs the extra `app`, playwright, Chromium, and for the card the
package `markdown`.
"""

import argparse
import functools
import http.server
import shutil
import threading
import time
from pathlib import Path

from playwright.sync_api import Page, sync_playwright


SIZE = {"width": 1280, "height": 900}
QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
WAIT = 180_000  # milliseconds
SETTLE = 1.5  # seconds, for images and animations
TRIES = 20
CARD_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 860px; margin: 24px auto; }
table { border-collapse: collapse; } td, th { border: 1px solid #c3ccd5; padding: 3px 10px; }
code { background: #f3f5f8; padding: 1px 4px; border-radius: 3px; }
pre code { display: block; padding: 10px; white-space: pre-wrap; }
img { max-width: 100%; } h1 { border-bottom: 1px solid #c3ccd5; }
"""


def take_sudoku(page: Page) -> None:
    """Examples are drawn at random: one that is solved, and not in a step or two, is a picture worth taking."""
    for _ in range(TRIES):
        page.get_by_role("button", name="Medium example").click()
        time.sleep(2 * SETTLE)
        said = page.locator(".caption").filter(visible=True).first.inner_text()
        if "obeys the rules" in said and int(said.split()[3]) >= 4:
            break
    page.locator("input[type=range]:visible").first.fill("2")
    page.wait_for_selector(".shown-board [data-step='2']")


def take_text(page: Page) -> None:
    page.get_by_role("button", name="Write", exact=True).filter(visible=True).click()
    page.wait_for_function("document.querySelectorAll('.hrm-text .depth').length > 240", timeout=WAIT)


def take_go(page: Page) -> None:
    page.get_by_role("button", name="Max", exact=True).click()
    page.wait_for_selector(".hrm-attempt", timeout=WAIT)


def take_mhc(page: Page) -> None:
    page.get_by_role("button", name="Measure").click()
    page.wait_for_function("document.querySelector('.mhc-gains img')?.naturalWidth > 500", timeout=WAIT)


def take_cosmology(page: Page) -> None:
    page.get_by_role("button", name="Sample a map and infer").click()
    page.wait_for_function("document.querySelector('.cosmology-posterior img')?.naturalWidth > 300", timeout=WAIT)


PAGES = {"docs_front": "", "docs_features": "features/"}
TABS = {
    "sudoku": ("Sudoku", take_sudoku),
    "text": ("Text", take_text),
    "go": ("Go coder", take_go),
    "mhc": ("mHC ·", take_mhc),
    "cosmology": ("Cosmology", take_cosmology),
}


def take_tabs(page: Page, models: dict[str, str], out: Path) -> None:
    """Pictures of the tabs of `models`, by the keys of TABS."""
    from hrm_hf.app import build_app, launch

    demo = build_app(list(dict.fromkeys(models.values())))
    _, address, _ = launch(demo, server_name="127.0.0.1", prevent_thread_lock=True)
    page.goto(address)
    for kind in models:
        label, take = TABS[kind]
        page.get_by_role("tab", name=label).first.click()
        take(page)
        page.mouse.move(640, 5)
        time.sleep(SETTLE)
        page.screenshot(path=out / f"app_{kind}.png")
        shrink(out / f"app_{kind}.png")
    demo.close(verbose=False)


def take_card(page: Page, folder: Path, out: Path) -> None:
    """The README.md of a checkpoint as a page, with its tables and pictures."""
    import markdown

    text = (folder / "README.md").read_text(encoding="utf-8")
    body = markdown.markdown(text.split("---\n", 2)[2], extensions=["tables", "fenced_code"])
    scratch = folder / "card.html" if out is None else out / "card.html"
    pictures = [picture for picture in folder.glob("*") if picture.suffix in (".png", ".gif")]
    copied = [shutil.copy(picture, scratch.parent / f"card_{picture.name}") for picture in pictures]
    for picture in pictures:
        body = body.replace(f'src="{picture.name}"', f'src="card_{picture.name}"')
    scratch.write_text(f"<meta charset='utf-8'><style>{CARD_STYLE}</style>{body}", encoding="utf-8")
    page.goto(scratch.resolve().as_uri())
    time.sleep(SETTLE)
    page.screenshot(path=out / "model_card.png", full_page=True)
    shrink(out / "model_card.png")
    for file in [scratch, *map(Path, copied)]:
        file.unlink()


def take_pages(page: Page, site: Path, out: Path) -> None:
    """The front page and the page of features of the built documentation."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, address in PAGES.items():
            page.goto(f"http://127.0.0.1:{server.server_port}/{address}")
            time.sleep(SETTLE)
            page.screenshot(path=out / f"{name}.png", full_page=bool(address))
            shrink(out / f"{name}.png")
        server.shutdown()


def shrink(path: Path) -> None:
    """A palette of 256 colours is enough for these pictures."""
    from PIL import Image

    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for kind in TABS:
        parser.add_argument(f"--{kind}", help="checkpoint of that tab")
    parser.add_argument("--card", type=Path, help="checkpoint whose card is shown")
    parser.add_argument("--site", type=Path, help="built documentation")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images")
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    arguments = parser.parse_args()
    models = {kind: getattr(arguments, kind) for kind in TABS if getattr(arguments, kind)}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=arguments.chromium, args=QUIET)
        page = browser.new_page(viewport=SIZE)
        page.set_default_timeout(WAIT)
        if models:
            take_tabs(page, models, arguments.out)
        if arguments.card:
            take_card(page, arguments.card, arguments.out)
        if arguments.site:
            take_pages(page, arguments.site, arguments.out)
        browser.close()


if __name__ == "__main__":
    main()

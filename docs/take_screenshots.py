"""Takes the pictures of docs/app.md: tabs of the app with trained models on a desk and on a phone, and three more.

    python docs/take_screenshots.py --sudoku pretrained/sudoku-9x9 --maze pretrained/maze-15x15 --text runs/hrm_lm \
        --go runs/go_demo --mhc runs/rlm_mhc --cosmology runs/cosmo --card runs/sudoku_demo --site site

The others are a model card and two pages of the documentation. Only pictures whose models are given are taken.
Needs the extra `app`, playwright, Chromium, and for the card the package `markdown`.
"""

import argparse
import functools
import http.server
import shutil
import threading
import time
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright


SIZE = {"width": 1280, "height": 900}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
WAIT = 180_000  # milliseconds
SETTLE = 3  # seconds, for images, animations and the rest of an answer
CARD_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 860px; margin: 24px auto; }
table { border-collapse: collapse; } td, th { border: 1px solid #c3ccd5; padding: 3px 10px; }
code { background: #f3f5f8; padding: 1px 4px; border-radius: 3px; }
pre code { display: block; padding: 10px; white-space: pre-wrap; }
img { max-width: 100%; } h1 { border-bottom: 1px solid #c3ccd5; }
"""


PAGES = {"docs_front": "", "docs_features": "features/"}
# Label of the tab, and what is on it when its example has been answered.
TABS = {
    "sudoku": ("Sudoku", ".answer-text textarea"),
    "maze": ("Maze", ".answer-text textarea"),
    "text": ("Text", ".hrm-text .depth >> nth=200"),
    "go": ("Go coder", ".hrm-attempt"),
    "mhc": ("mHC ·", ".mhc-gains img"),
    "cosmology": ("Cosmology", ".cosmology-posterior img"),
}


def take_tabs(browser: Browser, models: dict[str, str], out: Path) -> None:
    """Pictures of the tabs of `models`, by the keys of TABS: what fits on a screen, and all that a phone scrolls."""
    from hrm_hf.app import build_app, launch

    demo = build_app(list(dict.fromkeys(models.values())))
    _, address, _ = launch(demo, server_name="127.0.0.1", prevent_thread_lock=True)
    for suffix, options in (("", {"viewport": SIZE}), ("_phone", PHONE)):
        page = browser.new_context(**options).new_page()
        page.set_default_timeout(WAIT)
        page.goto(address)
        for kind in models:
            label, answered = TABS[kind]
            page.get_by_role("tab", name=label).first.click()
            page.locator(answered).locator("visible=true").first.wait_for()
            if kind == "sudoku":  # many cells change in the second step
                page.locator("input[type=range]:visible").first.fill("2")
                page.wait_for_selector(".shown-board [data-step='2']")
            page.mouse.move(SIZE["width"] // 2, 5)
            time.sleep(SETTLE)
            page.screenshot(path=out / f"app_{kind}{suffix}.png", full_page=bool(suffix))
            shrink(out / f"app_{kind}{suffix}.png")
        page.context.close()
    demo.close(verbose=False)


def take_card(page: Page, folder: Path, out: Path) -> None:
    """Render a checkpoint's README.md as a page with its tables and pictures."""
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
    """Take screenshots of the front page and the features page of the documentation."""
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
    """Reduce a picture to a palette of 256 colors."""
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
            take_tabs(browser, models, arguments.out)
        if arguments.card:
            take_card(page, arguments.card, arguments.out)
        if arguments.site:
            take_pages(page, arguments.site, arguments.out)
        browser.close()


if __name__ == "__main__":
    main()

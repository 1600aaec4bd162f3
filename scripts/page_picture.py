"""Makes docs/screens/page.png: the HTML page of an example, in a headless Chromium. `make screens` runs it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.browser import browser, installed  # noqa: E402 - it is found by the root of the repository

PICTURE = ROOT / "docs" / "screens" / "page.png"
COMMAND = "ranges configs/linear_attention.yaml --quiet"
WIDTH, HEIGHT = 1200, 1510


def main() -> int:
    """Writes the picture; 2 where there is no browser."""
    program = installed()
    if program is None:
        print("no Chromium is installed (Debian's package: chromium); docs/screens/page.png stays as it is")
        return 2
    with tempfile.TemporaryDirectory() as folder, browser(program) as tab:
        page = Path(folder) / "page.html"
        made = [sys.executable, "-m", "ampdbg", *COMMAND.split(), "--html", str(page)]
        subprocess.run([*made, "--record", f"{folder}/record.json"], cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
        tab.see()
        tab.open(page, WIDTH, HEIGHT)
        tab.ask("setPower(18)")  # beyond what the gradients stand
        tab.settle()
        tab.screenshot(PICTURE)
    print("page: drawn")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Pages in a real browser, as a phone shows them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def probe(page: str, script: str, folder: Path, scheme: str = "light") -> dict[str, Any]:
    """What `script`, run once the page is loaded, writes into the title as JSON; fails where the console has a line."""
    assert BROWSER is not None
    target = folder / "page.html"
    target.write_text(page.replace("</body>", f"<script>addEventListener('load', () => {{{script}}});</script></body>"))
    done = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=390,900"),
            *("--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}"),
            *(f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}", "--dump-dom", target.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stderr
    return json.loads(title[1])

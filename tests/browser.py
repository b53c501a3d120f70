"""Chromium, without a window: what it makes of a page, asked by a script inside of the page."""

import json
import re
import shutil
from html import unescape
from pathlib import Path

import pytest

from processes import Processes

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

# Chromium's windows are 500 pixels wide at least: a frame can be as narrow as a phone.
FRAME = """<!DOCTYPE html><html><meta charset="utf-8"><style>:root { color-scheme: light dark }
body { margin: 0 } iframe { border: 0; width: WIDTHpx; height: 100vh; display: block }</style>
<iframe src="PAGE"></iframe><script>
addEventListener("message", (e) => { document.documentElement.dataset.report = e.data; });
</script></html>"""

# Tells the frame around it what SCRIPT returns, and what the browser did not like.
PROBE = """<script>
const problems = [];
addEventListener("error", (e) => problems.push(e.message));
addEventListener("unhandledrejection", (e) => problems.push(String(e.reason)));
addEventListener("securitypolicyviolation", (e) => problems.push(e.blockedURI));
for (const level of ["error", "warn"]) console[level] = (...all) => problems.push(all.join(" "));
addEventListener("load", async () => {
  const pause = (milliseconds) => new Promise((resume) => setTimeout(resume, milliseconds));
  const count = (selector) => document.querySelectorAll(selector).length;
  const colour = (selector, key) => getComputedStyle(document.querySelector(selector))[key];
  // What sticks out of the window, or out of its own box without a way to scroll there.
  const cut = (selector) => [...document.querySelectorAll(selector)].filter((each) => {
    const box = each.getBoundingClientRect();
    return box.width && (each.scrollWidth > each.clientWidth + 1 && each.clientWidth
      || box.right > innerWidth + 1 || box.left < -1);
  }).map((each) => each.textContent.trim().slice(0, 60));
  await pause(2500);
  const answer = await (async () => { SCRIPT })();
  const root = document.documentElement;
  parent.postMessage(JSON.stringify({
    problems, width: innerWidth, overflow: root.scrollWidth - root.clientWidth, ...answer,
  }), "*");
});
</script>"""


def ask(page: Path, script: str, *, width: int, scheme: str, profile: Path) -> dict:
    """What a script that runs in a page returns, next to its width, overflow and problems.

    Args:
        page: Stays as it is; copies appear next to it, so that it finds what it loads.
        script: The body of an asynchronous function that returns an object.
        scheme: "light" or "dark", as if the system were set so.
    """
    probed, frame = (page.with_name(f"{kind}-{page.name}") for kind in ("probed", "frame"))
    html = page.read_text("utf-8")
    start = html.index("<head>") + len("<head>")
    probe = PROBE.replace("SCRIPT", script)
    probed.write_text(html[:start] + probe + html[start:], "utf-8")
    text = FRAME.replace("WIDTH", str(width)).replace("PAGE", probed.name)
    frame.write_text(text, "utf-8")
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        *("--disable-sync", f"--user-data-dir={profile}", "--virtual-time-budget=20000"),
        *("--hide-scrollbars", "--dump-dom", "--window-size=1300,900"),
        f"--blink-settings=preferredColorScheme={['dark', 'light'].index(scheme)}",
        frame.as_uri(),
    ]
    started = Processes()
    try:
        run = started.run(command)
    finally:
        started.end()
    found = re.search(r'data-report="([^"]*)"', run.stdout)
    assert found, "the page did not answer"
    return json.loads(unescape(found[1]))

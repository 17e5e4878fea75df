"""A real browser: the machine's own Chromium, without a window."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, async_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs a Chromium: apt-get install chromium"
)
WIDE = {"width": 1360, "height": 720}
NARROW = {"width": 390, "height": 780}
PATIENCE_MS = 150_000
_POLL_S = 0.05

_CONTRASTS = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = (c) => {
    const [r, g, b] = c.map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const [r, g, b, a = 1] = parse(getComputedStyle(at).backgroundColor);
      if (a > 0.99) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.textContent.trim() || !element.offsetParent) continue;
    const own = parse(getComputedStyle(element).color).slice(0, 3);
    const [one, other] = [own, ground(element)].map(light);
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    found.push([node.textContent.trim().slice(0, 40), Math.round(ratio * 100) / 100]);
  }
  return found;
}"""


@dataclass
class Tab:
    """A page that is open, and what went wrong in it."""

    page: Page
    errors: list[str] = field(default_factory=list)

    async def until(self, condition: str, argument: Any = None) -> Any:
        """Wait until a JavaScript expression, or function of the argument, is true there; what it
        is then. Playwright's own way to wait is against the page's policy."""
        async with asyncio.timeout(PATIENCE_MS / 1000):
            while not (found := await self.page.evaluate(condition, argument)):
                await asyncio.sleep(_POLL_S)
        return found

    async def has(self, text: str) -> None:
        """Wait until a text stands on the page."""
        await self.page.get_by_text(text).first.wait_for(timeout=PATIENCE_MS)

    async def too_faint(self, least: float = 4.5) -> list[list[Any]]:
        """The texts whose contrast is below WCAG's bound for text of any size, with the ratio."""
        return [one for one in await self.page.evaluate(_CONTRASTS) if one[1] < least]

    async def overflow_px(self) -> int:
        """By how much the page is wider than the window."""
        width: int = await self.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        return width

    async def operations(self) -> int:
        number: int = await self.page.evaluate("window.phaseloom.app.model.numOperations")
        return number

    async def place_of(self, kind: str) -> dict[str, float]:
        """Where on the screen the newest operation of a kind is, after it was brought into view."""
        place: dict[str, float] = await self.until(_PLACE, kind)
        return place


_PLACE = """(kind) => {
  const { app, painter } = window.phaseloom;
  const { model, view } = app;
  const box = painter.canvas.getBoundingClientRect();
  for (const device of painter.devices()) {
    const { track } = device;
    for (let i = track.length - 1; i >= 0; i--) {
      if (model.kinds[track.kind[i]] !== kind) continue;
      const length = track.end[i] - track.start[i];
      view.follows = false;
      view.show(track.start[i] - length, track.end[i] + length);
      painter.frame(app.theme, performance.now(), true);
      const row = painter.rowOf(device);
      const x = (painter.xOf(track.start[i]) + painter.xOf(track.end[i])) / 2;
      return { x: box.x + x, y: box.y + 26 + row.top + row.height / 2 };
    }
  }
  return null;
}"""


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield running
        finally:
            await running.close()


@asynccontextmanager
async def opened(
    running: Browser, url: str, *, size: dict[str, int] | None = None, scheme: str = "light"
) -> AsyncIterator[Tab]:
    """A page in a browser of its own. Args: scheme: the colours that its user prefers."""
    context = await running.new_context(
        viewport=size or WIDE,  # type: ignore[arg-type]
        color_scheme=scheme,  # type: ignore[arg-type]
        device_scale_factor=1,
        reduced_motion="reduce",
    )
    page = await context.new_page()
    tab = Tab(page)
    page.on("pageerror", lambda error: tab.errors.append(str(error)))
    try:
        await page.goto(url)
        yield tab
    finally:
        await context.close()


async def picture(tab: Tab, path: Path) -> None:
    """A small picture of the page, as a file."""
    await tab.page.screenshot(path=path, animations="disabled")

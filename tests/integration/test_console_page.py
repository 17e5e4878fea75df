"""The console's page in a real browser: live, by keys, in both colours, narrow, and as a replay.

    PICTURES=docs/images .venv/bin/pytest -n 0 tests/integration/test_console_page.py

writes the documentation's pictures.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from grpo import deployments, train
from playwright.async_api import Browser

from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig
from phaseloom.cli.replay import make_replay
from phaseloom.cli.supervisor import Mesh
from tests.support.browser import NARROW, PATIENCE_MS, Tab, browser, needs_chromium, opened, picture
from tests.support.directories import short_directory
from tests.support.jobs import NOOP, TASKS, TENANT, no_barrier, running_mesh, short
from tests.support.processes import free_port, without_torch
from tests.support.runlog import shared

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="module")]

PICTURES = os.environ.get("PICTURES", "")
KEPT = os.environ.get(
    "KEPT", "timeline-light timeline-dark jobs-light timeline-dark-narrow"
).split()
"""The views of which there are pictures."""
STEPS = 400 if PICTURES else 4
WATCHED_S = 16.0
VIEWS = ("timeline", "jobs", "curves", "state", "decisions")
DEVICES = 256
HOUR_S = 3600.0
MOST_FRAME_MS = 250.0
MOST_PAINT_MS = 5000.0
"""On a machine that does other things: alone both take a tenth at most."""


@dataclass(frozen=True)
class Shown:
    mesh: Mesh
    browser: Browser

    @asynccontextmanager
    async def opened(
        self, *, tenant: str = "", size: dict[str, int] | None = None, scheme: str = "light"
    ) -> AsyncIterator[Tab]:
        url = self.mesh.console_url(tenant)
        async with opened(self.browser, url, size=size, scheme=scheme) as tab:
            await tab.until("window.phaseloom?.app.live?.link === 'live'")
            yield tab
            assert not tab.errors


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shown() -> AsyncIterator[Shown]:
    """A mesh with a console, on which the two jobs of the demo train."""
    config = MeshConfig(console_port=free_port())
    with short_directory() as directory:
        async with running_mesh(config, directory) as (mesh, _), browser() as running:
            training = asyncio.create_task(train_both(mesh))
            try:
                yield Shown(mesh, running)
                if not PICTURES:
                    await training
            finally:
                training.cancel()
                await asyncio.wait([training])


async def train_both(mesh: Mesh) -> None:
    async with asyncio.TaskGroup() as group:
        for task in TASKS:
            group.create_task(train_one(mesh, task))


async def train_one(mesh: Mesh, task: str) -> None:
    settings = short(task, STEPS)
    password = mesh.credentials.tenants[TENANT]
    async with client.connect(mesh.url, TENANT, password) as connected:
        job = await connected.submit_job(task, deployments(settings))

        def report(event: str, **values: Any) -> None:
            if event == "step":
                step = values["step"]
                job.report({"reward": values["reward"], "progress": step * 10}, step=step)

        await train(job, task, settings, report, no_barrier)
        if not PICTURES:
            await job.finish()


async def test_timeline_shows_the_jobs_while_they_run(shown: Shown) -> None:
    async with shown.opened() as tab:
        await tab.until("window.phaseloom.app.model.jobs.length === 2")
        # A page on a busy machine has its model before it is painted.
        painted_ms = await tab.until(
            "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
        )
        print(f"first paint after {painted_ms:.0f} ms")
        assert painted_ms < MOST_PAINT_MS
        before = await tab.operations()
        await tab.until("(n) => window.phaseloom.app.model.numOperations > n + 5", before)
        place = await tab.place_of("forward_backward")
        await tab.page.mouse.click(place["x"], place["y"])
        details = tab.page.locator("#details")
        await details.wait_for()
        text = await details.inner_text()
        assert "forward_backward" in text
        assert "Where its time went" in text.replace("WHERE ITS TIME WENT", "Where its time went")
        await tab.has("completed")
        # Each process's spans come half a second late or more.
        legs = await tab.until(_LEGS)
        assert legs["run"].endswith("s")
        await tab.page.keyboard.press("Escape")
        await details.wait_for(state="detached")


async def test_every_view_names_the_jobs_and_why(shown: Shown) -> None:
    async with shown.opened() as tab:
        for view, says in (
            ("jobs", "letter_counting"),
            ("jobs", "reward"),
            ("state", "host memory"),
            ("decisions", "switched in on"),
        ):
            await tab.page.click(f"a[href='#{view}']")
            await tab.has(says)
        await tab.page.fill("input[type=search]", "chain_sum placed")
        await tab.has("placed")


async def test_jobs_tell_what_they_leave_to_others(shown: Shown) -> None:
    """Each has a device of its own in two pools, and works on one of them at a time."""
    async with shown.opened() as tab:
        await tab.page.click("a[href='#jobs']")
        saved = "[...document.querySelectorAll('dt')].find((one) => one.innerText === 'saved')"
        share = await tab.until(f"parseFloat({saved}?.nextSibling.innerText)")
        assert 20 < share < 90


async def test_curves_of_several_jobs_are_drawn_in_one_chart(shown: Shown) -> None:
    """Hovering reads the values, dragging zooms, and a double click shows everything again."""
    async with shown.opened() as tab:
        await tab.page.click("a[href='#curves']")
        chart = tab.page.locator("figure[aria-label^='progress. ']")
        for task in TASKS:
            await chart.locator(".u-series", has_text=task).wait_for(timeout=PATIENCE_MS)
        await tab.until(_LAST_STEP, STEPS)
        mouse = tab.page.mouse

        async def move(share: float) -> None:
            box = await chart.locator(".u-over").bounding_box()
            assert box is not None
            x = box["x"] + 1 + share * (box["width"] - 2)
            await mouse.move(x, box["y"] + box["height"] / 2)

        async def reads(share: float, *values: int) -> None:
            expected = [str(value) for value in values]
            async with asyncio.timeout(PATIENCE_MS / 1000):
                # A chart that is drawn anew forgets where the pointer was.
                while await chart.locator(".u-value").all_inner_texts() != expected:
                    await move(0.5)
                    await move(share)

        await reads(0.0, 1, 10, 10)
        await reads(1.0, STEPS, 10 * STEPS, 10 * STEPS)
        await move(0.4)
        await mouse.down()
        await move(0.9)
        await mouse.up()
        await reads(0.0, 3, 30, 30)
        await chart.locator(".u-over").dblclick()
        await reads(0.0, 1, 10, 10)
        await tab.page.get_by_role("checkbox", name=TASKS[0]).uncheck()
        await chart.locator(".u-series", has_text=TASKS[0]).wait_for(state="detached")
        await reads(0.0, 1, 10)


async def test_page_is_used_by_keys_alone(shown: Shown) -> None:
    async with shown.opened() as tab:
        await tab.until("window.phaseloom.app.model.numOperations > 20")
        await tab.page.locator("#timeline").focus()
        press = tab.page.keyboard.press
        await press(" ")
        assert await tab.page.evaluate("!window.phaseloom.app.view.follows")
        span = "window.phaseloom.app.view.spanS"
        wide = await tab.page.evaluate(span)
        await press("+")
        assert await tab.page.evaluate(span) < wide
        await press("0")
        await press("ArrowDown")
        await tab.page.locator("#details").wait_for()
        first = await tab.page.locator("#details .mono").inner_text()
        await press(".")
        await tab.until(
            "(name) => document.querySelector('#details .mono').innerText !== name", first
        )
        await press("Escape")
        await tab.page.locator("#details").wait_for(state="detached")
        await press("End")
        assert await tab.page.evaluate("window.phaseloom.app.view.follows")
        reached = set()
        for _ in range(40):
            await press("Tab")
            reached.add(await tab.page.evaluate("document.activeElement.id"))
        assert {"theme", "follow", "fit", "tall", "timeline", "overview"} <= reached


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [None, NARROW], ids=["wide", "narrow"])
async def test_page_can_be_read(shown: Shown, scheme: str, size: dict[str, int] | None) -> None:
    async with shown.opened(size=size, scheme=scheme) as tab:
        await tab.until("window.phaseloom.app.model.numOperations > 20")
        assert await tab.page.evaluate("document.documentElement.dataset.theme") == scheme
        if PICTURES:
            await asyncio.sleep(WATCHED_S)
        for view in VIEWS:
            await tab.page.click(f"a[href='#{view}']")
            await tab.has({"state": "host memory", "decisions": "submitted"}.get(view, "chain_sum"))
            assert await tab.too_faint() == []
            assert await tab.overflow_px() <= 0
            name = "-".join([view, scheme, *(["narrow"] if size else [])])
            if PICTURES and name in KEPT:
                await asyncio.sleep(2)
                await picture(tab, Path(PICTURES) / f"console-{name}.png")


async def test_tenants_page_shows_no_buttons_of_an_operator(shown: Shown) -> None:
    async with shown.opened(tenant=TENANT) as tab:
        await tab.has(f"tenant {TENANT}")
        await tab.page.click("a[href='#jobs']")
        await tab.has("chain_sum")
        assert await tab.page.locator(".actions").count() == 0


@pytest.mark.parametrize("address", ["", "?key=wrong"])
async def test_page_says_that_its_key_is_missing(shown: Shown, address: str) -> None:
    url = f"http://127.0.0.1:{shown.mesh.config.console_port}/{address}"
    async with opened(shown.browser, url) as tab:
        await tab.has("The key is missing or wrong.")
        await tab.has("phaseloom up")
        assert not tab.errors


async def test_page_goes_on_when_the_mesh_is_restarted(short_dir: Path) -> None:
    config = MeshConfig(console_port=free_port())
    with without_torch():
        async with AsyncExitStack() as stack:
            pages = await stack.enter_async_context(browser())
            async with running_mesh(config, short_dir) as (mesh, _):
                await steps(mesh, "before", 5)
                tab = await stack.enter_async_context(opened(pages, mesh.console_url()))
                # A job that is finished at once may leave its last operation out of the log.
                await tab.until("window.phaseloom?.app.model.numOperations >= 3")
            await tab.until("window.phaseloom.app.live.link === 'lost'")
            async with running_mesh(config, short_dir) as (mesh, _):
                await tab.until("window.phaseloom.app.live.link === 'live'")
                await steps(mesh, "after", 3)
                await tab.until(
                    "window.phaseloom.app.model.deployments.includes('demo.after.policy')"
                )
                assert await tab.operations() > 3, "those of before are there, too"
                assert not tab.errors


async def steps(mesh: Mesh, name: str, number: int) -> None:
    password = mesh.credentials.tenants[TENANT]
    async with client.connect(mesh.url, TENANT, password) as connected:
        job = await connected.submit_job(name, NOOP)
        for _ in range(number):
            await job.deployment("policy").optim_step(client.AdamParams(1e-3))
        await job.finish()


# --- replay ---------------------------------------------------------------------------------------


async def test_replay_opens_from_a_file_and_plays(tmp_path: Path) -> None:
    path = tmp_path / "replay.html"
    make_replay("a run", shared().recorded(), path)
    async with browser() as running, opened(running, path.as_uri()) as tab:
        await tab.until("window.phaseloom?.app.model.numOperations > 0")
        await tab.has("a run")
        place = await tab.place_of("generate")
        await tab.page.mouse.click(place["x"], place["y"])
        await tab.has("Where its time went")
        assert await tab.page.locator("ol.waterfall[data-of=log]").count() == 1
        await tab.page.click("text=10 s")
        begin = await tab.page.evaluate("window.phaseloom.app.view.fromS")
        await tab.page.click("#play")
        await tab.until("(from) => window.phaseloom.app.view.fromS !== from", begin)
        await tab.page.click("a[href='#decisions']")
        await tab.has("switched in on")
        assert not tab.errors


async def test_hour_of_256_devices_is_moved_through_smoothly(tmp_path: Path) -> None:
    path = tmp_path / "replay.html"
    make_replay("an hour", shared().recorded(), path)
    async with browser() as running, opened(running, path.as_uri()) as tab:
        await tab.until("window.phaseloom?.app.model.numOperations > 0")
        number = await tab.page.evaluate(_HOUR, {"devices": DEVICES, "seconds": HOUR_S})
        assert number > 500_000
        await tab.page.click("#fit")
        figures = {}
        for what, factor in (("all of it", 1.0), ("minutes", 0.05), ("seconds", 0.002)):
            figures[what] = statistics.median(await tab.page.evaluate(_FRAMES, factor))
        told = ", ".join(f"{what} {ms:.1f} ms" for what, ms in figures.items())
        print(f"a frame of {number} operations: {told}")
        assert max(figures.values()) < MOST_FRAME_MS
        if PICTURES and "hour" in KEPT:
            await tab.page.evaluate(_FRAMES, 1.0)
            await picture(tab, Path(PICTURES) / "console-hour.png")
        assert not tab.errors


_LAST_STEP = """(step) => {
  const curves = [...window.phaseloom.app.model.curves.values()];
  const ends = curves.map((one) => one.get("progress")?.steps.at(-1));
  return ends.length === 2 && ends.every((end) => end === step);
}"""

_LEGS = """() => {
  const rows = [...document.querySelectorAll("ol.waterfall[data-of=spans] li")];
  const legs = Object.fromEntries(
    rows.map((row) => [row.firstChild.innerText, row.lastChild.innerText]),
  );
  const names = ["validate", "queue", "permit", "run", "completion"];
  return names.every((name) => name in legs) ? legs : null;
}"""

_HOUR = """({ devices, seconds }) => {
  const { app } = window.phaseloom;
  const tick = 1e-4;
  const update = {
    cursor: 1, now_s: 0, origin_s: 0, is_whole: true, kinds: ["forward_backward", "optim_step"],
    deployments: [], devices: [], operations: [], activations: [], nodes: [],
  };
  for (let node = 0; node < devices / 8; node++) {
    update.nodes.push({
      node: `train-${node}`, pool: "train", devices: Array(8).fill(2 ** 36), host_memory_bytes: 0,
    });
  }
  for (let device = 0; device < devices; device++) {
    const node = Math.floor(device / 8);
    update.devices.push(`train-${node}/${device % 8}`);
    for (const job of [node % 8, (node + 1) % 8]) {
      update.deployments.push(`demo.job-${job}.policy-${device}`);
    }
    let now = 2 + 0.37 * (device % 16);
    for (let turn = 0; now < seconds; turn++) {
      const deployment = 2 * device + (turn % 2);
      const at = Math.round(now / tick);
      update.activations.push([deployment, at, 2000, 3000, 1000 * (turn % 5), [device], 1e9, 1e9]);
      now += 0.5;
      for (const [kind, length] of [[0, 1.3], [0, 1.2], [1, 0.4], [0, 1.3], [1, 0.4]]) {
        const start = Math.round(now / tick);
        now += length;
        const end = Math.round(now / tick);
        update.operations.push([
          deployment, kind, String(turn), start - 3000, start - 500, start, end, 20, [device], 1024,
        ]);
      }
      now += 0.22 * ((device * 7 + turn * 13) % 5);
    }
  }
  app.model.take(update);
  app.changed();
  return app.model.numOperations;
}"""

_FRAMES = """async (factor) => {
  const { app, painter } = window.phaseloom;
  const { view, model } = app;
  view.speed = 0;
  view.show(model.firstS, model.firstS + factor * (model.lastS - model.firstS));
  const took = [];
  for (let i = 0; i < 11; i++) {
    view.pan(0.004 * view.spanS);
    const begin = performance.now();
    painter.frame(app.theme, begin, true);
    took.push(performance.now() - begin);
    await new Promise(requestAnimationFrame);
  }
  return took;
}"""

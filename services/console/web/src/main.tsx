// The page: live where a server serves it, a replay where a run is in it.

import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { App, useApp } from "./app";
import { Curves } from "./curves";
import { Decisions } from "./decisions";
import { Jobs } from "./jobs";
import { Live } from "./live";
import { Model } from "./model";
import { State } from "./state";
import "./style.css";
import { Timeline } from "./timeline";
import type { Replay } from "./wire";

const TABS = ["timeline", "jobs", "curves", "state", "decisions"] as const;
/** The tabs that a recorded run has, too. */
const OF_REPLAYS: readonly string[] = ["timeline", "decisions"];
type Tab = (typeof TABS)[number];
/** The length of the stretch, in the middle of a replayed run, that is in view first. */
const FIRST_SPAN_S = 20;

function Page({ app }: { app: App }) {
  useApp(app);
  const [tab, setTab] = useState<Tab>(tabOf(location.hash));
  useEffect(() => {
    const turn = () => setTab(tabOf(location.hash));
    addEventListener("hashchange", turn);
    return () => removeEventListener("hashchange", turn);
  }, []);
  const tabs = TABS.filter((name) => app.live || OF_REPLAYS.includes(name));
  if (app.live?.link === "refused") return <Refused />;
  return (
    <>
      <header class="top">
        <h1><Logo /> Phaseloom</h1>
        <nav aria-label="Views">
          {tabs.map((name) => (
            <a key={name} href={`#${name}`} aria-current={tab === name ? "page" : undefined}>
              {name[0]!.toUpperCase() + name.slice(1)}
            </a>
          ))}
        </nav>
        <span class="whose">{app.title || whose(app)}</span>
        <Link app={app} />
        <button
          class="plain"
          id="theme"
          aria-label={app.isDark ? "Light colours" : "Dark colours"}
          title={app.isDark ? "Light colours" : "Dark colours"}
          onClick={() => app.toggleTheme()}
        >
          {app.isDark ? "☀" : "☾"}
        </button>
      </header>
      <main>
        {tab === "timeline" && <Timeline app={app} />}
        {tab === "jobs" && app.live && <Jobs app={app} />}
        {tab === "curves" && app.live && <Curves app={app} />}
        {tab === "state" && app.live && <State app={app} />}
        {tab === "decisions" && <Decisions app={app} />}
      </main>
    </>
  );
}

function whose(app: App): string {
  const tenant = app.live?.caller.tenant;
  return tenant ? `tenant ${tenant}` : "all tenants";
}

function Link({ app }: { app: App }) {
  if (!app.live) return <span class="link replay">replay</span>;
  const { link } = app.live;
  const words = { connecting: "connecting", live: "live", lost: "reconnecting", refused: "" }[link];
  return <span class={`link ${link}`} id="link" role="status">{words}</span>;
}

function Refused() {
  return (
    <main class="refused">
      <h1><Logo /> Phaseloom</h1>
      <p>
        The key is missing or wrong. Open the address that <code>phaseloom up</code> has printed: the key is in
        it. <code>phaseloom env --json</code> prints the address again, in the directory of the mesh. On a mesh
        that was started by hand, add <code>?key=…</code> with a key of <code>console.env</code>.
      </p>
    </main>
  );
}

function Logo() {
  return (
    <svg class="logo" viewBox="0 0 20 20" aria-hidden="true">
      <rect x="1" y="2.5" width="11" height="4" rx="1.2" />
      <rect x="8" y="8" width="11" height="4" rx="1.2" />
      <rect x="3" y="13.5" width="9" height="4" rx="1.2" />
    </svg>
  );
}

function tabOf(hash: string): Tab {
  const name = hash.slice(1) as Tab;
  return TABS.includes(name) ? name : "timeline";
}

async function unpacked(text: string): Promise<Replay> {
  const bytes = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return (await new Response(stream).json()) as Replay;
}

async function start(): Promise<void> {
  const root = document.getElementById("app")!;
  const model = new Model();
  const inlined = document.getElementById("replay")?.textContent;
  if (inlined) {
    const replay = await unpacked(inlined);
    model.take(replay.update);
    const app = new App(model, null, replay.title);
    app.view.follows = false;
    const middle = (model.firstS + model.lastS) / 2;
    app.view.show(middle - FIRST_SPAN_S / 2, middle + FIRST_SPAN_S / 2);
    document.title = `${replay.title} · Phaseloom`;
    render(<Page app={app} />, root);
    return;
  }
  const app = new App(model, null, "");
  app.live = new Live(model, () => app.changed());
  render(<Page app={app} />, root);
  app.live.start();
}

void start();

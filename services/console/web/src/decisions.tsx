// The list of the newest decisions and context switches, with their reasons.

import { useState } from "preact/hooks";
import { type App, useApp } from "./app";
import { css, jobColour } from "./colours";
import { bytes, clock, percent, seconds, since } from "./format";
import type { Model } from "./model";
import type { Decision } from "./wire";

const SHOWN = 300;

export function Decisions({ app }: { app: App }) {
  useApp(app);
  const [sought, setSought] = useState("");
  const [isTrouble, setTrouble] = useState(false);
  const [hasSwitches, setSwitches] = useState(true);
  const { model } = app;
  const words = sought.toLowerCase().split(/\s+/).filter(Boolean);
  const all = hasSwitches ? merged(model) : model.decisions;
  const found = all.filter((one) => {
    const text = `${one.job ?? ""} ${one.what} ${one.why ?? ""}`.toLowerCase();
    return (!isTrouble || one.is_trouble) && words.every((word) => text.includes(word));
  });
  const shown = found.slice(-SHOWN).reverse();
  return (
    <section class="page" aria-label="Decisions">
      <div class="filter">
        <input
          type="search"
          placeholder="Filter by job, node or word"
          aria-label="Filter decisions"
          value={sought}
          onInput={(event) => setSought(event.currentTarget.value)}
        />
        <label>
          <input type="checkbox" checked={hasSwitches} onChange={(event) => setSwitches(event.currentTarget.checked)} />
          context switches
        </label>
        <label>
          <input type="checkbox" checked={isTrouble} onChange={(event) => setTrouble(event.currentTarget.checked)} />
          only trouble
        </label>
        <span class="muted" role="status">{found.length} of {all.length}</span>
      </div>
      <ol class="decisions">
        {shown.map((one, number) => {
          const job = model.jobs.indexOf(one.job ?? "");
          return (
            <li key={`${one.time_s} ${number}`} class={one.is_trouble ? "trouble" : ""}>
              <time>{app.live ? clock(one.time_s) : since(one.time_s - model.originS, 0.1)}</time>
              <span class="of">
                {one.job && <i class="dot" style={{ background: css(jobColour(Math.max(0, job), app.isDark)) }} />}
                {one.job ? one.job.split(".").slice(1).join(".") : "mesh"}
              </span>
              <span><b>{one.what}</b>{one.why && <span class="muted"> {one.why}</span>}</span>
            </li>
          );
        })}
      </ol>
      {!shown.length && <p class="empty">Nothing {words.length || isTrouble ? "matches" : "has been decided yet"}.</p>}
    </section>
  );
}

/** Decisions and context switches, in the order of time. */
function merged(model: Model): Decision[] {
  const switches = model.switches.slice(-SHOWN).map(({ activation, where }): Decision => {
    const name = model.deployments[activation.deployment]!;
    const tookS = activation.endS - activation.startS;
    const ahead = activation.isSpeculative ? "ahead of a predicted operation" : "for a ready operation";
    const away = activation.displaced.map((one) => model.deployments[one]!.split(".").slice(1).join("."));
    return {
      time_s: model.originS + activation.startS,
      job: model.jobs[model.jobOf[activation.deployment]!]!,
      what: `${name.split(".")[2]} switched in on ${where}`,
      why:
        `${ahead}${away.length ? `, in place of ${away.join(", ")}` : ""}; ` +
        `${seconds(tookS)}, ${percent(activation.hiddenS / tookS)} hidden, ${bytes(activation.bytesIn)} in`,
    };
  });
  return [...model.decisions, ...switches].sort((a, b) => a.time_s - b.time_s);
}

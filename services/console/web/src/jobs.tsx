// The jobs: their state and cycle, what they got, and why one waits.

import { useState } from "preact/hooks";
import { type App, useApp, useAsked, useTick } from "./app";
import { css, jobColour } from "./colours";
import { RunCurves } from "./curves";
import { Why, refusal } from "./details";
import { count, percent, seconds } from "./format";
import { ask } from "./live";
import { curvesKey, type Head, type Recent } from "./model";
import type { Explanation, JobRow } from "./wire";

/** The length of the newest stretch of time that the figures are of. */
const WINDOW_S = 60;
const NUM_BARS = 40;
/** A job waits if it has had an operation ready for longer. */
const WAITS_FROM_S = 0.3;

export function Jobs({ app }: { app: App }) {
  useApp(app);
  useTick(1000);
  const { model } = app;
  const now = app.nowS();
  const windowS = Math.min(WINDOW_S, Math.max(1, now - model.firstS));
  const recent = model.recent(windowS, now);
  const busy = model.busyBuckets(now - windowS, now, 1);
  const going = model.jobRows.filter((row) => !row.has_ended);
  const ended = model.jobRows.filter((row) => row.has_ended);
  const card = (row: JobRow) => {
    const number = model.jobs.indexOf(row.job);
    return (
      <Card
        key={row.job} app={app} row={row} number={number} recent={recent.get(number)}
        busyS={(busy[number]?.[0] ?? 0) * windowS} windowS={windowS}
      />
    );
  };
  return (
    <section class="page jobs" aria-label="Jobs">
      {!model.jobRows.length && <p class="empty">No job has been submitted yet.</p>}
      {going.map(card)}
      {ended.length > 0 && <h2 class="rest">Ended</h2>}
      {ended.map(card)}
    </section>
  );
}

function Card({
  app, row, number, recent, busyS, windowS,
}: { app: App; row: JobRow; number: number; recent?: Recent; busyS: number; windowS: number }) {
  const { model } = app;
  const colour = css(jobColour(Math.max(0, number), app.isDark));
  const heads = model.heads.filter((head) => model.jobOf[head.deployment] === number);
  const waiting = heads.filter((head) => app.nowS() - head.ready > WAITS_FROM_S && !runs(app, head));
  const stalled = recent ? recent.stalledS / windowS : 0;
  const aloneS = recent?.aloneS ?? 0;
  const [, name] = row.job.split(".");
  return (
    <article class="card job" style={{ "--job": colour } as never}>
      <header>
        <h2><i class="dot" />{name} <small>of {row.job.split(".")[0]}{row.run ? `, run ${row.run}` : ""}</small></h2>
        <span class={`state ${row.state}`}>{row.state}</span>
        {app.live?.caller.can_act && !row.has_ended && <Actions job={row.job} />}
      </header>
      <dl class="tiles">
        <Tile name="operations/s" value={recent ? count(recent.num / windowS) : "0"} />
        <Tile name="open" value={count(row.num_open ?? 0)} />
        <Tile name="done" value={count(row.num_done ?? 0)} />
        <Tile name="failed" value={count(row.num_failed ?? 0)} isBad={(row.num_failed ?? 0) > 0} />
        <Tile
          name="slowdown"
          value={recent && stalled < 0.99 ? `${(1 / (1 - stalled)).toFixed(2)} ×` : "–"}
          title={`Estimate: of the last ${Math.round(windowS)} s it had work ready and none of it running for ${percent(stalled)}`}
        />
        <Tile name="device time" value={row.device_s ? seconds(row.device_s) : "–"} />
        <Tile
          name="saved"
          value={aloneS > busyS ? percent(1 - busyS / aloneS) : "–"}
          title={`Estimate: for the work of the last ${Math.round(windowS)} s it would have held devices alone for ${seconds(aloneS)} and had work on them for ${seconds(busyS)}; others may have the rest`}
        />
        <Tile
          name="cycle"
          value={row.period_s ? seconds(row.period_s) : "–"}
          title={row.worst_period_s ? `At worst ${seconds(row.worst_period_s)}` : "No cycle found yet"}
        />
      </dl>
      <Share app={app} number={number} colour={colour} />
      {row.tags?.length ? <p class="tags">{row.tags.map((tag) => <span key={tag}>{tag}</span>)}</p> : null}
      {row.has_config && app.live ? <Config row={row} /> : null}
      <RunCurves app={app} run={curvesKey(row.job, row.run)} />
      {row.period_s && row.segments?.length ? <Cycle row={row} /> : null}
      {row.placement && <p class="placement">{row.placement}</p>}
      {row.error && <p class="trouble">{row.error.message}{row.error.remedy ? `: ${row.error.remedy}` : ""}</p>}
      {waiting.map((head) => <Waits key={model.nameOf(head)} app={app} head={head} />)}
      {row.deployments?.length ? <Deployments row={row} /> : null}
    </article>
  );
}

/** Whether an operation runs, as far as the log tells: its deployment holds its first device. */
function runs({ model }: App, head: Head): boolean {
  const device = model.devices[head.devices[0] ?? -1];
  return device?.activations[device.activations.length - 1]?.deployment === head.deployment;
}

function Tile({ name, value, title, isBad }: { name: string; value: string; title?: string; isBad?: boolean }) {
  return (
    <div title={title}>
      <dt>{name}</dt>
      <dd class={isBad ? "trouble" : ""}>{value}</dd>
    </div>
  );
}

/** The job's share of all devices' time, of late. */
function Share({ app, number, colour }: { app: App; number: number; colour: string }) {
  const { model } = app;
  if (number < 0 || !model.numOperations) return null;
  const toS = app.nowS();
  const fromS = Math.max(model.firstS, toS - 4 * WINDOW_S);
  const column = model.busyBuckets(fromS, Math.max(toS, fromS + 1), NUM_BARS)[number];
  const devices = Math.max(1, model.devices.filter((one) => one.track.length).length);
  if (!column) return null;
  return (
    <svg class="share" viewBox={`0 0 ${NUM_BARS} 10`} preserveAspectRatio="none" role="img" aria-label="Its share of the devices, of late">
      {[...column].map((value, x) => {
        const height = 10 * Math.min(1, value / devices);
        return <rect key={x} x={x + 0.08} width={0.84} y={10 - height} height={height} fill={colour} />;
      })}
    </svg>
  );
}

/** The settings that the program gave its run, fetched when they are opened. */
function Config({ row }: { row: JobRow }) {
  const [said, setSaid] = useState("");
  const open = async () => {
    try {
      const status = await ask<{ config?: object }>(`api/explain/${row.job}`);
      setSaid(JSON.stringify(status.config ?? {}, null, 2));
    } catch (error) {
      setSaid(refusal(error));
    }
  };
  return (
    <details class="config" onToggle={() => said || void open()}>
      <summary>config</summary>
      <pre>{said || "…"}</pre>
    </details>
  );
}

function Cycle({ row }: { row: JobRow }) {
  const pools = [...new Set(row.segments!.map(([pool]) => pool))];
  return (
    <div class="cycle" role="img" aria-label={`Cycle of ${seconds(row.period_s!)}`}>
      {pools.map((pool) => (
        <div key={pool}>
          <span>{pool}</span>
          <div class="rail">
            {row.segments!.filter(([one]) => one === pool).map(([, from, length]) => (
              <i
                key={from}
                style={{
                  left: `${(100 * from) / row.period_s!}%`,
                  width: `${Math.min(100, (100 * length) / row.period_s!)}%`,
                }}
              />
            ))}
          </div>
        </div>
      ))}
    </div>
  );
}

function Waits({ app, head }: { app: App; head: Head }) {
  const name = app.model.nameOf(head);
  const { answer, error } = useAsked(name, () => ask<Explanation>(`api/explain/${name}`), 2000);
  return (
    <div class="waits">
      <b>{app.model.kinds[head.kind]} {name.split(".").slice(2).join(".")}</b> has waited for {seconds(app.nowS() - head.ready)}
      {answer ? <Why said={answer} /> : error ? <p class="muted">{refusal(error)}</p> : null}
    </div>
  );
}

function Deployments({ row }: { row: JobRow }) {
  return (
    <div class="scroll">
      <table>
        <thead>
          <tr><th>deployment</th><th>pool</th><th>node</th><th>state</th><th class="num">incarnation</th></tr>
        </thead>
        <tbody>
          {row.deployments!.map((one) => (
            <tr key={one.name}>
              <td>{one.name}</td>
              <td>{one.pool}</td>
              <td>{one.node || "–"}{one.moving ? ` → ${one.moving}` : ""}</td>
              <td>{one.state}{one.error && <span class="trouble"> {one.error.message}</span>}</td>
              <td class="num">{one.incarnation ?? 0}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Actions({ job }: { job: string }) {
  const [asked, setAsked] = useState("");
  const [said, setSaid] = useState("");
  const act = async (what: string) => {
    if (asked !== what) return setAsked(what);
    setAsked("");
    try {
      await ask(`api/${what}/${job}`, "POST");
      setSaid("");
    } catch (error) {
      setSaid(refusal(error));
    }
  };
  return (
    <span class="actions">
      {(["drain", "cancel"] as const).map((what) => (
        <button key={what} class={asked === what ? "sure" : ""} onBlur={() => setAsked("")} onClick={() => void act(what)}>
          {asked === what ? `${what} it?` : what}
        </button>
      ))}
      {said && <span class="trouble" role="alert">{said}</span>}
    </span>
  );
}

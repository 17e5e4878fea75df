// The view of state: how full each tier of a node is, and which deployments and versions it holds.

import { useState } from "preact/hooks";
import { type App, useApp, useAsked } from "./app";
import { css, jobColour } from "./colours";
import { refusal } from "./details";
import { bytes } from "./format";
import { ask } from "./live";
import type { NodeReport } from "./wire";

export function State({ app }: { app: App }) {
  useApp(app);
  const { answer, error } = useAsked("nodes", () => ask<Record<string, NodeReport>>("api/nodes"), 2000);
  if (!answer) return <section class="page"><p class="empty">{error ? refusal(error) : "Asking the nodes …"}</p></section>;
  return (
    <section class="page" aria-label="State">
      {Object.entries(answer).map(([name, report]) => <Node key={name} app={app} name={name} report={report} />)}
      {!Object.keys(answer).length && <p class="empty">No node is up.</p>}
    </section>
  );
}

function Node({ app, name, report }: { app: App; name: string; report: NodeReport }) {
  const row = app.model.nodes.get(name);
  if (report.error) {
    return (
      <article class="card">
        <header><h2>{name}</h2></header>
        <p class="trouble">{report.error}</p>
      </article>
    );
  }
  return (
    <article class="card node">
      <header>
        <h2>{name} <small>{row?.pool}</small></h2>
        {app.live?.caller.can_act && <Drain node={name} />}
      </header>
      <div class="tiers">
        {report.device_budget_bytes.map((budget, number) => (
          <Tier key={number} name={`device ${number}`} used={report.device_used_bytes[number] ?? 0} budget={budget} />
        ))}
        <Tier name="host memory" used={report.host_used_bytes} budget={report.host_budget_bytes} />
        <Tier name="NVMe" used={report.nvme_used_bytes ?? 0} budget={report.nvme_budget_bytes ?? 0} />
      </div>
      {report.deployments.length > 0 && (
        <div class="scroll">
          <table>
            <thead>
              <tr>
                <th>deployment</th><th class="num">as of</th><th class="num">device</th><th class="num">host</th>
                <th class="num">NVMe</th><th class="num">shared</th><th class="num">under way</th>
              </tr>
            </thead>
            <tbody>
              {report.deployments.map((one) => {
                const { tenant, job, deployment } = one.deployment;
                const number = app.model.jobs.indexOf(`${tenant}.${job}`);
                return (
                  <tr key={`${tenant}.${job}.${deployment}`}>
                    <td>
                      <i class="dot" style={{ background: css(jobColour(Math.max(0, number), app.isDark)) }} />
                      {job}.{deployment}
                    </td>
                    <td class="num">{one.applied}</td>
                    <td class={`num${one.device_bytes ? " here" : ""}`}>{size(one.device_bytes)}</td>
                    <td class="num">{size((one.host_bytes ?? 0) + (one.host_only_bytes ?? 0))}</td>
                    <td class="num">{size(one.nvme_bytes)}</td>
                    <td class="num">{size(one.shared_bytes)}</td>
                    <td class="num">{size(one.dirty_bytes)}</td>
                  </tr>
                );
              })}
            </tbody>
          </table>
        </div>
      )}
      {report.version_states?.length ? (
        <div class="scroll">
          <table>
            <thead>
              <tr><th>weights version</th><th class="num">bytes</th><th>in</th><th class="num">users</th></tr>
            </thead>
            <tbody>
              {report.version_states.map((one) => (
                <tr key={`${Object.values(one.version.policy).join(".")}.${one.version.seq}.${one.version.part ?? ""}`}>
                  <td>
                    {one.version.policy.job}.{one.version.policy.deployment}.{one.version.seq}
                    {one.version.part ? ` part ${one.version.part}` : ""}
                  </td>
                  <td class="num">{size(one.num_bytes)}</td>
                  <td>{[one.in_host && "host memory", one.on_nvme && "NVMe"].filter(Boolean).join(", ")}</td>
                  <td class="num">{one.num_users}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      ) : null}
    </article>
  );
}

function size(value = 0): string {
  return value ? bytes(value) : "–";
}

function Tier({ name, used, budget }: { name: string; used: number; budget: number }) {
  const share = budget ? Math.min(1, used / budget) : 0;
  return (
    <div class="tier">
      <span>{name}</span>
      <div class="rail" role="meter" aria-label={name} aria-valuemin={0} aria-valuemax={budget} aria-valuenow={used}>
        <i style={{ width: `${100 * share}%` }} class={share > 0.92 ? "full" : ""} />
      </div>
      <span class="num">{bytes(used)}{budget ? ` of ${bytes(budget)}` : ""}</span>
    </div>
  );
}

function Drain({ node }: { node: string }) {
  const [isAsked, setAsked] = useState(false);
  const [said, setSaid] = useState("");
  const act = async (undo: boolean) => {
    if (!undo && !isAsked) return setAsked(true);
    setAsked(false);
    try {
      const status = await ask<{ is_draining?: boolean; waits_for?: string[] }>(
        `api/drain/${node}${undo ? "?undo=1" : ""}`, "POST",
      );
      setSaid(status.is_draining ? `being drained; ${status.waits_for?.join("; ") || "nothing is on it"}` : "");
    } catch (error) {
      setSaid(refusal(error));
    }
  };
  return (
    <span class="actions">
      <button class={isAsked ? "sure" : ""} onBlur={() => setAsked(false)} onClick={() => void act(false)}>
        {isAsked ? "drain it?" : "drain"}
      </button>
      <button onClick={() => void act(true)}>use again</button>
      {said && <span class="muted" role="status">{said}</span>}
    </span>
  );
}

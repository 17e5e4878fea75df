// The panel of one operation: where its time went, its context switch, and the scheduler's reasons.

import { type App, useApp, useAsked } from "./app";
import { barCss } from "./raster";
import { css } from "./colours";
import { bytes, clock, count, percent, seconds, since } from "./format";
import { ask, type Refusal } from "./live";
import type { Activation, Operation } from "./model";
import type { Picked } from "./painter";
import type { Explanation } from "./wire";

const ASK_MS = 2000;

export function Details({ app, picked, close }: { app: App; picked: Picked; close: () => void }) {
  useApp(app);
  const { model } = app;
  const one = picked.type === "operation" ? model.operation(picked.index) : picked.head;
  const name = model.nameOf(one);
  const [tenant, job, deployment, slot] = name.split(".");
  const ran = picked.type === "operation" ? (one as Operation) : null;
  return (
    <aside class="details" id="details" aria-label={`Operation ${name}`}>
      <header>
        <div>
          <h2>{model.kinds[one.kind]}</h2>
          <p class="mono">{name}</p>
        </div>
        <button class="plain" aria-label="Close" title="Escape" onClick={close}>✕</button>
      </header>
      <dl class="facts">
        <dt>job</dt><dd>{job} <small>of {tenant}</small></dd>
        <dt>deployment</dt><dd>{deployment}, operation {slot}</dd>
        <dt>on</dt><dd>{one.devices.map((d) => model.devices[d]!.label).join(", ") || "no device"}</dd>
        {ran && (
          <>
            <dt>outcome</dt>
            <dd class={ran.outcome === "completed" ? "" : "trouble"}>
              {ran.outcome}{ran.isReplay ? ", run again after a loss" : ""}
            </dd>
            {ran.tokens > 0 && (
              <>
                <dt>tokens</dt>
                <dd>{count(ran.tokens)}{ran.end > ran.start ? `, ${count(ran.tokens / (ran.end - ran.start))}/s` : ""}</dd>
              </>
            )}
            <dt>began</dt>
            <dd>{app.live ? clock(model.originS + ran.start, 0.001) : `${since(ran.start, 0.001)} s`}</dd>
          </>
        )}
      </dl>
      {ran && <Waterfall app={app} one={ran} picked={picked} />}
      {app.live && <Explained name={name} />}
    </aside>
  );
}

interface Part {
  name: string;
  from: number;
  to: number;
  colour: string;
}

function Waterfall({ app, one, picked }: { app: App; one: Operation; picked: Picked }) {
  const { model, theme } = app;
  const opened = model.activationAt(picked.device, one.start + 1e-6);
  const isOwn = opened !== undefined && opened.deployment === one.deployment;
  const isFirst = isOwn && opened.endS > opened.startS && isFirstAfter(app, picked, one, opened);
  const ran = barCss(theme, model.jobOf[one.deployment]!, model.kinds[one.kind]!);
  const parts: Part[] = [
    { name: "in order", from: one.queued, to: one.ready, colour: css(theme.hidden, 0.45) },
    { name: "for its device", from: one.ready, to: one.start, colour: css(theme.hidden) },
  ];
  if (isFirst) {
    parts.push({ name: "switch", from: opened.startS, to: opened.endS, colour: css(theme.waited) });
  }
  parts.push({ name: "ran", from: one.start, to: one.end, colour: ran });
  const from = Math.min(...parts.map((part) => part.from));
  const span = Math.max(1e-6, one.end - from);
  return (
    <>
      <h3>Where its time went</h3>
      <ol class="waterfall">
        {parts.map((part) => (
          <li key={part.name}>
            <span>{part.name}</span>
            <div class="rail">
              <i
                style={{
                  left: `${(100 * (part.from - from)) / span}%`,
                  width: `max(2px, ${(100 * Math.max(0, part.to - part.from)) / span}%)`,
                  background: part.colour,
                }}
              />
            </div>
            <span class="num">{seconds(Math.max(0, part.to - part.from))}</span>
          </li>
        ))}
      </ol>
      {isOwn && opened.endS > opened.startS && <SwitchOf app={app} opened={opened} isFirst={isFirst} />}
    </>
  );
}

/** Whether no other operation of the deployment ran on the device since it was switched in. */
function isFirstAfter({ model }: App, picked: Picked, one: Operation, opened: Activation): boolean {
  const { track } = picked.device;
  for (let i = track.from(opened.startS); i < track.length && track.start[i]! < one.start; i++) {
    if (track.operation[i] !== one.index && model.operation(track.operation[i]!).deployment === one.deployment) {
      return false;
    }
  }
  return true;
}

function SwitchOf({ app, opened, isFirst }: { app: App; opened: Activation; isFirst: boolean }) {
  const { model } = app;
  const tookS = opened.endS - opened.startS;
  const names = opened.displaced.map((one) => model.deployments[one]).join(", ");
  return (
    <>
      <h3>{isFirst ? "The switch it caused" : "The switch before it"}</h3>
      <dl class="facts">
        <dt>took</dt><dd>{seconds(tookS)}, {percent(opened.hiddenS / tookS)} hidden</dd>
        <dt>out</dt><dd>{bytes(opened.bytesOut)} in {seconds(opened.offloadS)}{names ? `: ${names}` : ""}</dd>
        <dt>in</dt><dd>{bytes(opened.bytesIn)} in {seconds(opened.loadS)}</dd>
        <dt>why</dt>
        <dd>{opened.isSpeculative ? "ahead of a predicted operation" : "an operation was ready"}</dd>
      </dl>
    </>
  );
}

export function Explained({ name }: { name: string }) {
  const { answer, error } = useAsked(name, () => ask<Explanation>(`api/explain/${name}`), ASK_MS);
  return (
    <>
      <h3>What the scheduler says</h3>
      {answer ? <Why said={answer} /> : <p class="muted">{error ? refusal(error) : "…"}</p>}
    </>
  );
}

export function Why({ said }: { said: Explanation }) {
  return (
    <ul class="why">
      <li>{said.state}</li>
      {(said.waits_for ?? []).map((line) => <li key={line}>waits for {line}</li>)}
      {said.place ? <li>place {said.place} on its device</li> : null}
      {(said.predicted_start_s ?? -1) >= 0 ? <li>starts in about {seconds(said.predicted_start_s!)}</li> : null}
      {said.why ? <li>because {said.why}</li> : null}
    </ul>
  );
}

export function refusal(error: unknown): string {
  const { message, remedy } = error as Refusal;
  return remedy ? `${message}: ${remedy}` : message;
}

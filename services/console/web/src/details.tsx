// The panel of one operation: where its time went, its context switch, and the scheduler's reasons.

import { useRef } from "preact/hooks";
import { type App, useApp, useAsked } from "./app";
import { barCss } from "./raster";
import { css } from "./colours";
import { bytes, clock, count, percent, seconds, since } from "./format";
import { ask, type Refusal } from "./live";
import type { Activation, Operation } from "./model";
import type { Picked } from "./painter";
import { type Explanation, type Leg, TICK_S } from "./wire";

const ASK_MS = 2000;
/** Spans come half a second late: they are asked for again until the last one is there. */
const MOST_ASKED = 4;
/** What each span of an operation is, in words. */
const LEGS: Record<string, string> = {
  submit: "publish",
  route: "validate",
  queue: "queue",
  permit: "permit",
  switch: "switch",
  offload: "offload",
  load: "load",
  execute: "run",
  complete: "completion",
};

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
      <Waterfall app={app} name={name} ran={ran} picked={picked} />
      {app.live && <Explained name={name} />}
    </aside>
  );
}

interface Part {
  name: string;
  from: number;
  to: number;
  colour: string;
  depth?: number;
  /** The service that did it, and its error. */
  told?: string;
}

/** The legs of an operation: its spans where the console has them, else what the log tells. */
function Waterfall({ app, name, ran, picked }: { app: App; name: string; ran: Operation | null; picked: Picked }) {
  const { model } = app;
  const spans = useSpans(app, name);
  const opened = ran && model.activationAt(picked.device, ran.start + 1e-6);
  const own = ran && opened && opened.deployment === ran.deployment && opened.endS > opened.startS ? opened : null;
  const isFirst = own !== null && isFirstAfter(app, picked, ran!, own);
  const parts = spans.length
    ? spans.map((leg) => partOf(app, leg, ran))
    : ran ? partsOf(app, ran, isFirst ? own : null) : [];
  if (!parts.length) return null;
  const from = Math.min(...parts.map((part) => part.from));
  const span = Math.max(1e-6, Math.max(...parts.map((part) => part.to)) - from);
  return (
    <>
      <h3>Where its time went</h3>
      <ol class="waterfall" data-of={spans.length ? "spans" : "log"}>
        {parts.map((part) => (
          <li title={part.told}>
            <span style={{ paddingLeft: `${8 * (part.depth ?? 0)}px` }}>{part.name}</span>
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
      {own && <SwitchOf app={app} opened={own} isFirst={isFirst} />}
    </>
  );
}

/** The spans of an operation; none in a replay, and none where the console has no spans. */
function useSpans(app: App, name: string): Leg[] {
  const known = useRef<{ name: string; legs: Leg[]; asked: number }>({ name, legs: [], asked: 0 });
  if (known.current.name !== name) known.current = { name, legs: [], asked: 0 };
  const once = async () => {
    const mine = known.current;
    const isWhole = mine.legs.some((leg) => leg.name === "complete");
    if (isWhole || mine.asked === MOST_ASKED) return mine.legs;
    mine.asked++;
    mine.legs = await ask<Leg[]>(`api/trace/${name}`);
    return mine.legs;
  };
  return useAsked(`spans of ${name}`, app.live ? once : null, ASK_MS).answer ?? [];
}

function partOf({ theme, model }: App, leg: Leg, ran: Operation | null): Part {
  const isSwitch = ["switch", "offload", "load"].includes(leg.name);
  const isRun = leg.name === "execute" && ran !== null;
  return {
    name: LEGS[leg.name] ?? leg.name,
    from: leg.begin * TICK_S,
    to: leg.end * TICK_S,
    colour: isRun
      ? barCss(theme, model.jobOf[ran.deployment]!, model.kinds[ran.kind]!)
      : css(isSwitch ? theme.waited : theme.hidden),
    depth: leg.depth ?? 0,
    told: leg.error ? `${leg.where}: ${leg.error}` : leg.where,
  };
}

function partsOf({ model, theme }: App, one: Operation, opened: Activation | null): Part[] {
  const ran = barCss(theme, model.jobOf[one.deployment]!, model.kinds[one.kind]!);
  const parts: Part[] = [
    { name: "in order", from: one.queued, to: one.ready, colour: css(theme.hidden, 0.45) },
    { name: "for its device", from: one.ready, to: one.start, colour: css(theme.hidden) },
  ];
  if (opened) {
    parts.push({ name: "switch", from: opened.startS, to: opened.endS, colour: css(theme.waited) });
  }
  parts.push({ name: "run", from: one.start, to: one.end, colour: ran });
  parts.push({ name: "completion", from: one.end, to: one.told, colour: css(theme.hidden, 0.45) });
  return parts;
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

// The timeline of every device, and how pointer and keys move it.

import { useEffect, useRef, useState } from "preact/hooks";
import { type App, useApp, useTick } from "./app";
import { css, jobColour } from "./colours";
import { Details } from "./details";
import { bytes, count, percent, seconds } from "./format";
import type { Activation, Device, Model } from "./model";
import { Overview } from "./overview";
import { AXIS_PX, type Hit, Painter, type Picked } from "./painter";

const SPANS: [string, number][] = [["10 s", 10], ["1 min", 60], ["10 min", 600], ["1 h", 3600]];
const SPEEDS = [1, 4, 16];
const DRAG_PX = 4;

export function Timeline({ app }: { app: App }) {
  useApp(app);
  useTick(500);
  const canvas = useRef<HTMLCanvasElement>(null);
  const painter = useRef<Painter | null>(null);
  const [hover, setHover] = useState<{ x: number; y: number; hit: Hit } | null>(null);
  const { view, model } = app;
  // After a loss of the connection everything is told anew, and an operation has another place.
  if (view.picked && !model.devices.includes(view.picked.device)) view.picked = null;
  const pick = (picked: Picked | null) => {
    view.picked = picked;
    app.changed();
  };

  useEffect(() => {
    const own = () => Boolean(app.live?.caller.tenant);
    const made = new Painter(canvas.current!, model, view, app.live !== null, own);
    painter.current = made;
    const stop = gestures(canvas.current!, made, app, setHover, pick);
    let frame = 0;
    let before = performance.now();
    const loop = (ms: number) => {
      if (view.speed) advance(app, (view.speed * (ms - before)) / 1000);
      before = ms;
      made.frame(app.theme, ms);
      frame = requestAnimationFrame(loop);
    };
    frame = requestAnimationFrame(loop);
    (window as unknown as { phaseloom: unknown }).phaseloom = { app, painter: made };
    return () => {
      cancelAnimationFrame(frame);
      stop();
    };
  }, [app]);

  return (
    <section class="timeline" aria-label="Timeline">
      <Bar app={app} />
      <Legend app={app} />
      <div class="stage">
        <div class="chart">
          <canvas
            ref={canvas}
            id="timeline"
            tabIndex={0}
            role="application"
            aria-label="Timeline of every device. Left and right move, plus and minus zoom, up and down choose a device, comma and full stop an operation, space stops and follows, 0 shows everything."
            onKeyDown={(event) => key(event, app, painter.current!, pick)}
          />
          {model.numOperations === 0 && !model.heads.length && <Empty app={app} />}
          {hover && <Tip app={app} {...hover} />}
        </div>
        {view.picked && <Details app={app} picked={view.picked} close={() => pick(null)} />}
      </div>
      <Overview app={app} />
    </section>
  );
}

function Empty({ app }: { app: App }) {
  const isLinked = app.live?.link === "live";
  return (
    <div class="empty" role="status">
      {isLinked ? "No operation has run yet. As soon as a controller submits one, it appears here." : "Waiting for the mesh …"}
    </div>
  );
}

/** Show the next stretch of a run that is played. */
function advance(app: App, byS: number): void {
  const { view, model } = app;
  if (view.toS >= model.lastS) {
    view.speed = 0;
    app.changed();
    return;
  }
  view.show(view.fromS + byS, view.toS + byS);
}

function Bar({ app }: { app: App }) {
  const { view, model, live } = app;
  const figures = inView(app);
  const show = (spanS: number) => {
    const end = view.follows ? app.nowS() : view.toS;
    view.show(end - spanS, end);
    app.changed();
  };
  const all = () => fit(app);
  return (
    <div class="bar">
      <div class="buttons" role="group" aria-label="What is shown">
        {live ? (
          <button
            id="follow"
            class={view.follows ? "on" : ""}
            aria-pressed={view.follows}
            title="Space"
            onClick={() => {
              view.follows = !view.follows;
              app.changed();
            }}
          >
            {view.follows ? "❚❚ Pause" : "▶ Live"}
          </button>
        ) : (
          <>
            <button
              id="play"
              class={view.speed ? "on" : ""}
              aria-pressed={view.speed > 0}
              title="Space"
              onClick={() => play(app)}
            >
              {view.speed ? "❚❚ Pause" : "▶ Play"}
            </button>
            {SPEEDS.map((speed) => (
              <button
                key={speed}
                class={view.speed === speed ? "on" : ""}
                aria-pressed={view.speed === speed}
                onClick={() => {
                  view.speed = speed;
                  app.changed();
                }}
              >
                ×{speed}
              </button>
            ))}
          </>
        )}
      </div>
      <div class="buttons" role="group" aria-label="Length of the window">
        {SPANS.filter(([, s]) => s <= 60 || s < 2 * (model.lastS - model.firstS)).map(([name, s]) => (
          <button key={name} class={Math.abs(view.spanS - s) < 0.01 ? "on" : ""} onClick={() => show(s)}>
            {name}
          </button>
        ))}
        <button id="fit" title="0" onClick={all}>All</button>
      </div>
      <div class="buttons" role="group" aria-label="Height of rows">
        <button
          id="tall"
          class={view.isTall ? "on" : ""}
          aria-pressed={view.isTall}
          onClick={() => {
            view.isTall = !view.isTall;
            app.changed();
          }}
        >
          Tall rows
        </button>
      </div>
      <dl class="figures" aria-label="Figures of the window">
        {figures.map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
    </div>
  );
}

export function fit(app: App): void {
  const { view, model } = app;
  if (!model.numOperations) return;
  const end = app.live && view.follows ? app.nowS() : model.lastS;
  const margin = 0.01 * (end - model.firstS);
  view.show(model.firstS - margin, end + (view.follows ? 0 : margin));
  app.changed();
}

function play(app: App): void {
  const { view, model } = app;
  if (!view.speed && view.toS >= model.lastS) view.show(model.firstS, model.firstS + view.spanS);
  view.speed = view.speed ? 0 : 1;
  app.changed();
}

/** The figures that were last made: making them costs every operation in the window. */
let figured: { key: string; value: [string, string][] } = { key: "", value: [] };

/** How busy the devices were in the window, and what their switches cost. */
function inView({ model, view, live }: App): [string, string][] {
  const key = [model.version, Math.round(view.fromS * 20), Math.round(view.toS * 20)].join();
  if (key === figured.key) return figured.value;
  let busy = 0;
  let num = 0;
  let switches = 0;
  let switchS = 0;
  let hiddenS = 0;
  const counted = new Set<unknown>();
  let devices = 0;
  for (const { track, activations } of model.devices) {
    // A tenant knows nothing of devices that it has not been on.
    if (live?.caller.tenant && !track.length) continue;
    devices++;
    let until = view.fromS;
    for (let i = track.from(view.fromS - track.longestS); i < track.length; i++) {
      if (track.start[i]! >= view.toS) break;
      if (track.end[i]! <= view.fromS) continue;
      num++;
      const begin = Math.max(until, track.start[i]!);
      const end = Math.min(view.toS, track.end[i]!);
      if (end > begin) {
        busy += end - begin;
        until = end;
      }
    }
    for (let i = activations.length - 1; i >= 0; i--) {
      const one = activations[i]!;
      if (one.startS < view.fromS) break;
      if (one.startS >= view.toS || one.endS === one.startS || counted.has(one)) continue;
      counted.add(one);
      switches++;
      switchS += one.endS - one.startS;
      hiddenS += one.hiddenS;
    }
  }
  figured = {
    key,
    value: [
      ["busy", devices ? percent(busy / (devices * view.spanS)) : "–"],
      ["operations/s", count(num / view.spanS)],
      ["switches", count(switches)],
      ["a switch", switches ? seconds(switchS / switches) : "–"],
      ["hidden", switchS ? percent(hiddenS / switchS) : "–"],
    ],
  };
  return figured.value;
}

function Legend({ app }: { app: App }) {
  const { model, view, theme } = app;
  const light = (job: number) => {
    view.lit = view.lit === job ? -1 : job;
    app.changed();
  };
  const own = app.live?.caller.tenant;
  return (
    <ul class="legend" aria-label="Legend">
      {model.jobs.map((name, job) => (
        <li key={name}>
          <button
            class={`chip${view.lit >= 0 && view.lit !== job ? " dim" : ""}`}
            aria-pressed={view.lit === job}
            title={`${name}: show alone`}
            onClick={() => light(job)}
          >
            <i style={{ background: css(jobColour(job, app.isDark)) }} />
            {own || model.jobs.every((one) => one.split(".")[0] === name.split(".")[0])
              ? name.split(".").slice(1).join(".")
              : name}
          </button>
        </li>
      ))}
      <li class="note"><i style={{ background: css(theme.hidden) }} />switch, hidden</li>
      <li class="note"><i style={{ background: css(theme.waited) }} />switch, waited for</li>
      <li class="note"><i style={{ background: css(theme.track) }} />idle</li>
      <li class="note lines">▾ ahead of a predicted operation · line above: somebody waits · below: who holds the device</li>
    </ul>
  );
}

function Tip({ app, x, y, hit }: { app: App; x: number; y: number; hit: Hit }) {
  const ref = useRef<HTMLDivElement>(null);
  const [place, setPlace] = useState({ left: x, top: y });
  useEffect(() => {
    const own = ref.current!;
    const room = own.parentElement!;
    const left = Math.min(x + 14, room.clientWidth - own.offsetWidth - 8);
    const below = y + 18 + own.offsetHeight < room.clientHeight;
    setPlace({ left: Math.max(4, left), top: below ? y + 18 : y - own.offsetHeight - 12 });
  }, [x, y, hit]);
  return (
    <div ref={ref} class="tip" style={place}>
      {lines(app, hit).map((line, number) => (number ? <div key={number}>{line}</div> : <b key={number}>{line}</b>))}
    </div>
  );
}

function lines(app: App, hit: Hit): string[] {
  const { model } = app;
  const name = (deployment: number) => model.deployments[deployment]!;
  switch (hit.type) {
    case "operation": {
      const one = model.operation(hit.index);
      return [
        `${model.kinds[one.kind]} ${model.nameOf(one)}`,
        `ran ${seconds(one.end - one.start)} on ${hit.device.name}`,
        `waited ${seconds(Math.max(0, one.start - one.ready))} for its device`,
        ...(one.outcome === "completed" ? [] : [one.outcome]),
      ];
    }
    case "head":
      return [
        `${model.kinds[hit.head.kind]} ${model.nameOf(hit.head)}`,
        "runs now",
        ...(hit.head.numReady > 1 ? [`${hit.head.numReady - 1} more ready behind it`] : []),
      ];
    case "switch": {
      const one = hit.activation;
      const tookS = one.endS - one.startS;
      return [
        `switch to ${name(one.deployment)}`,
        `${seconds(one.offloadS)} out (${bytes(one.bytesOut)}), ${seconds(one.loadS)} in (${bytes(one.bytesIn)})`,
        `${percent(one.hiddenS / tookS)} hidden${one.isSpeculative ? ", ahead of a predicted operation" : ""}`,
        ...(one.displaced.length ? [`displaced ${one.displaced.map(name).join(", ")}`] : []),
      ];
    }
    case "idle":
      return idle(app, hit.device, hit.atS);
  }
}

/** Why a device did nothing at a time, as far as the log tells. */
function idle({ model }: App, device: Device, atS: number): string[] {
  const { track } = device;
  const holder = model.activationAt(device, atS);
  const held = holder && !hasEnded(model, holder, atS)
    ? `held by ${model.deployments[holder.deployment]}` : "held by nobody";
  for (let i = track.from(atS); i < track.length; i++) {
    if (track.start[i]! > atS + track.longestWaitS) break;
    if (track.ready[i]! > atS) continue;
    const one = model.operation(track.operation[i]!);
    return [
      "idle, and somebody waited",
      `${model.kinds[one.kind]} ${model.nameOf(one)} was ready for ${seconds(atS - one.ready)}`,
      held,
    ];
  }
  return ["idle: nothing was ready for this device", held];
}

/** Whether the run that an activation belongs to had ended by a time. */
function hasEnded(model: Model, { deployment, startS }: Activation, atS: number): boolean {
  const row = model.jobRows.find((one) => one.job === model.jobs[model.jobOf[deployment]!]);
  const sinceOrigin = (timeS: number) => timeS - model.originS;
  if (!row) return model.jobRows.length > 0; // the page of a recorded run may have no jobs
  if (row.ended_s && sinceOrigin(row.ended_s) <= atS) return true;
  return Boolean(row.submitted_s) && startS < sinceOrigin(row.submitted_s!) && sinceOrigin(row.submitted_s!) <= atS;
}

// --- pointer and keys ------------------------------------------------------------------------------

/** Move and zoom the window by pointer; returns a function that ends this. */
function gestures(
  canvas: HTMLCanvasElement, painter: Painter, app: App,
  setHover: (hover: { x: number; y: number; hit: Hit } | null) => void,
  pick: (picked: Picked | null) => void,
): () => void {
  const { view } = app;
  const pointers = new Map<number, { x: number; y: number }>();
  let pressed: { x: number; y: number; fromS: number; scroll: number; moved: boolean } | null = null;
  let pinched = 0;

  const wheel = (event: WheelEvent) => {
    event.preventDefault();
    const secondsOf = (px: number) => (px / (painter.width - painter.gutterPx)) * view.spanS;
    if (event.altKey || (event.offsetX < painter.gutterPx && painter.contentPx > painter.height - AXIS_PX)) {
      view.scrollPx = clamp(view.scrollPx + event.deltaY, 0, Math.max(0, painter.contentPx - painter.height + AXIS_PX));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      view.pan(secondsOf(event.deltaX || event.deltaY));
    } else {
      const about = view.follows ? view.toS : painter.timeAt(Math.max(painter.gutterPx, event.offsetX));
      view.zoom(Math.exp(event.deltaY * 0.0016), about);
    }
    app.changed();
  };
  const down = (event: PointerEvent) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    pinched = spread(pointers);
    pressed = { x: event.offsetX, y: event.offsetY, fromS: view.fromS, scroll: view.scrollPx, moved: false };
  };
  const move = (event: PointerEvent) => {
    if (!pressed) {
      const hit = painter.hit(event.offsetX, event.offsetY);
      canvas.style.cursor = hit && hit.type !== "idle" ? "pointer" : "grab";
      setHover(hit && { x: event.offsetX, y: event.offsetY, hit });
      return;
    }
    pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    if (pointers.size > 1) {
      const now = spread(pointers);
      if (pinched && now) view.zoom(pinched / now, painter.timeAt(event.offsetX));
      pinched = now;
      pressed.moved = true;
      app.changed();
      return;
    }
    const [dx, dy] = [event.offsetX - pressed.x, event.offsetY - pressed.y];
    if (!pressed.moved && Math.hypot(dx, dy) < DRAG_PX) return;
    pressed.moved = true;
    setHover(null);
    canvas.style.cursor = "grabbing";
    const byS = (-dx / (painter.width - painter.gutterPx)) * view.spanS;
    if (Math.abs(dx) > DRAG_PX) view.follows = false;
    if (!view.follows) view.show(pressed.fromS + byS, pressed.fromS + byS + view.spanS);
    view.scrollPx = clamp(pressed.scroll - dy, 0, Math.max(0, painter.contentPx - painter.height + AXIS_PX));
    app.changed();
  };
  const up = (event: PointerEvent) => {
    pointers.delete(event.pointerId);
    if (pressed && !pressed.moved && event.type === "pointerup") {
      const hit = painter.hit(event.offsetX, event.offsetY);
      pick(hit && (hit.type === "operation" || hit.type === "head") ? hit : null);
    }
    if (!pointers.size) pressed = null;
  };
  const leave = () => setHover(null);
  const ended = new AbortController();
  const { signal } = ended;
  canvas.addEventListener("wheel", wheel, { passive: false, signal });
  canvas.addEventListener("pointerdown", down, { signal });
  canvas.addEventListener("pointermove", move, { signal });
  canvas.addEventListener("pointerup", up, { signal });
  canvas.addEventListener("pointercancel", up, { signal });
  canvas.addEventListener("pointerleave", leave, { signal });
  return () => ended.abort();
}

/** The distance of two pointers along the time axis; 0: there are not two. */
function spread(pointers: Map<number, { x: number; y: number }>): number {
  const [a, b] = [...pointers.values()];
  return a && b ? Math.max(8, Math.abs(a.x - b.x)) : 0;
}

function key(event: KeyboardEvent, app: App, painter: Painter, pick: (picked: Picked | null) => void): void {
  const { view } = app;
  if (event.ctrlKey || event.metaKey) return;
  const middle = view.follows ? view.toS : (view.fromS + view.toS) / 2;
  switch (event.key) {
    case "ArrowLeft": view.pan(-0.15 * view.spanS); break;
    case "ArrowRight": view.pan(0.15 * view.spanS); break;
    case "+": case "=": view.zoom(1 / 1.4, middle); break;
    case "-": case "_": view.zoom(1.4, middle); break;
    case "0": case "Home": fit(app); break;
    case "End": view.follows = app.live !== null; break;
    case " ": if (app.live) view.follows = !view.follows; else play(app); break;
    case "ArrowUp": nextDevice(app, painter, -1, pick); break;
    case "ArrowDown": nextDevice(app, painter, 1, pick); break;
    case ",": nextOperation(app, -1, pick); break;
    case ".": nextOperation(app, 1, pick); break;
    case "Escape": pick(null); break;
    default: return;
  }
  event.preventDefault();
  app.changed();
}

/** Pick an operation of the next device, the one nearest to the last. */
function nextDevice(app: App, painter: Painter, by: number, pick: (picked: Picked | null) => void): void {
  const devices = painter.devices().filter((one) => one.track.length);
  if (!devices.length) return;
  const { picked } = app.view;
  const before = picked ? devices.indexOf(picked.device) : by > 0 ? -1 : devices.length;
  const device = devices[clamp(before + by, 0, devices.length - 1)]!;
  const at = picked?.type === "operation" ? app.model.operation(picked.index).start : (app.view.fromS + app.view.toS) / 2;
  const index = clamp(device.track.from(at), 0, device.track.length - 1);
  reveal(app, { type: "operation", index: device.track.operation[index]!, device }, pick);
}

function nextOperation(app: App, by: number, pick: (picked: Picked | null) => void): void {
  const { picked } = app.view;
  if (picked?.type !== "operation") return;
  const { track } = picked.device;
  const place = track.operation.subarray(0, track.length).indexOf(picked.index);
  const index = clamp(place + by, 0, track.length - 1);
  reveal(app, { type: "operation", index: track.operation[index]!, device: picked.device }, pick);
}

function reveal(app: App, picked: Picked & { type: "operation" }, pick: (picked: Picked) => void): void {
  const { view } = app;
  const one = app.model.operation(picked.index);
  if (one.start < view.fromS || one.end > view.toS) {
    view.follows = false;
    const half = view.spanS / 2;
    view.show(one.start - half, one.start + half);
  }
  pick(picked);
}

function clamp(value: number, least: number, most: number): number {
  return Math.max(least, Math.min(most, value));
}


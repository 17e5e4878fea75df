// The timeline's canvas: where everything lies, what is under the pointer, and how it is drawn.

import { barColour, lanesOf, linePx, Raster, TALL_PX, type Row } from "./raster";
import { css, isPale, jobColour, SHORT, type Theme } from "./colours";
import { clock, since } from "./format";
import type { Activation, Device, Head, Model } from "./model";

export const AXIS_PX = 26;
const POOL_PX = 20;
const LEAST_ROW_PX = 3;
const MOST_ROW_PX = 112;
const TALL_ROW_PX = 30;
const LABEL_FROM_PX = 16;
const NARROW_PX = 640;
const LEAST_SPAN_S = 0.002;
const MOST_SPAN_S = 7 * 86400;
const FOLLOW_FRAME_MS = 33;
const FONT = '"Inter", system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif';

/** The stretch of time and the rows in view, and the operation that is picked. */
export class Viewport {
  fromS = 0;
  toS = 15;
  /** Whether the right edge is now. */
  follows = true;
  /** Seconds of the run that a second of replay shows; 0: it stands. */
  speed = 0;
  isTall = false;
  scrollPx = 0;
  /** The job that is not dimmed; -1: none is. */
  lit = -1;
  picked: Picked | null = null;

  get spanS(): number {
    return this.toS - this.fromS;
  }

  show(fromS: number, toS: number): void {
    this.fromS = fromS;
    this.toS = Math.max(toS, fromS + LEAST_SPAN_S);
  }

  /** Zoom by a factor about a time. */
  zoom(factor: number, aboutS: number): void {
    const span = Math.min(MOST_SPAN_S, Math.max(LEAST_SPAN_S, this.spanS * factor));
    const share = (aboutS - this.fromS) / this.spanS;
    this.fromS = aboutS - share * span;
    this.toS = this.fromS + span;
  }

  pan(byS: number): void {
    this.follows = false;
    this.fromS += byS;
    this.toS += byS;
  }
}

export type Picked =
  | { type: "operation"; index: number; device: Device }
  | { type: "head"; head: Head; device: Device };

/** The thing under a point of the canvas. */
export type Hit =
  | Picked
  | { type: "switch"; activation: Activation; device: Device }
  | { type: "idle"; device: Device; atS: number };

export class Painter {
  /** How long the newest frames took to draw, in milliseconds. */
  readonly frames: number[] = [];
  private readonly raster = new Raster();
  private readonly context: CanvasRenderingContext2D;
  private rows: Row[] = [];
  private pools: { name: string; top: number; devices: number }[] = [];
  private laidOut = "";
  private drawn = "";
  private drawnMs = 0;
  contentPx = 0;

  constructor(
    readonly canvas: HTMLCanvasElement,
    private readonly model: Model,
    private readonly view: Viewport,
    private readonly isLive: boolean,
    private readonly onlyOwn: () => boolean,
  ) {
    this.context = canvas.getContext("2d", { alpha: false })!;
  }

  get width(): number {
    return this.canvas.clientWidth;
  }

  get height(): number {
    return this.canvas.clientHeight;
  }

  get gutterPx(): number {
    return this.width < NARROW_PX ? 84 : 138;
  }

  timeAt(x: number): number {
    const { fromS, spanS } = this.view;
    return fromS + ((x - this.gutterPx) / (this.width - this.gutterPx)) * spanS;
  }

  xOf(time: number): number {
    const { fromS, spanS } = this.view;
    return this.gutterPx + ((time - fromS) / spanS) * (this.width - this.gutterPx);
  }

  rowAt(y: number): Row | undefined {
    const at = y - AXIS_PX + this.view.scrollPx;
    return this.rows.find((row) => at >= row.top && at < row.top + row.height);
  }

  rowOf(device: Device): Row | undefined {
    return this.rows.find((row) => row.device === device);
  }

  devices(): Device[] {
    return this.rows.map((row) => row.device);
  }

  /** The thing at a point of the canvas; null: the point is beside the rows. */
  hit(x: number, y: number): Hit | null {
    const row = this.rowAt(y);
    if (!row || x < this.gutterPx) return null;
    const slackS = (1.5 * this.view.spanS) / (this.width - this.gutterPx);
    const atS = this.timeAt(x);
    const { device } = row;
    const { track } = device;
    let best = -1;
    let nearest = Infinity;
    const lanes = lanesOf(device, row.height);
    const lane = Math.floor((lanes * (y - AXIS_PX + this.view.scrollPx - row.top)) / row.height);
    for (let i = track.from(atS - track.longestS - slackS); i < track.length; i++) {
      if (track.start[i]! > atS + slackS) break;
      if (lanes > 1 && track.lane[i] !== lane) continue;
      const away = Math.max(track.start[i]! - atS, atS - track.end[i]!, 0);
      if (away <= slackS && away <= nearest) {
        nearest = away;
        best = i;
      }
    }
    if (best >= 0) return { type: "operation", index: track.operation[best]!, device };
    const activation = this.model.activationAt(device, atS + slackS);
    if (activation && activation.endS > activation.startS && atS <= activation.endS + slackS) {
      return { type: "switch", activation, device };
    }
    const head = this.running(device);
    if (head && atS >= this.beginOf(head, device)) return { type: "head", head, device };
    return { type: "idle", device, atS };
  }

  /** Draw, if anything has changed. */
  frame(theme: Theme, nowMs: number, force = false): void {
    const { model, view } = this;
    if (view.follows) {
      const span = view.spanS;
      view.toS = model.nowS();
      view.fromS = view.toS - span;
    }
    const moved = Math.round((view.fromS / view.spanS) * this.width * 2);
    const state = [
      model.version, model.rowsVersion, moved, view.spanS, view.scrollPx, view.isTall, view.lit,
      theme.isDark, this.width, this.height, devicePixelRatio, pickedName(view.picked),
    ].join();
    if (!force && state === this.drawn) return;
    if (!force && view.follows && nowMs - this.drawnMs < FOLLOW_FRAME_MS) return;
    this.drawn = state;
    this.drawnMs = nowMs;
    const begin = performance.now();
    this.draw(theme);
    this.frames.push(performance.now() - begin);
    if (this.frames.length > 240) this.frames.splice(0, 120);
  }

  private layOut(): void {
    const { model, view } = this;
    const key = [model.rowsVersion, this.height, view.isTall, this.onlyOwn(), model.devices.length].join();
    if (key === this.laidOut && !this.onlyOwn()) return;
    this.laidOut = key;
    const devices = [...model.devices]
      .filter((one) => !this.onlyOwn() || one.track.length > 0)
      .sort((a, b) => a.pool.localeCompare(b.pool) || a.name.localeCompare(b.name, undefined, { numeric: true }));
    const pools = new Set(devices.map((one) => one.pool));
    const room = this.height - AXIS_PX - POOL_PX * pools.size - 4;
    let pitch = view.isTall ? TALL_ROW_PX : Math.floor(room / Math.max(1, devices.length));
    pitch = Math.max(LEAST_ROW_PX, Math.min(MOST_ROW_PX, pitch));
    const gap = pitch >= 60 ? 12 : pitch >= 22 ? 4 : pitch >= 10 ? 2 : pitch >= 4 ? 1 : 0;
    this.rows = [];
    this.pools = [];
    let top = 0;
    for (const device of devices) {
      const pool = this.pools[this.pools.length - 1];
      if (pool?.name !== device.pool) {
        this.pools.push({ name: device.pool, top, devices: 0 });
        top += POOL_PX;
      }
      this.pools[this.pools.length - 1]!.devices++;
      this.rows.push({ device, top, height: pitch - gap });
      top += pitch;
    }
    this.contentPx = top;
    view.scrollPx = Math.max(0, Math.min(view.scrollPx, top - (this.height - AXIS_PX)));
  }

  private draw(theme: Theme): void {
    const { context, canvas, model, view } = this;
    const ratio = devicePixelRatio;
    const [w, h] = [Math.round(this.width * ratio), Math.round(this.height * ratio)];
    if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
    this.layOut();
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.fillStyle = css(theme.ground);
    context.fillRect(0, 0, w, h);
    const left = Math.round(this.gutterPx * ratio);
    const top = Math.round(AXIS_PX * ratio);
    const rows = this.rows.map((row) => {
      const begin = Math.round((row.top - view.scrollPx) * ratio);
      const end = Math.round((row.top + row.height - view.scrollPx) * ratio);
      return { device: row.device, top: begin, height: Math.max(1, end - begin) };
    });
    this.raster.draw(
      context, model, theme, rows, ratio, view.fromS, view.toS, left, top, w - left, h - top, view.lit,
    );
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.drawAxis(theme);
    context.save();
    context.beginPath();
    context.rect(0, AXIS_PX, this.width, this.height - AXIS_PX);
    context.clip();
    this.drawHeads(theme);
    this.drawLabels(theme);
    this.drawSpeculative(theme);
    this.drawPicked(theme);
    this.drawGutter(theme);
    context.restore();
  }

  private drawAxis(theme: Theme): void {
    const { context, view, model } = this;
    const plot = this.width - this.gutterPx;
    const step = niceStep((view.spanS * 92) / plot);
    context.font = `11px ${FONT}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    // Ticks are those of the day's clock where the mesh is live, and of the run where it is replayed.
    const zero = this.isLive ? -model.originS : 0;
    for (let t = Math.ceil((view.fromS - zero) / step) * step + zero; t < view.toS; t += step) {
      const x = this.xOf(t);
      if (x < this.gutterPx + 1) continue;
      context.fillStyle = theme.isDark ? "rgb(255 255 255 / 0.07)" : "rgb(20 30 45 / 0.08)";
      context.fillRect(Math.round(x), AXIS_PX - 5, 1, this.height);
      context.fillStyle = theme.muted;
      const word = this.isLive ? clock(model.originS + t + 1e-6, step) : since(t, step);
      context.fillText(word, x, AXIS_PX / 2);
    }
    context.textAlign = "left";
    context.fillStyle = theme.muted;
    context.fillText(this.isLive ? "time of day" : step < 1 ? "seconds" : "m:s of run", 10, AXIS_PX / 2);
    context.fillStyle = theme.line;
    context.fillRect(0, AXIS_PX - 1, this.width, 1);
  }

  private drawGutter(theme: Theme): void {
    const { context, view } = this;
    context.fillStyle = css(theme.ground);
    context.fillRect(0, AXIS_PX, this.gutterPx - 1, this.height);
    context.textBaseline = "middle";
    context.textAlign = "left";
    for (const pool of this.pools) {
      const y = AXIS_PX + pool.top - view.scrollPx;
      context.font = `600 10.5px ${FONT}`;
      context.fillStyle = theme.muted;
      const name = (pool.name || "devices").toUpperCase();
      context.fillText(`${name} · ${pool.devices}`, 10, y + POOL_PX / 2 + 2);
    }
    const pitch = this.rows[1] ? this.rows[1].top - this.rows[0]!.top : MOST_ROW_PX;
    const every = Math.max(1, Math.ceil(13 / Math.max(1, pitch)));
    context.font = `12px ${FONT}`;
    this.rows.forEach((row, number) => {
      const isPicked = view.picked?.device === row.device;
      if (number % every && !isPicked) return;
      const y = AXIS_PX + row.top + row.height / 2 - view.scrollPx;
      if (y < AXIS_PX - 10 || y > this.height + 10) return;
      context.fillStyle = isPicked ? theme.accent : row.device.isUp ? theme.text : theme.muted;
      const label = row.device.isUp ? row.device.label : `${row.device.label} (down)`;
      context.fillText(fitted(context, label, this.gutterPx - 20), 10, y);
    });
    context.fillStyle = theme.line;
    context.fillRect(this.gutterPx - 1, AXIS_PX, 1, this.height);
  }

  /** The words on bars: one for each stretch of operations of a kind and job that has room for it. */
  private drawLabels(theme: Theme): void {
    const { context, model, view } = this;
    context.font = `500 11px ${FONT}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (const row of this.rows) {
      if (row.height < LABEL_FROM_PX || lanesOf(row.device, row.height) > 1) continue;
      const y = AXIS_PX + row.top + row.height / 2 - view.scrollPx;
      if (y < AXIS_PX || y > this.height) continue;
      const { track } = row.device;
      let run: { job: number; kind: number; from: number; to: number } | null = null;
      const flush = () => {
        if (run) this.label(theme, y, run.job, model.kinds[run.kind]!, run.from, run.to);
      };
      let num = 0;
      for (let i = track.from(view.fromS - track.longestS); i < track.length; i++) {
        if (track.start[i]! >= view.toS || ++num > 3000) break;
        if (track.end[i]! <= view.fromS) continue;
        const job = model.jobOf[track.deployment[i]!]!;
        const from = Math.max(this.gutterPx, this.xOf(track.start[i]!));
        const to = Math.min(this.width, this.xOf(track.end[i]!));
        const isOne: boolean = run !== null && run.job === job && run.kind === track.kind[i]! && from - run.to < 3;
        if (isOne) run!.to = Math.max(run!.to, to);
        else {
          flush();
          run = { job, kind: track.kind[i]!, from, to };
        }
      }
      if (num <= 3000) flush();
    }
  }

  private label(
    theme: Theme, y: number, job: number, kind: string, from: number, to: number,
  ): void {
    const { context, view } = this;
    const word = SHORT[kind] ?? kind;
    const width = context.measureText(word).width;
    if (to - from < width + 10) return;
    const colour = barColour(theme, job, kind);
    const middle = (from + to) / 2;
    if (view.lit < 0 || view.lit === job) {
      context.fillStyle = css(colour);
      context.fillRect(middle - width / 2 - 3, y - 7, width + 6, 14);
      context.fillStyle = isPale(colour) ? "#10151c" : "#ffffff";
      context.fillText(word, middle, y + 0.5);
    }
  }

  /** A mark at each switch that was made ahead of an operation. */
  private drawSpeculative(theme: Theme): void {
    const { context, view } = this;
    context.fillStyle = theme.text;
    for (const row of this.rows) {
      if (row.height < LABEL_FROM_PX) continue;
      const y = AXIS_PX + row.top - view.scrollPx + linePx(row.height);
      const { activations } = row.device;
      for (let i = activations.length - 1; i >= 0 && activations[i]!.startS > view.fromS; i--) {
        const one = activations[i]!;
        if (!one.isSpeculative || one.startS >= view.toS || one.endS === one.startS) continue;
        const x = this.xOf(one.startS);
        if (x < this.gutterPx || this.xOf(one.endS) - x < 2) continue;
        context.beginPath();
        context.moveTo(x - 3, y - 1);
        context.lineTo(x + 3, y - 1);
        context.lineTo(x, y + 4);
        context.fill();
      }
    }
  }

  /** What runs now: its end is not known yet. */
  private drawHeads(theme: Theme): void {
    const { context, model, view } = this;
    if (!this.isLive) return;
    const now = model.nowS();
    const edge = this.xOf(now);
    for (const row of this.rows) {
      const head = this.running(row.device);
      if (!head) continue;
      const from = Math.max(this.gutterPx, this.xOf(this.beginOf(head, row.device)));
      const to = Math.min(this.width, edge);
      if (to - from < 1) continue;
      const y = AXIS_PX + row.top - view.scrollPx;
      const inset = row.height >= TALL_PX ? linePx(row.height) : 0;
      const colour = jobColour(model.jobOf[head.deployment]!, theme.isDark);
      context.fillStyle = css(colour, 0.35);
      context.fillRect(from, y + inset, to - from, row.height - 2 * inset);
      context.fillStyle = css(colour, 0.9);
      context.fillRect(from, y + inset, 1.5, row.height - 2 * inset);
    }
    if (edge > this.gutterPx && edge < this.width) {
      context.fillStyle = theme.accent;
      context.fillRect(Math.round(edge), AXIS_PX, 1, this.height);
    }
  }

  private drawPicked(theme: Theme): void {
    const { context, model, view } = this;
    const { picked } = view;
    const row = picked && this.rowOf(picked.device);
    if (!row) return;
    const isOperation = picked.type === "operation";
    const found = isOperation ? model.operation(picked.index) : null;
    const begin = found ? found.start : this.beginOf((picked as { head: Head }).head, picked.device);
    const end = found ? found.end : model.nowS();
    const from = Math.max(this.gutterPx - 2, this.xOf(begin));
    const to = Math.min(this.width + 2, Math.max(this.xOf(end), this.xOf(begin) + 3));
    const y = AXIS_PX + row.top - view.scrollPx;
    context.lineWidth = 2;
    context.strokeStyle = css(theme.ground);
    context.strokeRect(from - 2, y - 2, to - from + 4, row.height + 4);
    context.strokeStyle = theme.text;
    context.strokeRect(from - 0.5, y - 0.5, to - from + 1, row.height + 1);
  }

  /** The operation that runs on a device now, as far as the log lets one tell. */
  running(device: Device): Head | undefined {
    const { model } = this;
    if (!device.isUp) return undefined;
    const holder = device.activations[device.activations.length - 1];
    const number = model.devices.indexOf(device);
    return model.heads.find(
      (one) => one.devices.includes(number) && one.deployment === holder?.deployment,
    );
  }

  beginOf(head: Head, device: Device): number {
    const { track, activations } = device;
    const holder = activations[activations.length - 1];
    const before = track.length ? track.end[track.length - 1]! : 0;
    return Math.max(head.ready, before, holder?.endS ?? 0);
  }
}

export function pickedName(picked: Picked | null): string {
  if (!picked) return "";
  return picked.type === "operation" ? `o${picked.index}` : `h${picked.head.deployment}.${picked.head.slot}`;
}

/** A round number of seconds, as clocks have them above ten. */
function niceStep(least: number): number {
  for (const step of [10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400]) {
    if (least > 5 && step >= least) return step;
  }
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].find((times) => times * power >= least)! * power;
}

function fitted(context: CanvasRenderingContext2D, text: string, width: number): string {
  if (context.measureText(text).width <= width) return text;
  let short = text;
  while (short.length > 1 && context.measureText(`…${short}`).width > width) short = short.slice(1);
  return `…${short}`;
}

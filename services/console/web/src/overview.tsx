// The strip below the timeline: how busy the devices were in all of the time that is known, by job,
// and where the timeline's window lies in it.

import { useEffect, useRef } from "preact/hooks";
import type { App } from "./app";
import { css, jobColour } from "./colours";
import { since } from "./format";

const REDRAW_MS = 1000;
const EDGE_PX = 7;

export function Overview({ app }: { app: App }) {
  const ref = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    const canvas = ref.current!;
    const strip = new Strip(canvas, app);
    let frame = 0;
    const loop = (ms: number) => {
      strip.frame(ms);
      frame = requestAnimationFrame(loop);
    };
    frame = requestAnimationFrame(loop);
    return () => cancelAnimationFrame(frame);
  }, [app]);
  const key = (event: KeyboardEvent) => {
    const by = { ArrowLeft: -0.25, ArrowRight: 0.25, PageUp: -1, PageDown: 1 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    app.view.pan(by * app.view.spanS);
    app.changed();
  };
  const { view, model } = app;
  return (
    <canvas
      ref={ref}
      class="overview"
      id="overview"
      tabIndex={0}
      role="slider"
      aria-label="Window of the timeline"
      aria-valuemin={0}
      aria-valuemax={Math.round(Math.max(0, app.nowS()))}
      aria-valuenow={Math.round(view.fromS)}
      aria-valuetext={`${since(view.fromS)} to ${since(view.toS)} of ${since(Math.max(0, model.lastS))}`}
      onKeyDown={key}
    />
  );
}

class Strip {
  private readonly picture = document.createElement("canvas");
  private pictured = "";
  private picturedMs = -Infinity;
  private drawn = "";
  private fromS = 0;
  private toS = 1;
  private grip: { atS: number; fromS: number; toS: number; part: "move" | "from" | "to" } | null = null;

  constructor(
    private readonly canvas: HTMLCanvasElement,
    private readonly app: App,
  ) {
    canvas.addEventListener("pointerdown", (event) => this.grab(event));
    canvas.addEventListener("pointermove", (event) => this.drag(event));
    canvas.addEventListener("pointerup", () => (this.grip = null));
    canvas.addEventListener("pointercancel", () => (this.grip = null));
  }

  frame(ms: number): void {
    const { canvas, app } = this;
    const { model, view, theme } = app;
    const ratio = devicePixelRatio;
    const width = Math.round(canvas.clientWidth * ratio);
    const height = Math.round(canvas.clientHeight * ratio);
    if (!width || !height) return;
    const key = [model.version, theme.isDark, width, height, view.lit].join();
    const isOld = ms - this.picturedMs > REDRAW_MS || !this.pictured.endsWith(`${theme.isDark},${width},${height},${view.lit}`);
    if (key !== this.pictured && isOld && !this.grip) {
      this.pictured = key;
      this.picturedMs = ms;
      this.draw(width, height);
      this.drawn = "";
    }
    const state = [this.pictured, view.fromS, view.toS].join();
    if (state === this.drawn) return;
    this.drawn = state;
    if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
    const context = canvas.getContext("2d")!;
    context.clearRect(0, 0, width, height);
    context.drawImage(this.picture, 0, 0);
    const x0 = this.xOf(view.fromS) * ratio;
    const x1 = Math.max(this.xOf(view.toS) * ratio, x0 + 3 * ratio);
    context.fillStyle = css(theme.ground, 0.62);
    context.fillRect(0, 0, x0, height);
    context.fillRect(x1, 0, width - x1, height);
    context.strokeStyle = theme.accent;
    context.lineWidth = 1.5 * ratio;
    context.strokeRect(x0, 0.75 * ratio, x1 - x0, height - 1.5 * ratio);
  }

  private draw(width: number, height: number): void {
    const { model, theme, view } = this.app;
    [this.picture.width, this.picture.height] = [width, height];
    const context = this.picture.getContext("2d")!;
    context.fillStyle = css(theme.track);
    context.fillRect(0, 0, width, height);
    if (!model.numOperations) return;
    const span = Math.max(1, model.lastS - model.firstS);
    this.fromS = model.firstS - 0.01 * span;
    this.toS = Math.max(model.lastS + 0.01 * span, this.app.live ? this.app.nowS() : 0);
    const num = Math.max(1, Math.floor(width / 2));
    const buckets = model.busyBuckets(this.fromS, this.toS, num);
    const devices = Math.max(1, model.devices.filter((one) => one.track.length).length);
    const base = new Float64Array(num);
    buckets.forEach((column, job) => {
      context.fillStyle = css(jobColour(job, theme.isDark), view.lit < 0 || view.lit === job ? 1 : 0.2);
      for (let x = 0; x < num; x++) {
        const share = column[x]! / devices;
        if (share <= 0) continue;
        const top = height * (1 - Math.min(1, base[x]! + share));
        context.fillRect(x * (width / num), top, width / num + 0.5, height * share);
        base[x]! += share;
      }
    });
  }

  private xOf(time: number): number {
    return ((time - this.fromS) / (this.toS - this.fromS)) * this.canvas.clientWidth;
  }

  private timeAt(event: PointerEvent): number {
    return this.fromS + (event.offsetX / this.canvas.clientWidth) * (this.toS - this.fromS);
  }

  private grab(event: PointerEvent): void {
    const { view } = this.app;
    this.canvas.setPointerCapture(event.pointerId);
    const atS = this.timeAt(event);
    const x = event.offsetX;
    const [x0, x1] = [this.xOf(view.fromS), this.xOf(view.toS)];
    let part: "move" | "from" | "to" = "move";
    if (x1 - x0 > 4 * EDGE_PX && Math.abs(x - x0) < EDGE_PX) part = "from";
    else if (x1 - x0 > 4 * EDGE_PX && Math.abs(x - x1) < EDGE_PX) part = "to";
    else if (x < x0 || x > x1) {
      const half = view.spanS / 2;
      view.show(atS - half, atS + half);
    }
    view.follows = false;
    this.grip = { atS, fromS: view.fromS, toS: view.toS, part };
    this.app.changed();
  }

  private drag(event: PointerEvent): void {
    if (!this.grip) return;
    const { view } = this.app;
    const byS = this.timeAt(event) - this.grip.atS;
    const { fromS, toS, part } = this.grip;
    if (part === "from") view.show(Math.min(fromS + byS, toS - 0.01), toS);
    else if (part === "to") view.show(fromS, Math.max(fromS + 0.01, toS + byS));
    else view.show(fromS + byS, toS + byS);
    this.app.changed();
  }
}

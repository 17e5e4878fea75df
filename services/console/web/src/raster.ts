// Rows of bars as pixels. The colour of a pixel is the mean of what is in it, so that a stretch with
// a thousand operations in one pixel looks as it is: as full, and of whose colour. A row costs its
// operations in view and its pixels, whatever the zoom.

import { css, jobColour, kindShade, mixed, type Rgb, type Theme } from "./colours";
import { newestAt, type Device, type Model } from "./model";

/** A row of the picture. */
export interface Row {
  device: Device;
  top: number;
  height: number;
}

const GAP_FROM_PX = 4;
const GAP_PX = 1;
/** Rows as tall as this, in CSS pixels, have a line of what waits above, and of the holder below. */
export const TALL_PX = 13;
const WAIT_ALPHA = 0.55;
const DIM = 0.82;

export class Raster {
  private image: ImageData | null = null;
  private pixels = new Uint32Array(0);
  private sums = new Float32Array(0);
  private colours: Float32Array = new Float32Array(0);
  private coloursOf = "";
  private numKinds = 1;

  /** Draw rows into a part of a canvas. Places and sizes are in pixels of the screen.
   *
   * @param ratio pixels of the screen in a CSS pixel
   * @param lit the job that is not dimmed; -1: none is
   */
  draw(
    context: CanvasRenderingContext2D, model: Model, theme: Theme, rows: Row[], ratio: number,
    fromS: number, toS: number, left: number, top: number, width: number, height: number, lit: number,
  ): void {
    if (width < 1 || height < 1) return;
    if (!this.image || this.image.width !== width || this.image.height !== height) {
      this.image = new ImageData(width, height);
      this.pixels = new Uint32Array(this.image.data.buffer);
      this.sums = new Float32Array(4 * width);
    }
    this.mixColours(model, theme, lit);
    this.pixels.fill(packed(theme.ground[0], theme.ground[1], theme.ground[2]));
    for (const row of rows) {
      if (row.top + row.height <= 0 || row.top >= height) continue;
      this.row(row, ratio, model, theme, fromS, toS, width, height);
    }
    context.putImageData(this.image, left, top);
  }

  /** The colour of an operation's bar. */
  colour(model: Model, theme: Theme, deployment: number, kind: number): Rgb {
    return barColour(theme, model.jobOf[deployment]!, model.kinds[kind]!);
  }

  private mixColours(model: Model, theme: Theme, lit: number): void {
    const key = `${theme.isDark} ${lit} ${model.deployments.length} ${model.kinds.length} ${model.rowsVersion}`;
    if (key === this.coloursOf) return;
    this.coloursOf = key;
    this.numKinds = Math.max(1, model.kinds.length);
    this.colours = new Float32Array(3 * Math.max(1, model.deployments.length) * this.numKinds);
    model.deployments.forEach((_, deployment) => {
      model.kinds.forEach((kind, number) => {
        const job = model.jobOf[deployment]!;
        let colour = barColour(theme, job, kind);
        if (lit >= 0 && job !== lit) colour = mixed(colour, theme.track, DIM);
        this.colours.set(colour, 3 * (deployment * this.numKinds + number));
      });
    });
  }

  private row(
    { device, top, height: rowHeight }: Row, ratio: number, model: Model, theme: Theme,
    fromS: number, toS: number, width: number, height: number,
  ): void {
    const cssHeight = rowHeight / ratio;
    const isTall = cssHeight >= TALL_PX;
    const waitPx = isTall ? Math.round(ratio * linePx(cssHeight)) : 0;
    const holdPx = waitPx;
    const lanes = lanesOf(device, cssHeight);
    const body = rowHeight - waitPx - holdPx;
    if (isTall) {
      this.sums.fill(0);
      this.addWaits(device, fromS, toS, width);
      this.put(theme.track, top, waitPx, width, height);
    }
    for (let lane = 0; lane < lanes; lane++) {
      this.sums.fill(0);
      this.addBars(device, fromS, toS, width, lanes > 1 ? lane : -1);
      this.addSwitches(device, theme, fromS, toS, width);
      const a = Math.round((body * lane) / lanes);
      const b = Math.round((body * (lane + 1)) / lanes);
      this.put(theme.track, top + waitPx + a, b - a, width, height);
    }
    if (isTall) {
      this.sums.fill(0);
      this.addHolders(device, model, theme, fromS, toS, width);
      this.put(theme.track, top + waitPx + body, holdPx, width, height);
    }
  }

  private addBars(device: Device, fromS: number, toS: number, width: number, lane: number): void {
    const { track } = device;
    const { start, end, deployment, kind, length } = track;
    const scale = width / (toS - fromS);
    const { colours, numKinds } = this;
    for (let i = track.from(fromS - track.longestS); i < length && start[i]! < toS; i++) {
      if (end[i]! <= fromS || (lane >= 0 && track.lane[i] !== lane)) continue;
      const x0 = (start[i]! - fromS) * scale;
      let x1 = (end[i]! - fromS) * scale;
      if (x1 - x0 >= GAP_FROM_PX) x1 -= GAP_PX;
      const at = 3 * (deployment[i]! * numKinds + kind[i]!);
      this.add(x0, x1, width, colours[at]!, colours[at + 1]!, colours[at + 2]!, 1);
    }
  }

  private addWaits(device: Device, fromS: number, toS: number, width: number): void {
    const { track } = device;
    const { start, ready, deployment, length } = track;
    const scale = width / (toS - fromS);
    const until = toS + track.longestWaitS;
    for (let i = track.from(fromS); i < length && start[i]! < until; i++) {
      if (ready[i]! >= toS || start[i]! - ready[i]! < 1e-3) continue;
      const at = 3 * deployment[i]! * this.numKinds;
      this.add(
        (ready[i]! - fromS) * scale, (start[i]! - fromS) * scale, width,
        this.colours[at]!, this.colours[at + 1]!, this.colours[at + 2]!, WAIT_ALPHA,
      );
    }
  }

  private addSwitches(device: Device, theme: Theme, fromS: number, toS: number, width: number): void {
    const scale = width / (toS - fromS);
    const found = device.activations;
    for (let i = Math.max(0, newestAt(found, fromS)); i < found.length && found[i]!.startS < toS; i++) {
      const one = found[i]!;
      if (one.endS === one.startS) continue;
      const seen = one.startS + one.hiddenS;
      const [h, w] = [theme.hidden, theme.waited];
      this.add((one.startS - fromS) * scale, (seen - fromS) * scale, width, h[0], h[1], h[2], 1);
      this.add((seen - fromS) * scale, (one.endS - fromS) * scale, width, w[0], w[1], w[2], 1);
    }
  }

  private addHolders(
    device: Device, model: Model, theme: Theme, fromS: number, toS: number, width: number,
  ): void {
    const scale = width / (toS - fromS);
    const found = device.activations;
    for (let i = Math.max(0, newestAt(found, fromS)); i < found.length && found[i]!.startS < toS; i++) {
      const one = found[i]!;
      const next = found[i + 1]?.startS ?? toS;
      const colour = jobColour(model.jobOf[one.deployment]!, theme.isDark);
      this.add((one.startS - fromS) * scale, (next - fromS) * scale, width, colour[0], colour[1], colour[2], 0.45);
    }
  }

  /** Add a bar to the sums: to its first and last pixel by the part that it covers. */
  private add(
    x0: number, x1: number, width: number, red: number, green: number, blue: number, alpha: number,
  ): void {
    const a = x0 < 0 ? 0 : x0;
    const b = x1 > width ? width : x1;
    if (a >= b) return;
    const first = a | 0;
    const last = b | 0;
    const { sums } = this;
    let part = first === last ? b - a : first + 1 - a;
    for (let x = first; ; ) {
      part *= alpha;
      const at = 4 * x;
      sums[at]! += part * red;
      sums[at + 1]! += part * green;
      sums[at + 2]! += part * blue;
      sums[at + 3]! += part;
      if (++x > last) break;
      part = x === last ? b - last : 1;
      if (part <= 0) break;
    }
  }

  /** Write the sums over a ground into lines of the picture. */
  private put(ground: Rgb, top: number, lines: number, width: number, height: number): void {
    const begin = Math.max(0, top);
    const end = Math.min(height, top + lines);
    if (begin >= end) return;
    const { pixels, sums } = this;
    const line = begin * width;
    const empty = packed(ground[0], ground[1], ground[2]);
    for (let x = 0, at = 0; x < width; x++, at += 4) {
      const covered = sums[at + 3]!;
      if (covered === 0) {
        pixels[line + x] = empty;
        continue;
      }
      const scale = covered > 1 ? 1 / covered : 1;
      const rest = covered > 1 ? 0 : 1 - covered;
      pixels[line + x] = packed(
        sums[at]! * scale + ground[0] * rest,
        sums[at + 1]! * scale + ground[1] * rest,
        sums[at + 2]! * scale + ground[2] * rest,
      );
    }
    for (let y = begin + 1; y < end; y++) pixels.copyWithin(y * width, line, line + width);
  }
}

/** The number of lanes of a row with this height in CSS pixels. */
export function lanesOf(device: Device, rowHeight: number): number {
  return rowHeight >= 2 * TALL_PX ? device.track.numLanes : 1;
}

/** How thick the lines above and below the bars of a row are; both heights in CSS pixels. */
export function linePx(rowHeight: number): number {
  return Math.max(2, Math.min(7, Math.round(rowHeight * 0.12)));
}

export function barColour(theme: Theme, job: number, kind: string): Rgb {
  return mixed(jobColour(job, theme.isDark), theme.track, kindShade(kind));
}

export function barCss(theme: Theme, job: number, kind: string): string {
  return css(barColour(theme, job, kind));
}

function packed(red: number, green: number, blue: number): number {
  return (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
}

// The colours of the page, light and dark: each job has one, paler for the smaller kinds of operations.

import palette from "../../../../libs/common/phaseloom/common/observability/palette.json";

export type Rgb = readonly [number, number, number];

/** The share of the ground in the colour of a kind of operation that the palette does not name. */
const OTHER_SHADE = 0.2;

export const SHORT: Record<string, string> = {
  generate: "generate",
  forward: "forward",
  forward_backward: "fwd+bwd",
  optim_step: "optim",
  publish_weights: "publish",
  sync_weights: "sync",
  save_state: "save",
  load_state: "load",
};

export interface Theme {
  isDark: boolean;
  ground: Rgb;
  track: Rgb;
  text: string;
  muted: string;
  line: string;
  accent: string;
  hidden: Rgb;
  waited: Rgb;
}

const LIGHT: Theme = {
  isDark: false,
  ground: [255, 255, 255],
  track: [238, 241, 245],
  text: "#1b2430",
  muted: "#566270",
  line: "#d9dfe6",
  accent: "#1f5fd1",
  hidden: [139, 150, 165],
  waited: [178, 34, 52],
};
const DARK: Theme = {
  isDark: true,
  ground: [21, 26, 33],
  track: [31, 38, 48],
  text: "#e6eaf0",
  muted: "#9aa5b4",
  line: "#2b3442",
  accent: "#7cb0ff",
  hidden: [112, 124, 141],
  waited: [255, 92, 108],
};

export function themeOf(isDark: boolean): Theme {
  return isDark ? DARK : LIGHT;
}

export function rgb(hex: string): Rgb {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)) as unknown as Rgb;
}

export function css([r, g, b]: Rgb, alpha = 1): string {
  return alpha === 1 ? `rgb(${r | 0} ${g | 0} ${b | 0})` : `rgb(${r | 0} ${g | 0} ${b | 0} / ${alpha})`;
}

export function mixed(one: Rgb, other: Rgb, share: number): Rgb {
  return [0, 1, 2].map((i) => one[i]! + (other[i]! - one[i]!) * share) as unknown as Rgb;
}

export function jobColour(job: number, isDark: boolean): Rgb {
  const colours = isDark ? palette.dark : palette.light;
  return rgb(colours[job % colours.length]!);
}

export function kindShade(kind: string): number {
  return (palette.shades as Record<string, number>)[kind] ?? OTHER_SHADE;
}

/** Whether dark text reads better on a colour. */
export function isPale([r, g, b]: Rgb): boolean {
  return 0.299 * r + 0.587 * g + 0.114 * b > 140;
}

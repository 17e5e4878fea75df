// Numbers for people.

export function seconds(value: number): string {
  const size = Math.abs(value);
  if (size < 0.0000005) return "0 ms";
  if (size < 0.01) return `${(value * 1e3).toFixed(1)} ms`;
  if (size < 1) return `${(value * 1e3).toFixed(0)} ms`;
  if (size < 100) return `${value.toFixed(2)} s`;
  if (size < 6000) return `${(value / 60).toFixed(1)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function bytes(value: number): string {
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]] as const) {
    if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
  }
  return `${value} B`;
}

export function percent(share: number): string {
  return `${(100 * share).toFixed(share < 0.1 && share > 0 ? 1 : 0)} %`;
}

export function count(value: number): string {
  return value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
}

const clockFormat = new Intl.DateTimeFormat("en-GB", {
  hour: "2-digit", minute: "2-digit", second: "2-digit",
});

export function clock(unixS: number, step = 1): string {
  const digits = step >= 1 ? 0 : step >= 0.1 ? 1 : step >= 0.01 ? 2 : 3;
  const part = digits ? (unixS % 1).toFixed(digits).slice(1) : "";
  const whole = clockFormat.format(unixS * 1000);
  return digits ? `${whole.slice(3)}${part}` : whole;
}

/** `1:02:03`, `2:03`, `3.25 s`: a time since a beginning. */
export function since(value: number, step = 1): string {
  const sign = value < 0 ? "−" : "";
  const size = Math.abs(value);
  if (step < 1) return `${sign}${size.toFixed(step < 0.01 ? 3 : step < 0.1 ? 2 : 1)}`;
  const whole = Math.round(size);
  const h = Math.floor(whole / 3600);
  const m = Math.floor(whole / 60) % 60;
  const s = whole % 60;
  const two = (n: number) => String(n).padStart(2, "0");
  return h ? `${sign}${h}:${two(m)}:${two(s)}` : `${sign}${m}:${two(s)}`;
}

/** A number of any size, in a few characters. */
export function short(value: number): string {
  const size = Math.abs(value);
  return size !== 0 && (size < 0.001 || size >= 1e5) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

// All that the page knows of a mesh, in columns: a million operations are drawn and searched fast.
//
// Times are seconds since `originS`, the zero of the server's rows.

import type { Decision, HeadRow, JobRow, NodeRow, ReportRow, Update } from "./wire";
import { TICK_S } from "./wire";

const FIRST_LENGTH = 1024;
const MOST_SWITCHES = 1000;
const MOST_DECISIONS = 1000;
const MOST_LANES = 4;
/** Operations of two deployments that overlap for less count as one after the other. */
const OVERLAP_S = 1e-3;
/** Reports of what ended may come this much later than those of what ended after it. */
const LATE_S = 5;

/** A column with room for `length` numbers: the same one, or a copy that is longer. */
function grown<T extends Float64Array | Int32Array | Uint16Array | Uint8Array>(column: T, length: number): T {
  if (length <= column.length) return column;
  const longer = new (column.constructor as new (n: number) => T)(Math.max(length, 2 * column.length));
  longer.set(column as never);
  return longer;
}

/** The operations of one device, in the order of their starts. */
export class Track {
  length = 0;
  start = new Float64Array(FIRST_LENGTH);
  end = new Float64Array(FIRST_LENGTH);
  ready = new Float64Array(FIRST_LENGTH);
  deployment = new Uint16Array(FIRST_LENGTH);
  kind = new Uint8Array(FIRST_LENGTH);
  lane = new Uint8Array(FIRST_LENGTH);
  operation = new Int32Array(FIRST_LENGTH);
  longestS = 0;
  longestWaitS = 0;
  numLanes = 1;
  /** For each lane: until when it is taken, and by which deployment. */
  private readonly taken: { until: number; deployment: number }[] = [];

  add(operation: number, deployment: number, kind: number, ready: number, start: number, end: number): void {
    const n = this.length + 1;
    for (const name of ["start", "end", "ready"] as const) this[name] = grown(this[name], n);
    this.deployment = grown(this.deployment, n);
    this.kind = grown(this.kind, n);
    this.lane = grown(this.lane, n);
    this.operation = grown(this.operation, n);
    // They come as they end, nearly in the order of their starts.
    let at = this.length;
    while (at > 0 && this.start[at - 1]! > start) at--;
    if (at < this.length) {
      for (const column of [
        this.start, this.end, this.ready, this.deployment, this.kind, this.lane, this.operation,
      ]) column.copyWithin(at + 1, at, this.length);
    }
    this.start[at] = start;
    this.end[at] = end;
    this.ready[at] = ready;
    this.deployment[at] = deployment;
    this.kind[at] = kind;
    this.lane[at] = this.laneOf(deployment, start, end);
    this.operation[at] = operation;
    this.length = n;
    this.longestS = Math.max(this.longestS, end - start);
    this.longestWaitS = Math.max(this.longestWaitS, start - ready);
  }

  /** The lane to draw an operation in: overlapping ones share it if they are of one deployment. */
  private laneOf(deployment: number, start: number, end: number): number {
    let free = -1;
    for (let i = 0; i < this.taken.length; i++) {
      const one = this.taken[i]!;
      if (one.deployment === deployment && one.until > start) {
        one.until = Math.max(one.until, end);
        return i;
      }
      if (free < 0 && one.until <= start + OVERLAP_S) free = i;
    }
    if (free < 0) {
      if (this.taken.length >= MOST_LANES) return MOST_LANES - 1;
      free = this.taken.length;
      this.taken.push({ until: end, deployment });
    } else {
      this.taken[free] = { until: end, deployment };
    }
    this.numLanes = this.taken.length;
    return free;
  }

  /** The place of the first operation that starts at or after a time. */
  from(time: number): number {
    let low = 0;
    let high = this.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.start[middle]! < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }
}

/** A deployment got its devices; where bytes moved for that, a switch, `endS` is after `startS`. */
export interface Activation {
  deployment: number;
  startS: number;
  offloadS: number;
  loadS: number;
  hiddenS: number;
  endS: number;
  bytesOut: number;
  bytesIn: number;
  isSpeculative: boolean;
  displaced: number[];
}

export interface Device {
  name: string;
  node: string;
  pool: string;
  label: string;
  isUp: boolean;
  track: Track;
  activations: Activation[];
}

export interface Operation {
  index: number;
  deployment: number;
  kind: number;
  slot: string;
  queued: number;
  ready: number;
  start: number;
  end: number;
  /** When the log had its end. */
  told: number;
  devices: number[];
  tokens: number;
  outcome: string;
  isReplay: boolean;
}

export interface Head {
  deployment: number;
  kind: number;
  slot: string;
  ready: number;
  numReady: number;
  devices: number[];
}

export class Model {
  originS = 0;
  cursor = 0;
  /** The server's clock is this far ahead of the page's, in seconds. */
  clockAheadS = 0;
  deployments: string[] = [];
  jobOf: number[] = [];
  jobs: string[] = [];
  kinds: string[] = [];
  devices: Device[] = [];
  nodes = new Map<string, NodeRow>();
  jobRows: JobRow[] = [];
  decisions: Decision[] = [];
  /** Job → name of a value → its points. */
  curves = new Map<string, Map<string, Curve>>();
  heads: Head[] = [];
  /** The newest activations that moved bytes, with where. */
  switches: { activation: Activation; where: string }[] = [];
  firstS = Infinity;
  lastS = 0;
  /** Counts changes; who draws compares it. */
  version = 0;
  /** Counts changes of the rows of the timeline. */
  rowsVersion = 0;

  numOperations = 0;
  private deploymentOf = new Uint16Array(FIRST_LENGTH);
  private kindOf = new Uint8Array(FIRST_LENGTH);
  private queued = new Float64Array(FIRST_LENGTH);
  private ready = new Float64Array(FIRST_LENGTH);
  private start = new Float64Array(FIRST_LENGTH);
  private end = new Float64Array(FIRST_LENGTH);
  private told = new Float64Array(FIRST_LENGTH);
  private tokens = new Float64Array(FIRST_LENGTH);
  private places: number[][] = [];
  private slots: string[] = [];
  private odd = new Map<number, { outcome: string; isReplay: boolean }>();

  private deploymentNumbers = new Map<string, number>();
  private jobNumbers = new Map<string, number>();
  private kindNumbers = new Map<string, number>();
  private deviceNumbers = new Map<string, number>();

  /** Now, by the server's clock. */
  nowS(): number {
    return Date.now() / 1000 + this.clockAheadS - this.originS;
  }

  take(update: Update): void {
    if (update.is_whole) this.forget();
    this.originS = update.origin_s;
    this.cursor = update.cursor;
    this.clockAheadS = update.now_s - Date.now() / 1000;
    if (update.nodes) this.takeNodes(update.nodes);
    if (update.jobs) this.jobRows = update.jobs;
    // Numbers, and so colours, follow the names: as after a reload, and as in the pictures of a run.
    const jobs = [...(update.jobs ?? []).map((row) => row.job), ...(update.deployments ?? []).map(jobOf)];
    for (const job of jobs.sort()) this.jobNumber(job);
    const deployments = (update.deployments ?? []).map((name) => this.deploymentNumber(name));
    const kinds = (update.kinds ?? []).map((name) => numberOf(this.kindNumbers, this.kinds, name));
    const devices = (update.devices ?? []).map((name) => this.deviceNumber(name));
    const places = new Map<string, number[]>();
    const placed = (row: number[]): number[] => {
      const name = row.join();
      let found = places.get(name);
      if (!found) places.set(name, (found = row.map((one) => devices[one]!)));
      return found;
    };
    for (const row of update.operations ?? []) {
      this.takeOperation(
        deployments[row[0]]!, kinds[row[1]]!, row[2],
        row[3] * TICK_S, row[4] * TICK_S, row[5] * TICK_S, row[6] * TICK_S,
        (row[6] + row[7]) * TICK_S, placed(row[8]), row[9] ?? 0, row[10] ?? "", row[11] ?? false,
      );
    }
    for (const row of update.activations ?? []) {
      this.takeActivation(
        {
          deployment: deployments[row[0]]!,
          startS: row[1] * TICK_S,
          offloadS: row[2] * TICK_S,
          loadS: row[3] * TICK_S,
          hiddenS: row[4] * TICK_S,
          endS: (row[1] + row[2] + row[3]) * TICK_S,
          bytesOut: row[6] ?? 0,
          bytesIn: row[7] ?? 0,
          isSpeculative: row[8] ?? false,
          displaced: (row[9] ?? []).map((one) => deployments[one]!),
        },
        placed(row[5]).map((device) => this.devices[device]!),
      );
    }
    if (this.switches.length > 2 * MOST_SWITCHES) this.switches = this.switches.slice(-MOST_SWITCHES);
    this.heads = (update.heads ?? []).map((row: HeadRow) => ({
      deployment: deployments[row[0]]!,
      kind: kinds[row[1]]!,
      slot: row[2],
      ready: row[3] * TICK_S,
      numReady: row[4],
      devices: placed(row[5]),
    }));
    if (update.decisions?.length) this.decisions = this.decisions.concat(update.decisions).slice(-MOST_DECISIONS);
    for (const row of update.reports ?? []) this.takeReport(row);
    this.version++;
  }

  operation(index: number): Operation {
    const odd = this.odd.get(index);
    return {
      index,
      deployment: this.deploymentOf[index]!,
      kind: this.kindOf[index]!,
      slot: this.slots[index]!,
      queued: this.queued[index]!,
      ready: this.ready[index]!,
      start: this.start[index]!,
      end: this.end[index]!,
      told: this.told[index]!,
      devices: this.places[index]!,
      tokens: this.tokens[index]!,
      outcome: odd?.outcome || "completed",
      isReplay: odd?.isReplay ?? false,
    };
  }

  nameOf(operation: { deployment: number; slot: string }): string {
    return `${this.deployments[operation.deployment]}.${operation.slot}`;
  }

  /** The activation that had a device at a time; undefined: none had. */
  activationAt(device: Device, time: number): Activation | undefined {
    return device.activations[newestAt(device.activations, time)];
  }

  /** How the operations of each job went in the newest seconds. */
  recent(windowS: number, nowS: number): Map<number, Recent> {
    const from = nowS - windowS;
    const found = new Map<number, Recent>();
    // They come nearly in the order of their ends.
    for (let i = this.numOperations - 1; i >= 0 && this.end[i]! > from - LATE_S; i--) {
      if (this.end[i]! <= from || this.odd.get(i)?.isReplay) continue;
      const job = this.jobOf[this.deploymentOf[i]!]!;
      let recent = found.get(job);
      if (!recent) found.set(job, (recent = { num: 0, waits: [], runs: [], devices: new Set(), stalledS: 0, aloneS: 0 }));
      recent.num++;
      recent.waits.push([Math.max(from, this.ready[i]!), this.start[i]!]);
      recent.runs.push([Math.max(from, this.start[i]!), this.end[i]!]);
      for (const device of this.places[i]!) recent.devices.add(device);
    }
    for (const recent of found.values()) {
      recent.stalledS = outside(recent.waits, recent.runs);
      const first = recent.waits.reduce((least, [ready]) => Math.min(least, ready), nowS);
      const last = recent.runs.reduce((most, [, end]) => Math.max(most, end), from);
      recent.aloneS = recent.devices.size * (last - first - recent.stalledS);
    }
    return found;
  }

  /** How many devices each job kept busy, on the mean, in each of `num` buckets of a stretch. */
  busyBuckets(fromS: number, toS: number, num: number): Float64Array[] {
    const buckets = this.jobs.map(() => new Float64Array(num));
    const scale = num / (toS - fromS);
    for (const { track } of this.devices) {
      const { start, end, deployment, length } = track;
      let until = -Infinity;
      for (let i = 0; i < length; i++) {
        // What runs together on a device counts once.
        const begin = Math.max(start[i]!, until);
        if (end[i]! <= begin) continue;
        until = end[i]!;
        const column = buckets[this.jobOf[deployment[i]!]!]!;
        const x0 = Math.max(0, (begin - fromS) * scale);
        const x1 = Math.min(num, (until - fromS) * scale);
        for (let x = Math.floor(x0); x < x1; x++) {
          column[x]! += Math.min(x + 1, x1) - Math.max(x, x0);
        }
      }
    }
    return buckets;
  }

  private takeActivation(activation: Activation, devices: Device[]): void {
    const { startS, endS } = activation;
    const where = devices.map((device) => device.label).join(", ");
    if (endS > startS) this.switches.push({ activation, where });
    for (const device of devices) insert(device.activations, activation);
    this.seen(startS, endS);
  }

  private takeReport([job, step, values, run]: ReportRow): void {
    const key = curvesKey(job, run);
    let curves = this.curves.get(key);
    if (!curves) this.curves.set(key, (curves = new Map()));
    for (const [name, value] of Object.entries(values)) {
      let curve = curves.get(name);
      if (!curve) curves.set(name, (curve = { steps: [], values: [], version: 0 }));
      put(curve, step, value);
    }
  }

  private takeOperation(
    deployment: number, kind: number, slot: string,
    queued: number, ready: number, start: number, end: number, told: number,
    places: number[], tokens: number, outcome: string, isReplay: boolean,
  ): void {
    const index = this.numOperations++;
    const n = this.numOperations;
    this.deploymentOf = grown(this.deploymentOf, n);
    this.kindOf = grown(this.kindOf, n);
    for (const name of ["queued", "ready", "start", "end", "told", "tokens"] as const) {
      this[name] = grown(this[name], n);
    }
    this.deploymentOf[index] = deployment;
    this.kindOf[index] = kind;
    this.queued[index] = queued;
    this.ready[index] = ready;
    this.start[index] = start;
    this.end[index] = end;
    this.told[index] = told;
    this.tokens[index] = tokens;
    this.places[index] = places;
    this.slots[index] = slot;
    if (outcome || isReplay) this.odd.set(index, { outcome, isReplay });
    for (const device of places) {
      this.devices[device]!.track.add(index, deployment, kind, ready, start, end);
    }
    this.seen(start, end);
  }

  private seen(startS: number, endS: number): void {
    this.firstS = Math.min(this.firstS, startS);
    this.lastS = Math.max(this.lastS, endS);
  }

  private takeNodes(rows: NodeRow[]): void {
    this.nodes = new Map(rows.map((row) => [row.node, row]));
    for (const row of rows) row.devices.forEach((_, index) => this.deviceNumber(`${row.node}/${index}`));
    for (const device of this.devices) this.describe(device);
    this.rowsVersion++;
  }

  private describe(device: Device): void {
    const row = this.nodes.get(device.node);
    device.pool = row?.pool ?? "";
    device.isUp = row?.is_up ?? true;
    device.label = row && row.devices.length === 1 ? device.node : device.name;
  }

  private deploymentNumber(name: string): number {
    let number = this.deploymentNumbers.get(name);
    if (number === undefined) {
      number = numberOf(this.deploymentNumbers, this.deployments, name);
      this.jobOf[number] = this.jobNumber(jobOf(name));
    }
    return number;
  }

  private jobNumber(name: string): number {
    return numberOf(this.jobNumbers, this.jobs, name);
  }

  private deviceNumber(name: string): number {
    let number = this.deviceNumbers.get(name);
    if (number === undefined) {
      number = this.devices.length;
      this.deviceNumbers.set(name, number);
      const device: Device = {
        name,
        node: name.slice(0, name.lastIndexOf("/")),
        pool: "",
        label: name,
        isUp: true,
        track: new Track(),
        activations: [],
      };
      this.describe(device);
      this.devices.push(device);
      this.rowsVersion++;
    }
    return number;
  }

  private forget(): void {
    this.numOperations = 0;
    this.places = [];
    this.slots = [];
    this.odd.clear();
    this.decisions = [];
    this.curves.clear();
    this.switches = [];
    this.firstS = Infinity;
    this.lastS = 0;
    this.devices = [];
    this.deviceNumbers.clear();
    this.rowsVersion++;
  }
}

export interface Curve {
  steps: number[];
  values: number[];
  /** Counts changes. */
  version: number;
}

/** Add a point to a curve, which is in the order of its steps; the newest value of a step counts. */
function put(curve: Curve, step: number, value: number): void {
  const { steps, values } = curve;
  curve.version++;
  let at = steps.length;
  while (at > 0 && steps[at - 1]! >= step) at--;
  const isThere = steps[at] === step;
  steps.splice(at, isThere ? 1 : 0, step);
  values.splice(at, isThere ? 1 : 0, value);
}

export interface Recent {
  num: number;
  waits: [number, number][];
  runs: [number, number][];
  /** On which its operations ran. */
  devices: Set<number>;
  /** Seconds in which an operation was ready and none of the job ran. */
  stalledS: number;
  /** Device-seconds that it would have held for the same work, had it had its devices alone. */
  aloneS: number;
}

function jobOf(deployment: string): string {
  return deployment.split(".").slice(0, 2).join(".");
}

function numberOf(numbers: Map<string, number>, names: string[], name: string): number {
  let number = numbers.get(name);
  if (number === undefined) {
    number = names.length;
    numbers.set(name, number);
    names.push(name);
  }
  return number;
}

/** The key of a run's curves in `Model.curves`. */
export function curvesKey(job: string, run = ""): string {
  return `${job} ${run}`;
}

/** The place of the newest activation that began at or before a time; -1: none did. */
export function newestAt(activations: Activation[], time: number): number {
  let low = 0;
  let high = activations.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (activations[middle]!.startS <= time) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

function insert(activations: Activation[], one: Activation): void {
  let at = activations.length;
  while (at > 0 && activations[at - 1]!.startS > one.startS) at--;
  activations.splice(at, 0, one);
}

/** The length of the first intervals' union that lies outside the second ones' union. */
function outside(first: [number, number][], second: [number, number][]): number {
  const marks: [number, number, number][] = [];
  for (const [a, b] of first) if (a < b) marks.push([a, 1, 0], [b, -1, 0]);
  for (const [a, b] of second) if (a < b) marks.push([a, 0, 1], [b, 0, -1]);
  marks.sort((x, y) => x[0] - y[0]);
  let sum = 0;
  let inFirst = 0;
  let inSecond = 0;
  let before = 0;
  for (const [time, one, two] of marks) {
    if (inFirst > 0 && inSecond === 0) sum += time - before;
    inFirst += one;
    inSecond += two;
    before = time;
  }
  return sum;
}

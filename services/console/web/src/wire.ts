// The messages from the console's server to a page: `core/wire.py` in TypeScript. Times in rows are
// in ticks since `Update.origin_s`. What is absent has its default there: 0, "", false or empty.

/** The length of a tick in seconds. */
export const TICK_S = 1e-4;

/** An operation that has ended: deployment, kind, slot, queued, ready, start, end, how long after
 * that the log had it, devices, tokens, outcome (absent: completed), is replay. Names are numbers in
 * the lists of the same update. */
export type OperationRow = [
  number, number, string, number, number, number, number, number, number[], number?, string?,
  boolean?,
];
/** A context switch: deployment, start, and in ticks how long the offload and the load took and how
 * much of both was hidden; devices, bytes out, bytes in, is speculative, the displaced deployments. */
export type ActivationRow = [
  number, number, number, number, number, number[], number?, number?, boolean?, number[]?,
];
/** The ready operation of a deployment that runs, or that runs next: deployment, kind, slot, ready,
 * the number that are ready, devices. */
export type HeadRow = [number, number, string, number, number, number[]];

/** A report of a job's controller: job, step, value by name, the job's run. */
export type ReportRow = [string, number, Record<string, number>, string?];

export interface Decision {
  time_s: number;
  what: string;
  why?: string;
  job?: string;
  is_trouble?: boolean;
}

export interface NodeRow {
  node: string;
  pool: string;
  devices: number[];
  host_memory_bytes: number;
  is_up?: boolean;
}

export interface Problem {
  message: string;
  remedy?: string;
}

export interface DeploymentRow {
  name: string;
  pool: string;
  node: string;
  state: string;
  incarnation?: number;
  moving?: string;
  error?: Problem;
}

export interface JobRow {
  job: string;
  state: string;
  has_ended?: boolean;
  placement?: string;
  error?: Problem;
  deployments?: DeploymentRow[];
  num_open?: number;
  num_done?: number;
  num_failed?: number;
  device_s?: number;
  period_s?: number;
  worst_period_s?: number;
  drift?: number;
  segments?: [string, number, number][];
  /** The job's present run: its start in UTC. */
  run?: string;
  /** Unix seconds; `ended_s` is absent while the run goes on. */
  submitted_s?: number;
  ended_s?: number;
  tags?: string[];
  /** Whether `api/explain/<job>` has a config of the run. */
  has_config?: boolean;
}

/** The whole view, or what is new since an earlier update. */
export interface Update {
  cursor: number;
  now_s: number;
  origin_s: number;
  is_whole?: boolean;
  deployments?: string[];
  kinds?: string[];
  devices?: string[];
  operations?: OperationRow[];
  activations?: ActivationRow[];
  decisions?: Decision[];
  reports?: ReportRow[];
  heads?: HeadRow[];
  nodes?: NodeRow[];
  jobs?: JobRow[];
}

/** A run that has ended, in the page itself. */
export interface Replay {
  title: string;
  update: Update;
}

/** Whose key the page has; no tenant: the operator's. */
export interface Caller {
  tenant?: string;
  can_act?: boolean;
}

/** Why an operation waits, as the scheduler says. */
export interface Explanation {
  key: { tenant: string; job: string; deployment: string; slot: string };
  kind: string;
  state: string;
  waits_for?: string[];
  place?: number;
  predicted_start_s?: number;
  why?: string;
}

/** A span of an operation, at its place in the waterfall; times in ticks since `origin_s`. */
export interface Leg {
  name: string;
  where: string;
  begin: number;
  end: number;
  depth?: number;
  error?: string;
}

/** What a node holds; `error` alone where the node does not answer. */
export interface NodeReport {
  error?: string;
  device_budget_bytes: number[];
  device_used_bytes: number[];
  host_budget_bytes: number;
  host_used_bytes: number;
  nvme_budget_bytes?: number;
  nvme_used_bytes?: number;
  owned_bytes?: number;
  held_bytes?: number;
  deployments: {
    deployment: { tenant: string; job: string; deployment: string };
    incarnation: number;
    devices: number[];
    applied: number;
    device_bytes?: number;
    scratch_bytes?: number;
    host_bytes?: number;
    nvme_bytes?: number;
    host_only_bytes?: number;
    shared_bytes?: number;
    dirty_bytes?: number;
    resident: boolean;
  }[];
  version_states?: {
    version: { policy: { tenant: string; job: string; deployment: string }; seq: number; part?: string };
    num_bytes: number;
    in_host: boolean;
    on_nvme: boolean;
    num_users: number;
  }[];
}

// What the console's server tells a page: `core/wire.py` in TypeScript. Times in rows are in ticks.

export const TICK_S = 1e-4;

/** deployment, kind, slot, queued, ready, start, end, devices, tokens, outcome, is replay */
export type OperationRow = [
  number, number, string, number, number, number, number, number[], number?, string?, boolean?,
];
/** deployment, start, offload, load, hidden, devices, bytes out, bytes in, speculative, displaced */
export type ActivationRow = [
  number, number, number, number, number, number[], number?, number?, boolean?, number[]?,
];
/** deployment, kind, slot, ready, number ready, devices */
export type HeadRow = [number, number, string, number, number, number[]];

/** job, step, values */
export type ReportRow = [string, number, Record<string, number>];

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
}

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

export interface Replay {
  title: string;
  update: Update;
}

export interface Caller {
  tenant?: string;
  can_act?: boolean;
}

export interface Explanation {
  key: { tenant: string; job: string; deployment: string; slot: string };
  kind: string;
  state: string;
  waits_for?: string[];
  place?: number;
  predicted_start_s?: number;
  why?: string;
}

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

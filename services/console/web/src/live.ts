// The connection to the console's server: first the whole view, then each update.

import type { Model } from "./model";
import type { Caller, Update } from "./wire";

export type Link = "connecting" | "live" | "lost" | "refused";

const PAUSE_MS = 1000;
/** The connection is lost after so long a silence: the server sends something every 5 s. */
const SILENCE_MS = 15_000;
/** A page with more operations asks for the view again, which has only the newest. */
const MAX_OPERATIONS = 1_500_000;

export class Live {
  caller: Caller = {};
  link: Link = "connecting";
  private source: EventSource | null = null;
  private heardMs = 0;
  private isConnecting = false;

  constructor(
    private readonly model: Model,
    private readonly changed: () => void,
  ) {}

  start(): void {
    void this.connect();
    setInterval(() => this.watch(), PAUSE_MS);
  }

  private async connect(): Promise<void> {
    if (this.isConnecting) return;
    this.isConnecting = true;
    try {
      await this.reconnect();
    } finally {
      this.isConnecting = false;
    }
  }

  private async reconnect(): Promise<void> {
    this.source?.close();
    this.source = null;
    this.heardMs = Date.now();
    try {
      const me = await fetch("api/me");
      if (me.status === 401) return this.become("refused");
      if (!me.ok) throw new Error(String(me.status));
      this.caller = (await me.json()) as Caller;
      const update = (await (await fetch("api/state")).json()) as Update;
      this.model.take({ ...update, is_whole: true });
    } catch {
      return this.become("lost");
    }
    const since = `${this.model.originS}-${this.model.cursor}`;
    const source = new EventSource(`api/events?since=${encodeURIComponent(since)}`);
    this.source = source;
    source.onmessage = (event: MessageEvent<string>) => {
      this.heardMs = Date.now();
      this.model.take(JSON.parse(event.data) as Update);
      this.become("live");
    };
    source.onerror = () => {
      // The browser tries again by itself only after some errors: the page does after each.
      source.close();
      this.source = null;
      this.heardMs = Date.now();
      this.become("lost");
    };
    this.become("live");
  }

  private watch(): void {
    const isSilent = Date.now() - this.heardMs > SILENCE_MS;
    const isFull = this.model.numOperations > MAX_OPERATIONS;
    if (this.link === "lost" || (this.link === "live" && (isSilent || isFull))) void this.connect();
  }

  private become(link: Link): void {
    this.link = link;
    this.changed();
  }
}

export interface Refusal {
  code?: string;
  message: string;
  remedy?: string;
}

/** Call the console's server, and return the answer's JSON. Throws: a `Refusal`. */
export async function ask<T>(path: string, method: "GET" | "POST" = "GET"): Promise<T> {
  let answer: Response;
  try {
    answer = await fetch(path, { method, headers: { "X-Phaseloom-Console": "1" } });
  } catch {
    throw { message: "the console does not answer", remedy: "try again" } satisfies Refusal;
  }
  const said = (await answer.json().catch(() => ({}))) as T & { error?: Refusal };
  if (!answer.ok) throw said.error ?? { message: `status ${answer.status}` };
  return said;
}

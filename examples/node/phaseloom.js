// A controller's side of the contract in plain JSON over NATS: no Phaseloom library needed.
// The messages are described in docs/contract (JSON Schema, AsyncAPI).

import { randomUUID } from "node:crypto";
import { connect, headers } from "@nats-io/transport-node";

const BEAT_MS = 5_000;

/** Connect as a tenant; what `phaseloom up` prints is in the environment. */
export async function connectMesh(env = process.env) {
  for (const name of ["PHASELOOM_URL", "PHASELOOM_TENANT", "PHASELOOM_PASSWORD"]) {
    if (!env[name]) throw new Error(`${name} is not set: \`phaseloom up\` prints it`);
  }
  const tenant = env.PHASELOOM_TENANT;
  const nc = await connect({
    servers: env.PHASELOOM_URL.split(","), // several where the mesh has several NATS servers
    user: tenant,
    pass: env.PHASELOOM_PASSWORD,
    inboxPrefix: `_INBOX_${tenant}`, // a tenant hears nothing else
  });
  return new Mesh(nc, tenant);
}

class Mesh {
  constructor(nc, tenant) {
    this.nc = nc;
    this.tenant = tenant;
  }

  /** A call of the API; an error is thrown with its code, its message and its remedy. */
  async call(name, body) {
    const subject = `pl.v1.api.${this.tenant}.${name}`;
    const reply = await this.nc.request(subject, JSON.stringify(body), { timeout: 10_000 });
    if (reply.headers?.get("Nats-Service-Error")) throw failure(reply.json().error);
    return reply.json();
  }

  /** Submit a job, wait until its deployments are up, attach to it. */
  async submitJob(job, deployments) {
    await this.call("job.submit", { job, spec: { deployments } });
    for (;;) {
      const status = await this.call("job.status", { job });
      if (status.state === "active") break;
      if (["failed", "rejected"].includes(status.state)) throw failure(status.error);
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
    const { session, status } = await this.call("session.attach", { job });
    return new Job(this, job, session, status.deployments);
  }

  close() {
    return this.nc.close();
  }
}

class Job {
  constructor(mesh, name, session, deployments) {
    this.mesh = mesh;
    this.name = name;
    this.session = session;
    this.nextSeq = Object.fromEntries(deployments.map((d) => [d.name, d.next_seq]));
    this.waiting = new Map();
    this.outcomes = mesh.nc.subscribe(`pl.v1.out.${mesh.tenant}.${name}.>`, {
      callback: (_, message) => this.#onOutcome(message),
    });
    // While it beats, devices are kept for this controller.
    this.heart = setInterval(
      () => mesh.call("session.heartbeat", { job: name, session }).catch(() => {}),
      BEAT_MS,
    );
  }

  /**
   * Publish an operation; `result` is a promise of its result. Operations of one deployment take
   * effect in the order of these calls, and after those that `after` names.
   */
  submit(deployment, args, after = []) {
    const seq = this.nextSeq[deployment]++;
    const key = `${this.mesh.tenant}.${this.name}.${deployment}.${seq}`;
    const result = new Promise((resolve, reject) => {
      this.waiting.set(key, { resolve, reject });
    });
    const operation = { id: randomUUID(), session: this.session, args, after };
    this.#publish(key, operation).catch((error) => this.#end(key, (w) => w.reject(error)));
    return { deployment, seq, result };
  }

  async #publish(key, operation) {
    const jsonHeaders = headers();
    jsonHeaders.set("Content-Type", "application/json");
    const ack = await this.mesh.nc.request(`pl.v1.op.${key}`, JSON.stringify(operation), {
      timeout: 10_000,
      headers: jsonHeaders,
    });
    const { error } = ack.json();
    if (error) throw new Error(`${key} was not stored: ${error.description}`);
  }

  #onOutcome(message) {
    const key = message.subject.replace("pl.v1.out.", "");
    if (key.endsWith(".progress")) return;
    const { outcome, result, error } = message.json();
    this.#end(key, (w) => (outcome === "completed" ? w.resolve(result) : w.reject(failure(error))));
  }

  #end(key, settle) {
    const waiter = this.waiting.get(key);
    this.waiting.delete(key);
    if (waiter) settle(waiter);
  }

  /** Tell people how the job goes: `report(step, { loss: 0.4 })`; the console draws curves. */
  report(step, values) {
    return this.mesh.call("job.report", { job: this.name, step, values });
  }

  async finish() {
    clearInterval(this.heart);
    await this.mesh.call("job.finish", { job: this.name });
    this.outcomes.unsubscribe();
  }
}

function failure(error) {
  const { code, message, field, remedy } = error ?? { code: "INTERNAL", message: "no reason" };
  return new Error([`${code}: ${message}`, field && `field ${field}`, remedy].filter(Boolean).join("; "));
}

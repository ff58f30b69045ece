// Two workers' whole life from Node.js, with nothing but the .proto files: first in unary calls, then once more in the
// frames of a session. Prints one line of JSON with what it saw, keeps its workers alive until stdin closes (so that the
// test can look at them from the other side), then deregisters them.
//
//   node drive.js HOST:PORT
"use strict";

const assert = require("node:assert");
const crypto = require("node:crypto");
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");
const Long = require("long");

const DEADLINE_MS = 20_000;

const definition = protoLoader.loadSync("strata/v1/coordinator.proto", {
  includeDirs: [path.resolve(__dirname, "../../../proto")],
  keepCase: true,
  enums: String,
  defaults: true,
  oneofs: true,
});
const { Coordinator } = grpc.loadPackageDefinition(definition).strata.v1;
const decodeError = (details) => plain(definition["strata.v1.Error"].deserialize(details));

/** Without Long objects: counts fit a number, an incarnation takes all 64 bits and is kept as text. */
function plain(value, key) {
  if (Long.isLong(value)) return key === "incarnation" ? value.toString() : value.toNumber();
  if (Array.isArray(value)) return value.map((item) => plain(item, key));
  if (value === null || typeof value !== "object" || Buffer.isBuffer(value)) return value;
  return Object.fromEntries(Object.entries(value).map(([name, inner]) => [name, plain(inner, name)]));
}

class Refused extends Error {
  constructor(status, error) {
    super(`${status}: ${error?.message ?? "without strata-error-bin"}`);
    this.seen = { status, ...error };
  }
}

// -- two ways to make the same calls ------------------------------------------------------------------------------

function unaryCalls(client) {
  return (method, request) =>
    new Promise((resolve, reject) => {
      client[method](request, { deadline: Date.now() + DEADLINE_MS }, (error, response) => {
        if (!error) return resolve(plain(response));
        const [details] = error.metadata.get("strata-error-bin");
        reject(new Refused(grpc.status[error.code], details && decodeError(details)));
      });
    });
}

/** Calls made in one go travel in one frame; answers find their call by its id. */
class Session {
  constructor(client) {
    this.notices = [];
    this.numFrames = 0;
    this.maxCallsPerFrame = 0;
    this.maxAnswersPerFrame = 0;
    this._onNotice = () => {};
    this._lastId = 0;
    this._outgoing = [];
    this._unanswered = new Map();
    this._stream = client.Session();
    this.welcomed = new Promise((resolve) => (this._welcome = resolve));
    this.ended = new Promise((resolve) => this._stream.on("status", (status) => resolve(grpc.status[status.code])));
    this._stream.on("data", (frame) => this._receive(frame));
    this._stream.on("error", (error) => this._unanswered.forEach(({ reject }) => reject(error)));
    this._stream.write({ hello: { session_id: crypto.randomUUID(), client: "drive.js" } });
    this.call = this.call.bind(this);
  }

  call(method, request) {
    const field = method.replace(/[A-Z]/g, (c, at) => (at ? "_" : "") + c.toLowerCase());
    const id = ++this._lastId;
    if (this._outgoing.push({ id, [field]: request }) === 1) setImmediate(() => this._flush());
    return new Promise((resolve, reject) => this._unanswered.set(id, { field, resolve, reject }));
  }

  /** Resolves with the first notice, also of those that came already, for which `wanted` holds. */
  async notice(wanted) {
    for (;;) {
      const found = this.notices.find(wanted);
      if (found) return found;
      await new Promise((resolve) => (this._onNotice = resolve));
    }
  }

  close() {
    this._stream.end();
    return this.ended;
  }

  _flush() {
    const requests = this._outgoing;
    this._outgoing = [];
    this.numFrames += 1;
    this.maxCallsPerFrame = Math.max(this.maxCallsPerFrame, requests.length);
    this._stream.write({ requests });
  }

  _receive(received) {
    const frame = plain(received);
    if (frame.welcome) this._welcome(frame.welcome.server);
    this.maxAnswersPerFrame = Math.max(this.maxAnswersPerFrame, frame.responses.length);
    for (const response of frame.responses) {
      const { field, resolve, reject } = this._unanswered.get(response.id);
      this._unanswered.delete(response.id);
      if (response.error) {
        reject(new Refused(grpc.status[response.error.code], response.error));
      } else {
        assert.equal(response.result, field);
        resolve(response[field]);
      }
    }
    this.notices.push(...frame.notices);
    if (frame.notices.length) this._onNotice();
  }
}

// -- a worker -----------------------------------------------------------------------------------------------------

class Worker {
  constructor(call, jobId, workerId) {
    this.call = call;
    this.name = { job_id: jobId, worker_id: workerId };
    this.instanceId = crypto.randomUUID();
    this.report = {};
    this.ackedCommandId = 0;
    this.leaving = false;
  }

  async register() {
    const request = { ...this.name, instance_id: this.instanceId, hostname: "node" };
    const joined = await this.call("RegisterWorker", request);
    this.incarnation = joined.incarnation;
    this.generation = joined.generation;
    clearInterval(this._beats);
    const beat = () => this.beat().catch((error) => assert(this.leaving, error));
    this._beats = setInterval(beat, joined.heartbeat_s * 1000);
    return joined;
  }

  beat(report = {}) {
    Object.assign(this.report, report);
    const { incarnation, ackedCommandId: acked_command_id } = this;
    return this.call("Heartbeat", { ...this.name, incarnation, acked_command_id, ...this.report });
  }

  /** For the calls that are fenced by the membership. */
  get fence() {
    return { ...this.name, incarnation: this.incarnation, generation: this.generation };
  }

  /** All pages; begins again when the members changed in between. */
  async shards(datasetId) {
    for (;;) {
      const pages = [];
      do {
        const offset = pages.at(-1)?.next_offset ?? 0;
        pages.push(await this.call("GetAssignedShards", { ...this.name, dataset_id: datasetId, offset }));
      } while (pages.at(-1).next_offset);
      if (pages.every((page) => page.generation === pages[0].generation)) {
        this.generation = pages[0].generation;
        this.numPages = pages.length;
        return pages.flatMap((page) => page.shards);
      }
    }
  }

  ack(shards) {
    const { dataset_id, epoch } = shards[0];
    return this.call("AckShards", { ...this.fence, dataset_id, epoch, indices: shards.map((s) => s.index) });
  }

  deregister(reason) {
    clearInterval(this._beats);
    this.leaving = true;
    return this.call("DeregisterWorker", { ...this.name, incarnation: this.incarnation, reason });
  }
}

/** What a refused call was refused with. */
async function refusal(calling) {
  try {
    await calling;
  } catch (error) {
    if (error instanceof Refused) return error.seen;
    throw error;
  }
  throw new Error("the call was not refused");
}

// -- what happens -------------------------------------------------------------------------------------------------

/** Everything two workers do in a job; `session` is there in the second run only. */
async function live(call, jobId, session) {
  const seen = {};
  const a = new Worker(call, jobId, "node-a");
  const b = new Worker(call, jobId, "node-b");

  seen.joined = await Promise.all([a.register(), b.register()]);
  seen.joinedAgain = await a.register();
  seen.beats = await Promise.all([
    a.beat({ state: "WORKER_STATE_TRAINING", step: 7, epoch: 0, metrics: { loss: 0.5, "lr/base": 0.01 } }),
    b.beat({ state: "WORKER_STATE_LOADING_DATA", step: 3 }),
  ]);
  seen.members = await call("ListWorkers", { job_id: jobId });

  const dataset = { job_id: jobId, dataset_id: "images", total_samples: 9_950, shard_size: 100, shuffle: true, seed: 7 };
  seen.dataset = await call("RegisterDataset", dataset);
  const [ofA, ofB] = await Promise.all([a.shards("images"), b.shards("images")]);
  seen.shards = { a: ofA, b: ofB, numPages: [a.numPages, b.numPages] };
  await a.ack(ofA);
  seen.allDone = await b.ack(ofB);
  const advance = { job_id: jobId, dataset_id: "images", from_epoch: 0, require_complete: true };
  seen.advanced = await Promise.all([call("AdvanceEpoch", advance), call("AdvanceEpoch", advance)]);
  seen.partDone = await a.ack((await a.shards("images")).slice(0, 3));

  const barrier = { barrier_id: "epoch-end", step: 1, timeout_s: 10 };
  seen.barrier = await Promise.all([a, b].map((w) => call("WaitBarrier", { ...w.fence, ...barrier })));

  const oldFence = { ...a.fence, generation: a.generation - 1 };
  seen.refused = {
    staleGeneration: await refusal(call("WaitBarrier", { ...oldFence, barrier_id: "late" })),
    staleIncarnation: await refusal(call("WaitBarrier", { ...a.fence, incarnation: 999, barrier_id: "late" })),
    unknownWorker: await refusal(call("Heartbeat", { job_id: jobId, worker_id: "nobody", incarnation: 1 })),
    unknownJob: await refusal(call("ListWorkers", { job_id: `${jobId}-not` })),
    unknownDataset: await refusal(call("GetAssignedShards", { ...a.name, dataset_id: "sounds" })),
    workerExists: await refusal(call("RegisterWorker", { ...a.name, instance_id: "another-process" })),
    datasetExists: await refusal(call("RegisterDataset", { ...dataset, seed: 8 })),
    notMine: await refusal(b.ack((await a.shards("images")).slice(0, 1))),
    invalid: await refusal(call("RegisterWorker", { job_id: jobId, worker_id: "", instance_id: "x" })),
  };

  const checkpoint = { checkpoint_id: "step-7", step: 7, epoch: 1, path: "checkpoints/step-7", size_bytes: 1_000 };
  const part = (w) => ({ ...w.fence, ...checkpoint, type: "CHECKPOINT_TYPE_FULL", hashes: { [w.name.worker_id]: "xx" } });
  seen.noCheckpoint = await call("GetLatestCheckpoint", { job_id: jobId });
  seen.notified = [await call("NotifyCheckpoint", part(a))];
  seen.notified.push(await call("NotifyCheckpoint", { ...part(b), data_cursor: Buffer.from([0, 255, 1]) }));
  seen.latest = await call("GetLatestCheckpoint", { job_id: jobId });
  seen.recovery = await call("RequestRecovery", { ...a.name, incarnation: a.incarnation });

  seen.standing = await call("GetMembership", { ...a.name, incarnation: a.incarnation });

  const over = { job_id: `${jobId}-over` };
  await call("RegisterDataset", { ...over, dataset_id: "images", total_samples: 10, shard_size: 1 });
  seen.dropped = [await call("DropJob", over), await call("DropJob", over)];
  seen.refused.jobInUse = await refusal(call("DropJob", { job_id: jobId }));

  const order = { job_id: jobId, worker_ids: ["node-a"], kind: "COMMAND_KIND_STOP", reason: "enough", request_id: "r-1" };
  seen.sent = [await call("SendCommand", order), await call("SendCommand", order)];
  seen.commands = (await a.beat()).commands;
  a.ackedCommandId = seen.commands.at(-1).command_id;
  await a.beat();
  seen.commandsAfterAck = (await a.beat()).commands;
  if (session) seen.commandNotice = await session.notice((n) => n.command_queued);

  const waiting = refusal(call("WaitBarrier", { ...a.fence, barrier_id: "broken", step: 2, timeout_s: 10 }));
  await a.beat();
  const c = new Worker(call, jobId, "node-c");
  const third = await c.register();
  seen.third = third;
  seen.refused.barrierBroken = await waiting;
  if (session) seen.generationNotice = await session.notice((n) => n.generation_changed?.generation === third.generation);
  seen.thirdLeft = await c.deregister("only looking");

  seen.mixed = await Promise.all([
    a.beat(),
    call("ListWorkers", { job_id: jobId }),
    refusal(call("Heartbeat", { job_id: jobId, worker_id: "nobody", incarnation: 1 })),
    call("GetLatestCheckpoint", { job_id: jobId, types: ["CHECKPOINT_TYPE_MODEL_ONLY"] }),
    b.beat(),
  ]);
  seen.jobs = (await call("ListJobs", {})).jobs;
  seen.datasets = (await call("ListDatasets", { job_id: jobId })).datasets;
  return [seen, [a, b]];
}

async function main(address) {
  const client = new Coordinator(address, grpc.credentials.createInsecure(), { "grpc.keepalive_time_ms": 2_000 });
  const session = new Session(client);
  const server = await session.welcomed;
  const [unary, unaryWorkers] = await live(unaryCalls(client), "node-unary");
  const [framed, framedWorkers] = await live(session.call, "node-session", session);
  const { numFrames, maxCallsPerFrame, maxAnswersPerFrame } = session;
  const frames = { server, numFrames, maxCallsPerFrame, maxAnswersPerFrame };
  const stdinClosed = new Promise((resolve) => process.stdin.on("end", resolve).resume());
  console.log(JSON.stringify({ unary, framed, frames }));

  await stdinClosed;
  await Promise.all([...unaryWorkers, ...framedWorkers].map((worker) => worker.deregister("drive.js is done")));
  assert.equal(await session.close(), "OK");
  client.close();
}

main(process.argv[2]).catch((error) => {
  console.error(error);
  process.exit(1);
});

// Prints every trajectory as one line of JSON, and goes on where it was when it is started again.
//
//   node consumer.mjs [--run RUN] [--env ENV] [--name NAME] [--since ISO-TIME] [--once]
//
// OPENFORGE_NATS_URL says where the bus is, OPENFORGE_NATS_NKEY_SEED_FILE holds a consumer's credentials, if it has any.
// Reading is one request for each fact ("the next one at or after this sequence on these subjects"): nothing is made on the
// server, nothing is acknowledged. With a name, the place is kept in the bucket of_cursors, as the Python client keeps it.

import { createHash, randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { parseArgs } from "node:util";

import { decode } from "@msgpack/msgpack";
import { connect, headers, nkeyAuthenticator, nkeys } from "@nats-io/transport-node";
import { decompress } from "fzstd";

const STREAM = "TRAJECTORY";
const IDLE_MS = 250;
const SAVE_MS = 1000;

// -- the bus

async function open() {
  const options = { servers: process.env.OPENFORGE_NATS_URL ?? "nats://127.0.0.1:4222", maxReconnectAttempts: -1 };
  const seedFile = process.env.OPENFORGE_NATS_NKEY_SEED_FILE;
  if (seedFile) {
    const seed = new TextEncoder().encode(readFileSync(seedFile, "utf8").trim());
    options.authenticator = nkeyAuthenticator(seed);
    options.inboxPrefix = `_INBOX.${nkeys.fromSeed(seed).getPublicKey()}`; // the only place where answers may be heard
  }
  return connect(options);
}

/** The answer to a request that may be asked again: breaks and restarts of the server are waited out. */
async function ask(bus, subject, question = "", more = {}) {
  for (;;) {
    try {
      return await bus.request(subject, question, { timeout: 5000, ...more });
    } catch (error) {
      if (bus.isClosed() || /permissions violation/i.test(`${error} ${error.cause ?? ""}`)) throw error;
      await sleep(IDLE_MS);
    }
  }
}

/** The first message of a stream that fits, or null. */
async function direct(bus, stream, question) {
  const answer = await ask(bus, `$JS.API.DIRECT.GET.${stream}`, JSON.stringify(question));
  return answer.headers?.has("Nats-Sequence") ? answer : null;
}

// -- a message's bytes

async function payload(bus, message) {
  const digest = message.headers.get("Of-Blob");
  const data = digest ? await blob(bus, digest) : message.data;
  return message.headers.get("Of-Encoding") === "zstd" ? decompress(data) : data;
}

/** Bytes of the object store of_blobs, by their sha256. */
async function blob(bus, digest) {
  const name = Buffer.from(digest).toString("base64url").padEnd(4 * Math.ceil(digest.length / 3), "=");
  const meta = await direct(bus, "OBJ_of_blobs", { last_by_subj: `$O.of_blobs.M.${name}` });
  if (!meta) throw new Error(`blob ${digest} is not in of_blobs`);
  const chunks = new Map();
  for (let seq = 1; ; ) {
    const chunk = await direct(bus, "OBJ_of_blobs", { seq, next_by_subj: `$O.of_blobs.C.${meta.json().nuid}` });
    if (!chunk) break;
    chunks.set(chunk.headers.get("Of-Chunk") || String(chunks.size), chunk.data); // one that lies there twice counts once
    seq = Number(chunk.headers.get("Nats-Sequence")) + 1;
  }
  const data = Buffer.concat([...chunks].sort(([a], [b]) => a - b).map(([, bytes]) => bytes));
  if (createHash("sha256").update(data).digest("hex") !== digest) throw new Error(`blob ${digest} has other bytes`);
  return data;
}

// -- a fact

/** Packed numbers are little-endian and 4 bytes each, as typed arrays are on every machine that Node runs on. */
const int32 = (packed) => new Int32Array(Uint8Array.from(packed).buffer);
const float32 = (packed) => new Float32Array(Uint8Array.from(packed).buffer);

/** A TrajectoryVerified; fields that this program does not know are kept as they are. */
function trajectory(bytes) {
  const fact = decode(bytes);
  const sequences = fact.sequences.map((one) => ({ ...one, ids: int32(one.ids), logprobs: float32(one.logprobs) }));
  return { ...fact, sequences };
}

/** Typed arrays as lists, for people and other programs. */
const plain = (_, value) => (ArrayBuffer.isView(value) ? Array.from(value) : value);

// -- where a named reader was

class Cursor {
  constructor(bus, name, subjects) {
    Object.assign(this, { bus, name, subjects, revision: 0, saved: 0, at: Date.now(), reader: randomUUID() });
    this.subject = `$KV.of_cursors.${name}`;
  }

  async recall() {
    const found = this.name && (await direct(this.bus, "KV_of_cursors", { last_by_subj: this.subject }));
    if (!found) return 0;
    this.revision = Number(found.headers.get("Nats-Sequence"));
    const mark = found.data.length ? found.json() : { sequence: 0, subjects: this.subjects };
    if (mark.subjects !== this.subjects) throw new Error(`--name ${this.name} reads ${mark.subjects}: choose another`);
    return (this.saved = mark.sequence);
  }

  /** At most once a second, unless `now`. */
  async save(sequence, now = false) {
    if (!this.name || sequence <= this.saved || (!now && Date.now() - this.at < SAVE_MS)) return;
    const mark = { stream: STREAM, subjects: this.subjects, sequence, reader: this.reader };
    const fence = headers();
    fence.set("Nats-Expected-Last-Subject-Sequence", String(this.revision));
    const answer = (await ask(this.bus, this.subject, JSON.stringify(mark), { headers: fence })).json();
    if (answer.error) throw new Error(`--name ${this.name} is read by somebody else: ${answer.error.description}`);
    Object.assign(this, { revision: answer.seq, saved: sequence, at: Date.now() });
  }
}

// -- start, run, stop

const { values: wanted } = parseArgs({
  options: {
    run: { type: "string", default: "*" },
    env: { type: "string", default: "*" },
    name: { type: "string", default: "" },
    since: { type: "string", default: "" },
    once: { type: "boolean", default: false },
  },
});
let stopped = false;
for (const signal of ["SIGINT", "SIGTERM"]) process.on(signal, () => (stopped = true));

const bus = await open();
const subjects = `of.${wanted.run}.trajectory.${wanted.env}.*.>`;
const cursor = new Cursor(bus, wanted.name, subjects);
let done = await cursor.recall();
let start = done || !wanted.since ? { seq: done + 1 } : { start_time: new Date(wanted.since).toISOString() };

while (!stopped) {
  const message = await direct(bus, STREAM, { ...start, next_by_subj: subjects });
  if (message) {
    const sequence = Number(message.headers.get("Nats-Sequence"));
    const fact = trajectory(await payload(bus, message));
    console.log(JSON.stringify({ subject: message.headers.get("Nats-Subject"), sequence, fact }, plain));
    done = sequence;
    start = { seq: sequence + 1 };
    await cursor.save(done);
  } else if (wanted.once) {
    break;
  } else {
    await cursor.save(done, true);
    await sleep(IDLE_MS);
  }
}
await cursor.save(done, true);
await bus.close();

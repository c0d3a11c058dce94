// The page of a running publisher: asks /status once a second, /gaps and /recorded after changes.
//
// All that a server says is put in as text. Tables need no library; charts need d3.
"use strict";

const MINUTES = 15, BIN = 5, STATUS_EVERY = 1000, GAPS_EVERY = 5000, ANSWER_WITHIN = 8000;
const RECORDED_EVERY = 30000, MOST_COUNTED_AHEAD = 10000;
const ACTION_WITHIN = 45000;
const STEPS = ["index", "backtrack", "admit", "publish"]; // `read` waits; all others are one more
const $ = (id) => document.getElementById(id);

// -- words ----------------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const number = (n) => (Math.abs(n) < 10 ? tenth : whole).format(n);
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString();

function age(seconds) {
  const s = Math.max(seconds, 0);
  if (s < 120) return `${whole.format(s)} s`;
  if (s < 7200) return `${whole.format(s / 60)} min`;
  return s < 172800 ? `${whole.format(s / 3600)} h` : `${whole.format(s / 86400)} d`;
}

function duration(seconds) {
  if (seconds >= 120 || seconds === 0) return age(seconds);
  return seconds < 1 ? `${number(seconds * 1000)} ms` : `${tenth.format(seconds)} s`;
}

function bytes(n) {
  const power = n < 1024 ? 0 : Math.min(Math.floor(Math.log2(n) / 10), 4);
  return `${number(n / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

function position(micros) {
  if (micros === null || micros === undefined) return "–";
  if (!micros) return "beginning";
  const text = new Date(micros / 1000).toISOString();
  return `${text.slice(0, 10)} ${text.slice(11, 21)} UTC`;
}

// What cannot be seen, or turns the direction of what follows, would let one id look like another.
function visible(text) {
  const unseen = /[\u0000-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
  return String(text).replace(unseen, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
}

// Of a message of several lines, which ends here.
const message = (text) => visible(String(text).replace(/\s*\n\s*/g, "; "));

// -- what is shown ---------------------------------------------------------------------------------

function say(id, text) {
  const node = $(id);
  if (node.textContent !== text) node.textContent = text;
}

// Rows are kept as long as what they stand for, so that the focus stays where it is.
function fill(table, rows, buttons) {
  const body = $(table).tBodies[0];
  const labels = [...$(table).querySelectorAll("thead th")].map((th) => th.textContent);
  const known = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  rows.forEach(({ key, cells }, at) => {
    let row = known.get(key);
    if (row === undefined) {
      row = document.createElement("tr");
      row.dataset.key = key;
      cells.forEach((_, n) => { row.insertCell().dataset.label = labels[n] ?? ""; });
      if (buttons) buttons(row.insertCell(), row);
    }
    known.delete(key);
    cells.forEach((cell, n) => {
      const { text, kind } = typeof cell === "object" ? cell : { text: cell, kind: "" };
      const node = row.cells[n];
      if (node.textContent !== text) node.textContent = text;
      if (node.className !== kind) node.className = kind;
    });
    if (body.rows[at] !== row) body.insertBefore(row, body.rows[at] ?? null);
  });
  known.forEach((row) => row.remove());
}

function pairs(table, found) {
  const rows = Object.entries(found);
  fill(table, rows.map(([name, value]) => ({ key: name, cells: [name, plain(value)] })));
}

function plain(value) {
  if (value === null || value === "") return "–";
  if (typeof value === "number") return whole.format(value);
  return visible(typeof value === "object" ? JSON.stringify(value) : value);
}

function outcome(text, kind) {
  $("outcome").className = `notice ${kind}`;
  $("outcome").hidden = false;
  say("outcome", text);
}

// Pill, and what stands beside it: the colour is that of the pill's word.
function standing(status) {
  const { checks, state } = status;
  const by = status.is_paused && status.paused_by ? ` by ${visible(status.paused_by)}` : "";
  const isStarting = state === "starting"
    && checks.every((c) => c.state !== "error" || c.message === "not seen to work yet");
  if (state === "not answering") return [state, "error", ""];
  if (!status.is_alive) return ["not working", "error", "its loop does not turn"];
  if (isStarting) return [state, "warn", ""];
  if (!status.is_ready) return ["not ready", "error", state + by];
  if (state !== "running") return [state, "warn", by.trim()];
  return checks.some((c) => c.state !== "ok") ? ["warning", "warn", state] : [state, "ok", "ready"];
}

// What is wrong, once: a check that only follows from another one is named there. Causes come first.
const CAUSES = ["process", "database", "broker", "index", "boundary", "times", "recount", "publishing"];
const FOLLOWS = { database: "store.", broker: "sink." };

function causes(checks) {
  const found = [], cause = new Map();
  const rank = (check) => (CAUSES.indexOf(check.name) + 1 || 99) + (check.state === "error" ? 0 : 200);
  for (const check of checks.filter((c) => c.state !== "ok").sort((a, b) => rank(a) - rank(b))) {
    const code = check.message.match(/\b[a-z]+\.[a-z_]+(?=: )/)?.[0] ?? check.message;
    const head = found.find(({ first, code: other }) => other === code
      || (first.state === "error" && code.startsWith(FOLLOWS[first.name] ?? " ")));
    if (head) head.also.push(check.name);
    else found.push({ first: check, code, also: [] });
    cause.set(check.name, (head ?? found[found.length - 1]).first.name);
  }
  return { found, cause };
}

function sentence({ first, also }) {
  const shards = also.filter((name) => name.startsWith("shard "));
  const names = also.filter((name) => !name.startsWith("shard "));
  if (shards.length > 2) names.push(`${shards.length} shards`);
  else names.push(...shards);
  return `${first.name}: ${message(first.message || first.state)}`
    + (names.length ? ` (so also ${names.join(", ")})` : "");
}

// Rows that are held, or were passed over, though nothing fails.
function oddRows({ lag, counters }) {
  const ahead = lag.ahead_rows, lines = [];
  if (ahead) lines.push(`${whole.format(ahead)}${ahead >= MOST_COUNTED_AHEAD ? " or more" : ""} rows lie in the `
    + `future and are held until their time has come; the newest is ${duration(lag.ahead_seconds)} ahead`);
  if (counters.rows_in_past) lines.push(`${whole.format(counters.rows_in_past)} rows were committed with times `
    + "older than what had been read, since the start");
  if (counters.without_identity) lines.push(`${whole.format(counters.without_identity)} rows have no aggregate or `
    + "no version and were passed over, since the start");
  return lines.join("\n");
}

function show(status) {
  const [word, kind, beside] = standing(status);
  const { found, cause } = causes(status.checks);
  document.title = `${status.app}: ${word} – eventpub`;
  say("app", visible(status.app));
  say("table", visible(status.table));
  say("topic", visible(status.topic));
  say("gaps-topic", `${visible(status.topic)}.gaps`);
  mark(word, kind);
  say("ready", beside);
  say("wrong", word === "starting" ? "" : found.map(sentence).join("\n"));
  say("odd-rows", oddRows(status));
  say("lag", duration(status.lag.seconds));
  const { events } = status.lag;
  say("lag-events", events === null ? "events: not known" : `${whole.format(events)} event${events === 1 ? "" : "s"}`);
  say("published", `${whole.format(status.counters.published)} since the start`);
  for (const [id, count] of Object.entries({ holds: status.holds_open, late: status.counters.late })) {
    say(id, whole.format(count));
    $(id).classList.toggle("bad", count > 0 && id !== "holds");
  }
  fill("checks", status.checks.map((check) => ({
    key: check.name,
    cells: [
      short(check.name), { text: check.state, kind: check.state }, short(age(status.at - check.since)),
      short(check.last_ok === null ? "–" : `${age(status.at - check.last_ok)} ago`),
      [undefined, check.name].includes(cause.get(check.name)) ? message(check.message)
        : `follows from ${cause.get(check.name)}`,
    ],
  })));
  fill("shards", status.shards.map((shard) => ({ key: String(shard.shard), cells: shardCells(shard, status.at) })));
  $("last-error").hidden = !status.last_error;
  say("last-error", status.last_error ? `Last error waited out: ${message(status.last_error)}` : "");
  pairs("counters", status.counters);
  say("run", `eventpub ${status.version}, process ${status.pid} on ${visible(status.host)}, `
    + `for ${age(status.at - status.started_at)}; database clock ${position(status.database_time)}`);
  $("pause").textContent = status.is_paused ? "Resume" : "Pause";
  $("pause").disabled = false;
}

const short = (text) => ({ text, kind: "short" });

function shardCells(shard, now) {
  const error = shard.last_error;
  const met = error ? `${age(now - error.at)} ago, ${error.code}: ${error.message}` : "";
  return [
    short(String(shard.shard)), visible(shard.where || (shard.is_running ? "–" : "starting")),
    short(position(shard.position)), short(duration(shard.lag_seconds)),
    short(whole.format(shard.holds)), short(whole.format(shard.published)),
    short(shard.index_bytes === null ? "–" : bytes(shard.index_bytes)), message(met),
  ];
}

function mark(text, kind) {
  say("state", text);
  $("state").className = `mark ${kind}`;
}

function showGaps(found, now) {
  const more = found.open_count - found.open.length;
  const shown = more > 0 ? `The oldest ${found.open.length} of ${whole.format(found.open_count)}.` : "";
  say("gaps-note", found.open_count ? shown : "None: nothing waits for a missing version.");
  $("gaps").hidden = !found.open_count;
  fill("gaps", found.open.map((hold) => ({
    key: hold.aggregate_id,
    cells: [
      { text: visible(hold.aggregate_id), kind: "id" },
      hold.catching_up ? "none: many events wait" : String(hold.first_missing), String(hold.seen),
      short(age((now - hold.first_seen) / 1e6)), short(String(hold.attempts)),
      short(hold.next_attempt > now + 5e5 ? `in ${age((hold.next_attempt - now) / 1e6)}` : "now"),
    ],
  })), gapButtons);
  holds = new Map(found.open.map((hold) => [hold.aggregate_id, hold]));
  for (const row of $("gaps").tBodies[0].rows) {
    const cannot = holds.get(row.dataset.key).catching_up; // where nothing is missing
    row.querySelectorAll("button").forEach((button) => { button.hidden = cannot; });
  }
}

const key = (...parts) => JSON.stringify(parts);

function showRecorded(found) {
  const { skipped, dead } = found;
  const missing = skipped.filter((skip) => skip.still_missing).length;
  const open = dead.filter((letter) => letter.published === null);
  const known = open.filter((letter) => letter.is_searched).length;
  tile("skipped", found.skipped_count, skipped.length, missing, "still missing", last.counters.gaps_skipped);
  tile("dead", found.dead_rows, dead.length, open.length,
    known === open.length ? "not published" : "not known to be published", last.counters.dead);
  say("recorded-note", skipped.length + dead.length ? "The newest of each. " : "None.");
  $("skips").hidden = !skipped.length;
  $("letters").hidden = !dead.length;
  fill("skips", skipped.map((skip) => ({
    key: key(skip.aggregate_id, skip.from_version, skip.skipped_at),
    cells: [
      { text: visible(skip.aggregate_id), kind: "id" },
      skip.from_version === skip.to_version ? `${skip.from_version}` : `${skip.from_version} to ${skip.to_version}`,
      short(when(skip.skipped_at)), message(skip.reason),
      skip.still_missing ? { text: "still missing", kind: "error" } : { text: "no longer missing", kind: "ok" },
    ],
  })), (cell, row) => traceButton(cell, JSON.parse(row.dataset.key)[0], null));
  fill("letters", dead.map((letter) => ({
    key: key(letter.aggregate_id, letter.version, letter.partition, letter.offset),
    cells: [
      { text: letter.aggregate_id === null ? "–" : visible(letter.aggregate_id), kind: "id" },
      String(letter.version ?? "–"), short(when(letter.created)), message(letter.reason),
      letter.published !== null ? { text: "published since", kind: "ok" }
        : { text: letter.is_searched ? "not published" : "not known", kind: "error" },
    ],
  })), (cell, row) => traceButton(cell, ...JSON.parse(row.dataset.key).slice(0, 2)));
}

function tile(id, count, listed, open, words, sinceStart) {
  const of = count > listed ? ` of the newest ${listed}` : "";
  say(id, whole.format(count));
  say(`${id}-also`, count ? `${whole.format(open)}${of} ${words}; ${whole.format(sinceStart)} since the start` : "on record");
  $(id).classList.toggle("bad", open > 0);
}

// RFC 3339 to the second.
const when = (text) => `${text.slice(0, 10)} ${text.slice(11, 19)} UTC`;

function traceButton(cell, id, version) {
  cell.className = "buttons-cell";
  if (id === null || id === "") return;
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Trace";
  button.disabled = isOff;
  button.setAttribute("aria-label", `Trace ${visible(id)}`);
  button.addEventListener("click", () => {
    $("trace-id").value = id;
    $("trace-version").value = version ?? "";
    $("trace").requestSubmit();
  });
  cell.append(button);
}

const VERDICTS = { published: "ok", late: "ok", baseline: "ok", waiting: "warn", held: "warn", skipped: "warn" };

function showTrace(found) {
  say("trace-note", [visible(found.summary), ...found.notes.map(visible)].join("\n"));
  $("traced").hidden = !found.versions.length;
  fill("traced", found.versions.map(({ version, verdict, stored, records, note }) => ({
    key: String(version),
    cells: [
      short(String(version)), { text: verdict, kind: VERDICTS[verdict] ?? "error" },
      short(stored === null ? "not in the table" : stored.create_time === null ? "no time" : when(stored.create_time)),
      stored === null ? "–" : visible(stored.event_type),
      short(stored === null || stored.payload_bytes === null ? "–" : bytes(stored.payload_bytes)),
      records.map((r) => `${visible(r.topic)}[${r.partition}] offset ${r.offset}`).join(", ") || "–",
      message(note),
    ],
  })));
}

function gapButtons(cell, row) {
  cell.className = "buttons-cell";
  for (const [word, act] of [["Retry", retry], ["Skip", skip]]) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = word;
    button.disabled = isOff;
    button.setAttribute("aria-label", `${word} ${visible(row.dataset.key)}`);
    button.addEventListener("click", () => act(row.dataset.key, button));
    cell.append(button);
  }
}

// -- asking ----------------------------------------------------------------------------------------

let last = null, heardAt = null, silentSince = null, holds = new Map(), isOff = false;
let clockOfDatabase = { at: 0, seen: 0 };

async function ask(path, options = {}) {
  const isSlow = options.method || path === "recorded";
  const signal = AbortSignal.timeout(isSlow ? ACTION_WITHIN : ANSWER_WITHIN);
  const answer = await fetch(path, { cache: "no-store", signal, ...options });
  const data = await answer.json().catch(() => ({ error: "the answer is not JSON" }));
  return { code: answer.status, data };
}

async function page(path) {
  const { code, data } = await ask(path);
  if (code !== 200) throw new Error(data.error ?? `status ${code}`);
  return data;
}

async function watchStatus() {
  try {
    if (!document.hidden || heardAt === null) {
      const isBack = heardAt === null || Date.now() / 1000 - heardAt > 3 * BIN;
      if (isBack) await loadHistory();
      took(await page("status"));
    }
  } catch (error) {
    silent(error);
  }
  setTimeout(watchStatus, STATUS_EVERY);
}

function took(status) {
  last = status;
  heardAt = Date.now() / 1000;
  silentSince = null;
  const since = (status.poll_age_seconds ?? 0) * 1e6; // the database's time is that of the last poll
  clockOfDatabase = { at: status.database_time + since, seen: performance.now() };
  document.body.classList.remove("silent");
  samples.push(sampleOf(status));
  while (samples[0].at < status.at - MINUTES * 60 - BIN) samples.shift();
  show(status);
  const rate = rateNow();
  say("rate", rate === null || status.rates.published === null ? "–" : `${number(rate)}/s`);
  draw();
}

function silent(error) {
  const now = Date.now() / 1000;
  silentSince ??= heardAt ?? now;
  document.body.classList.add("silent");
  document.title = "no answer – eventpub";
  mark("no answer", "error");
  say("ready", `since ${clock(silentSince)}`);
  const why = error.name === "TimeoutError" ? "does not answer in time: it is frozen, or very slow"
    : "does not answer: it has ended, or cannot be reached";
  const before = last ? causes(last.checks).found.map(sentence).join("\n") : "";
  say("wrong", `The publisher ${why}. Run eventpub status on its machine. The rest of this page is from before.`
    + (before ? `\nLast known: ${before}` : ""));
  for (const id of ["lag", "rate"]) say(id, "–");
  say("lag-events", "not known");
  $("pause").disabled = true;
}

let listed = { count: null, at: -Infinity };

// Soon after one was opened or closed, else seldom.
async function watchGaps() {
  const count = last?.holds_open, now = Date.now();
  if (!document.hidden && (count !== listed.count || now - listed.at > GAPS_EVERY)) {
    listed = { count, at: now };
    try {
      await loadGaps();
    } catch (error) {
      say("gaps-note", `Not known: ${visible(error.message)}`);
    }
  }
  setTimeout(watchGaps, STATUS_EVERY / 2);
}

async function loadGaps() {
  const found = await page("gaps");
  if (last === null) took(await page("status"));
  showGaps(found, clockOfDatabase.at + (performance.now() - clockOfDatabase.seen) * 1000);
}

let recorded = { what: "", until: 0, at: -Infinity };

// Soon after something was skipped or refused, else seldom; the publisher makes the list at most so often.
async function watchRecorded() {
  const now = Date.now(), { gaps_skipped, late, dead } = last?.counters ?? {};
  const what = key(gaps_skipped, late, dead, last?.started_at);
  if (what !== recorded.what) recorded = { ...recorded, what, until: now + RECORDED_EVERY };
  if (last && !document.hidden && (now < recorded.until || now - recorded.at > RECORDED_EVERY)) {
    recorded.at = now;
    try {
      showRecorded(await page("recorded"));
    } catch (error) {
      say("recorded-note", `Not known: ${visible(error.message)}`);
    }
  }
  setTimeout(watchRecorded, last ? GAPS_EVERY / 2 : STATUS_EVERY / 4);
}

async function loadConfig() {
  try {
    const found = await page("config");
    pairs("config", found);
    isOff = !found["ops.token"];
    $("off").hidden = !isOff;
    $("pause").hidden = isOff;
    document.querySelectorAll("main button").forEach((button) => { button.disabled = isOff; });
  } catch {
    setTimeout(loadConfig, GAPS_EVERY);
  }
}

// -- acting ----------------------------------------------------------------------------------------

let token = "";

function asked(dialog) {
  return new Promise((resolve) => {
    dialog.returnValue = "cancel";
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "ok"), { once: true });
    dialog.showModal();
  });
}

async function withToken(why = "") {
  if (token) return true;
  const usual = $("token-why").dataset.usual ??= $("token-why").textContent;
  say("token-why", why || usual);
  const given = await asked($("ask-token"));
  token = given ? $("token").value : "";
  $("token").value = "";
  return token !== "";
}

// The answer to who has the token; null: it was not given.
async function answered(what, path, method, why = "") {
  if (!await withToken(why)) return null;
  outcome(`${what}: asked`, "");
  // a header holds no character beyond Latin-1: such a token cannot be the one
  const found = await ask(path, { method, headers: { Authorization: `Bearer ${token}` } });
  if (found.code !== 401) return found;
  token = "";
  outcome(`${what}: ${found.data.error}`, "error");
  return answered(what, path, method, "That was not the value of ops.token.");
}

async function trying(what, button, work) {
  button.disabled = true;
  try {
    await work();
  } catch (error) {
    if (error instanceof TypeError && /header|ISO-8859|Latin/i.test(error.message)) token = "";
    outcome(`${what}: ${visible(error.message)}`, "error");
  } finally {
    button.disabled = false;
    button.focus();
  }
}

const failed = (what, data) =>
  outcome(`${what}: ${visible(data.error ?? "the publisher has not answered in time")}`, "error");

const CHANGED = "not done: more is missing by now than was shown";

async function post(what, path) {
  const found = await answered(what, path, "POST");
  if (found === null) return;
  if (found.code !== 200) failed(what, found.data);
  else if (found.data.outcome === "changed") outcome(`${what}: ${CHANGED}`, "error");
  else outcome(`${what}: ${visible(found.data.outcome ?? "done")}`, "ok");
  took(await page("status"));
  await loadGaps();
}

const act = (what, path, button) => trying(what, button, () => post(what, path));

const retry = (id, button) =>
  act(`Retry of ${visible(id)}`, `retry?${new URLSearchParams({ aggregate_id: id })}`, button);

const skip = (id, button) => trying(`Skip of ${visible(id)}`, button, async () => {
  const what = `Skip of ${visible(id)}`;
  const found = await answered(what, `gap?${new URLSearchParams({ aggregate_id: id })}`, "GET");
  if (found === null) return;
  if (found.code !== 200) { failed(what, found.data); return; }
  const { from_version: first, to_version: final } = found.data;
  if (first === null) {
    outcome(`${what}: nothing is missing any more`, "");
    await loadGaps();
    return;
  }
  $("outcome").hidden = true;
  const versions = first === final ? `version ${first}`
    : `versions ${first} to ${final} (${whole.format(final - first + 1)})`;
  say("skip-what", `${visible(id)}: ${versions} will not be waited for any longer.`);
  if (!await asked($("ask-skip"))) return;
  const given = new URLSearchParams({ aggregate_id: id, from_version: first, to_version: final });
  await post(`${what}, ${versions}`, `skip?${given}`);
});

$("trace").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = $("trace-id").value, version = $("trace-version").value;
  trying("Trace", $("trace-go"), async () => {
    let found = await traceOf(id, version);
    const both = id.match(/^(.+)\/(\d+)$/);
    if (found?.code === 200 && !found.data.versions.length && both && !version) found = await traceOf(both[1], both[2]);
    if (found === null) return;
    $("outcome").hidden = true;
    if (found.code === 200) showTrace(found.data);
    else failed("Trace", found.data);
  });
});

const traceOf = (id, version) =>
  answered("Trace", `trace?${new URLSearchParams({ aggregate_id: id, version })}`, "GET");

document.querySelectorAll("dialog .cancel").forEach((button) => {
  button.addEventListener("click", () => button.closest("dialog").close("cancel"));
});
$("pause").addEventListener("click", (event) => {
  const word = last.is_paused ? "Resume" : "Pause";
  act(word, word.toLowerCase(), event.currentTarget);
});

// -- the last 15 minutes ---------------------------------------------------------------------------

let samples = [];

// As `sample` of eventpub/ops/http.py.
function sampleOf(status) {
  const sum = (counts) => counts.reduce((a, b) => a + b, 0);
  const steps = Object.entries(status.steps).map(([step, s]) => [step, [s.sum, sum(s.counts)]]);
  return {
    at: status.at, published: status.counters.published, lag_seconds: status.lag.seconds,
    latency: status.latency.counts, steps: Object.fromEntries(steps),
  };
}

async function loadHistory() {
  const found = await page("history");
  const before = found.length ? samples.filter((s) => s.at < found[0].at) : samples;
  samples = before.concat(found);
}

function rateNow() {
  const now = samples[samples.length - 1];
  const before = samples.findLast((s) => s.at <= now.at - BIN);
  if (before === undefined || now.at - before.at > 4 * BIN) return null;
  const published = now.published - before.published;
  return published < 0 ? null : published / (now.at - before.at);
}

// One point for each full 5 s. Totals that fall, or are missing for a while, end a line.
function points(bounds) {
  const bins = [];
  for (const s of samples) {
    const bin = Math.floor(s.at / BIN), open = bins[bins.length - 1];
    if (open?.bin === bin) Object.assign(open, { last: s, lag: Math.max(open.lag, s.lag_seconds) });
    else bins.push({ bin, last: s, lag: s.lag_seconds });
  }
  bins.pop();
  let begin = 0;
  return bins.map((bin, n) => {
    const now = bin.last, before = bins[n - 1]?.last;
    if (!before || now.at - before.at > 3 * BIN || now.published < before.published) begin = n;
    const point = { at: now.at, begins: begin === n, lag: bin.lag, rate: null, p50: null, p99: null, steps: null };
    if (begin === n) return point;
    point.rate = (now.published - before.published) / (now.at - before.at);
    const base = bins[Math.max(n - 3, begin)].last;
    const counts = now.latency.map((count, b) => count - base.latency[b]);
    Object.assign(point, { p50: quantile(counts, bounds, 0.5), p99: quantile(counts, bounds, 0.99) });
    point.steps = stepsOf(now.steps, base.steps);
    return point;
  });
}

// Between the bounds of its bucket; of a wide bucket only these are known: it is not below `at`.
function quantile(counts, bounds, share) {
  const rank = share * counts.reduce((a, b) => a + b, 0);
  if (!rank) return null;
  let below = 0, low = 0;
  for (const [n, bound] of [...bounds, Infinity].entries()) {
    if (counts[n] && below + counts[n] >= rank) {
      if (low >= 1 && bound > 2 * low) {
        return { at: low, words: bound < Infinity ? `${duration(low)} to ${duration(bound)}` : `> ${duration(low)}` };
      }
      return { at: low + (bound - low) * (rank - below) / counts[n] };
    }
    below += counts[n];
    low = bound;
  }
  return null;
}

// Seconds of a transaction by step, on average over those that have published.
function stepsOf(now, before) {
  const found = Object.fromEntries([...STEPS, "other", "read"].map((step) => [step, 0]));
  const count = (now.publish?.[1] ?? 0) - (before.publish?.[1] ?? 0);
  if (count <= 0) return null;
  for (const [step, [sum]] of Object.entries(now)) {
    found[step in found ? step : "other"] += (sum - (before[step]?.[0] ?? 0)) / count;
  }
  return found;
}

const CHARTS = [
  { title: "Rate", least: 1, unit: (v) => `${number(v)}/s`, lines: [["events", (p) => p.rate]] },
  { title: "Lag", least: 1, unit: duration, lines: [["oldest event not published", (p) => p.lag]] },
  {
    title: "Latency", least: 1, unit: duration,
    lines: ["p50", "p99"].map((name) => [name, (p) => p[name]?.at ?? null, (p) => p[name]?.words]),
  },
  {
    title: "Time of a transaction", least: 0.01, unit: duration, isStacked: true,
    lines: [
      ...[...STEPS, "other"].map((step) => [step, (p) => p.steps?.[step] ?? null]),
      ["wait for rows", (p) => p.steps?.read ?? null],
    ],
  },
];
// Of a vertical axis of durations: one unit for all of its ticks.
const UNITS = [[7200, 3600, " h"], [120, 60, " min"], [1, 1, " s"], [0, 1e-3, " ms"]];
const HEIGHT = 170, LEFT = 58, BELOW = 22, ABOVE = 8;
let cursor = null;

function beginCharts() {
  if (typeof d3 === "undefined") {
    $("no-charts").hidden = false;
    $("charts").hidden = true;
    return;
  }
  for (const chart of CHARTS) {
    const figure = d3.select("#charts").append("figure");
    const caption = figure.append("figcaption");
    caption.append("b").text(chart.title);
    chart.keys = chart.lines.map((line, n) => {
      const key = caption.append("span").attr("class", `key k${n}`).append("span");
      return key.text(line[0]);
    });
    chart.svg = figure.append("svg").attr("role", "img");
    chart.y = chart.svg.append("g");
    chart.x = chart.svg.append("g");
    chart.marks = chart.lines.map((_, n) => chart.svg.append("path")
      .attr("class", `${chart.isStacked ? "area" : "line"} k${n}`));
    chart.cursor = chart.svg.append("line").attr("class", "cursor").attr("y1", ABOVE);
    chart.svg.on("pointermove", (event) => { cursor = d3.pointer(event)[0]; draw(); });
    chart.svg.on("pointerleave", () => { cursor = null; draw(); });
  }
  new ResizeObserver(() => draw()).observe($("charts"));
}

function draw() {
  if (typeof d3 === "undefined" || last === null) return;
  const found = points(last.latency.bounds);
  for (const chart of CHARTS) drawOne(chart, found);
}

function drawOne(chart, found) {
  const width = chart.svg.node().clientWidth, base = HEIGHT - BELOW;
  if (!width) return;
  const from = (last.at - MINUTES * 60) * 1000;
  const x = d3.scaleTime([from, last.at * 1000], [LEFT, width - 6]);
  const total = (p) => d3.sum(chart.lines, (line) => line[1](p));
  const highest = (p) => (chart.isStacked ? total(p) : d3.max(chart.lines, (line) => line[1](p)));
  const shown = found.filter((p) => p.at * 1000 >= from);
  const most = Math.max(d3.max(shown, highest) ?? 0, chart.least);
  const [, size, unit] = chart.unit === duration ? UNITS.find(([from]) => most >= from) : [0, 1, "/s"];
  const scale = d3.scaleLinear([0, most / size], [base, ABOVE]).nice(4), y = (v) => scale(v / size);
  const label = scale.tickFormat(4);
  const few = width < 420 ? 3 : 6;
  chart.x.attr("transform", `translate(0,${base})`)
    .call(d3.axisBottom(x).ticks(few).tickFormat(d3.timeFormat("%H:%M")).tickSizeOuter(0));
  chart.y.attr("transform", `translate(${LEFT},0)`)
    .call(d3.axisLeft(scale).ticks(4).tickFormat((v) => `${label(v)}${unit}`).tickSize(LEFT + 6 - width));
  const at = (p) => x(p.at * 1000);
  // where nothing was counted a line has a hole, between the points beside it
  const series = shown.flatMap((p) => (p.begins ? [null, p] : [p]));
  let below = () => 0;
  chart.lines.forEach(([, value], n) => {
    const floor = below, is = (p) => p !== null && value(p) !== null;
    const path = chart.isStacked
      ? d3.area().defined(is).x(at).y0((p) => y(floor(p))).y1((p) => y(floor(p) + value(p)))
      : d3.line().defined(is).x(at).y((p) => y(value(p)));
    chart.marks[n].attr("d", path(series));
    if (chart.isStacked) below = (p) => floor(p) + value(p);
  });
  const nearest = cursor === null ? shown[shown.length - 1]
    : d3.least(shown, (p) => Math.abs(at(p) - cursor));
  const pointed = cursor !== null && nearest !== undefined;
  chart.cursor.attr("visibility", pointed ? "visible" : "hidden").attr("y2", base)
    .attr("x1", pointed ? at(nearest) : 0).attr("x2", pointed ? at(nearest) : 0);
  const values = chart.lines.map(([name, value, words]) => {
    const known = nearest === undefined ? null : value(nearest);
    return `${name} ${known === null ? "–" : words?.(nearest) ?? chart.unit(known)}`;
  });
  chart.keys.forEach((key, n) => key.text(values[n]));
  chart.svg.attr("aria-label", `${chart.title}, the last ${MINUTES} minutes; now ${values.join(", ")}`);
}

beginCharts();
loadConfig();
watchStatus();
watchGaps();
watchRecorded();

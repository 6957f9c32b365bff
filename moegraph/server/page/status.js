// What the server does, looked at while the page is seen.

import { ask } from "./api.js";
import { $, element } from "./dom.js";

const LOOK_MS = 2000;
const WIDE = matchMedia("(min-width: 75rem)");
const MEMORY = [["device_peak", "Device memory, peak"], ["host_peak", "Host memory, peak"]];
let before = null;

// Calls onReady each time that the server becomes ready.
export function startStatus(onReady) {
  let wasReady = false;
  const look = async () => {
    if (!document.hidden) {
      const isReady = await lookAtHealth();
      if (isReady && !wasReady) onReady();
      wasReady = isReady;
      if (isReady && !$("status").hidden) await lookAtFigures();
    }
    setTimeout(look, LOOK_MS);
  };
  $("open-status").addEventListener("click", () => open($("status").hidden));
  open(WIDE.matches);
  look();
}

function open(isOpen) {
  $("status").hidden = !isOpen;
  $("open-status").setAttribute("aria-expanded", String(isOpen));
  if (isOpen) lookAtFigures();
}

async function lookAtHealth() {
  let trouble = "";
  try {
    await ask("health", { quiet: true });
  } catch (error) {
    trouble = error.message;
  }
  if ($("condition").textContent !== trouble) $("condition").textContent = trouble;
  return trouble === "";
}

async function lookAtFigures() {
  try {
    const [slots, metrics] = await Promise.all([
      ask("slots", { quiet: true }), ask("metrics?peek", { quiet: true }),
    ]);
    showSlots(await slots.json());
    const now = { at: performance.now() / 1000, values: figures(await metrics.text()) };
    showExperts(now, before ?? now);
    showServer(now, before ?? now);
    before = now;
  } catch {
    // the condition tells why, and a missing key was asked for
  }
}

// Returns the values of Prometheus' text by name; labels are part of a name.
function figures(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const at = line.lastIndexOf(" ");
    if (at > 0 && !line.startsWith("#")) found.set(line.slice(0, at), Number(line.slice(at + 1)));
  }
  return found;
}

function showSlots(slots) {
  const list = $("slots");
  if (!slots.length) return list.replaceChildren(element("li", {}, "The model is not in memory."));
  if (!list.querySelector("progress")) list.replaceChildren();
  while (list.children.length > slots.length) list.lastChild.remove();
  while (list.children.length < slots.length) {
    list.append(element("li", {}, element("span"), element("progress", { max: 1 })));
  }
  return slots.forEach((slot, i) => showSlot(list.children[i], slot));
}

function showSlot(item, slot) {
  const [words, bar] = item.children;
  const { n_ctx: room, n_prompt_tokens: total = 0 } = slot;
  const read = (slot.n_prompt_tokens_cache ?? 0) + (slot.n_prompt_tokens_processed ?? 0);
  const written = slot.next_token?.[0].n_decoded ?? 0;
  const isReading = slot.state === "reading";
  words.textContent = `${slot.id}: ${{
    reading: `reading ${read} of ${total} tokens`,
    answering: `answering, ${written} tokens`,
  }[slot.state] ?? slot.state}`;
  item.className = slot.state;
  const used = (read + written) / Math.max(1, room);
  bar.value = isReading ? read / Math.max(1, total) : used;
  bar.setAttribute("aria-label", isReading ? "Prompt read" : "Context used");
}

// Returns functions of a figure: its value, and how much it grew since the last look.
function readers(now, then) {
  const value = (name) => now.values.get(name) ?? 0;
  const grown = (name) => Math.max(0, value(name) - (then.values.get(name) ?? 0));
  const seconds = Math.max(now.at - then.at, 0.001);
  return { value, grown, rate: (name) => grown(name) / seconds };
}

function showExperts(now, then) {
  const { value, grown, rate } = readers(now, then);
  if (!now.values.has("moegraph_expert_hits_total")) {
    return showPairs($("experts"), [["Not in use", "all experts are in memory"]]);
  }
  const hits = grown("moegraph_expert_hits_total");
  const chosen = hits + grown("moegraph_expert_misses_total");
  const all = value("moegraph_expert_hits_total") + value("moegraph_expert_misses_total");
  return showPairs($("experts"), [
    ["Found on the device, now", chosen ? percent(hits / chosen) : "–"],
    ["Found on the device, so far", all ? percent(value("moegraph_expert_hits_total") / all) : "–"],
    ["Sent to the device, now", `${bytes(rate("moegraph_expert_upload_bytes_total"))}/s`],
    ["Sent to the device, so far", bytes(value("moegraph_expert_upload_bytes_total"))],
    ["Replaced so far", count(value("moegraph_expert_evictions_total"))],
    ["Computed on the CPU", count(value("moegraph_expert_cpu_total"))],
  ]);
}

function showServer(now, then) {
  const { value, rate } = readers(now, then);
  const looked = value("vllm:prefix_cache_queries_total");
  const drafted = value("vllm:spec_decode_num_draft_tokens_total");
  const accepted = value("vllm:spec_decode_num_accepted_tokens_total");
  const kept = value("moegraph_prefix_bytes");
  const pairs = [
    ["Speed, all clients", `${rate("llamacpp:tokens_predicted_total").toFixed(1)} tokens/s`],
    ["Requests that wait", count(value("llamacpp:requests_deferred"))],
    ["Context in use", percent(value("vllm:kv_cache_usage_perc"))],
    ["Prompts kept", `${count(value("moegraph_prefix_places"))} (${bytes(kept)})`],
    ["Prompt tokens reused", looked ? percent(value("vllm:prefix_cache_hits_total") / looked) : "–"],
  ];
  if (drafted) pairs.push(["Drafts accepted", percent(accepted / drafted)]);
  for (const [use, name] of MEMORY) {
    const used = value(`moegraph_memory_bytes{use="${use}"}`);
    if (used) pairs.push([name, bytes(used)]);
  }
  showPairs($("server"), pairs);
}

// Writes pairs into a list of descriptions; only texts that changed are touched.
function showPairs(list, pairs) {
  while (list.children.length > 2 * pairs.length) list.lastChild.remove();
  while (list.children.length < 2 * pairs.length) list.append(element("dt"), element("dd"));
  pairs.flat().forEach((text, i) => {
    if (list.children[i].textContent !== text) list.children[i].textContent = text;
  });
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;
const count = (n) => n.toLocaleString("en");

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = n < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(n) / 10));
  return `${(n / 1024 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}

// The dialog with settings: an empty field leaves what the server was started with.

import { $ } from "./dom.js";

const NUMBERS = ["temperature", "top_k", "top_p", "min_p", "max_tokens", "seed"];
const FIELDS = ["system", ...NUMBERS];
const STORED = "moegraph.settings";

// Returns the fields of a request that the user has set.
export function chosenSettings() {
  const set = NUMBERS.filter((name) => $(name).value !== "");
  return Object.fromEntries(set.map((name) => [name, $(name).valueAsNumber]));
}

export function systemPrompt() {
  return $("system").value.trim();
}

// Shows the server's settings in grey. params: of /props.
export function showDefaults(params) {
  for (const name of NUMBERS) {
    const value = name === "max_tokens" ? params.n_predict : params[name];
    $(name).placeholder = shown(name, value);
  }
}

function shown(name, value) {
  if (value < 0) return { max_tokens: "no limit", seed: "random" }[name] ?? "off";
  // a number such as 0.95 that went through 32 bits
  return String(Number(value.toPrecision(6)));
}

function store() {
  const values = FIELDS.map((name) => [name, $(name).value]);
  sessionStorage.setItem(STORED, JSON.stringify(Object.fromEntries(values)));
  const isOurs = values.some(([, value]) => value !== "");
  $("open-settings").classList.toggle("changed", isOurs);
}

export function startSettings() {
  const stored = JSON.parse(sessionStorage.getItem(STORED) ?? "{}");
  for (const name of FIELDS) $(name).value = stored[name] ?? "";
  store();
  $("open-settings").addEventListener("click", () => $("settings").showModal());
  $("clear-settings").addEventListener("click", () => {
    for (const name of FIELDS) $(name).value = "";
    $("system").focus();
  });
  $("settings").addEventListener("close", () => {
    // Escape closes the dialog without a check
    for (const name of NUMBERS) if (!$(name).validity.valid) $(name).value = "";
    store();
  });
}

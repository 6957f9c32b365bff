// The dialog with settings: an empty field leaves what the server was started with.

import { $, element } from "./dom.js";
import { ofTab } from "./texts.js";

const NUMBERS = ["temperature", "top_k", "top_p", "min_p", "max_tokens", "seed"];
const FIELDS = ["model", "system", ...NUMBERS];
// Of this tab: a new conversation begins with what was set last.
const STORED = "moegraph.settings";

// Returns the fields of a request that the user has set.
export function chosenSettings() {
  const set = NUMBERS.filter((name) => $(name).value !== "");
  const found = Object.fromEntries(set.map((name) => [name, $(name).valueAsNumber]));
  if ($("model-name").value) found.model = $("model-name").value;
  return found;
}

export function systemPrompt() {
  return $("system").value.trim();
}

const field = (name) => $(name === "model" ? "model-name" : name);

// Returns all fields as texts.
export function settings() {
  return Object.fromEntries(FIELDS.map((name) => [name, field(name).value]));
}

// Returns what is known of settings that a file or the browser has kept.
export function knownSettings(given) {
  const text = (name) => (typeof given?.[name] === "string" ? given[name] : "");
  return Object.fromEntries(FIELDS.map((name) => [name, text(name)]));
}

export function showSettings(given) {
  const known = knownSettings(given);
  const isListed = [...field("model").options].some(({ value }) => value === known.model);
  // perhaps the server's models are not known yet; if it lacks this one, it will say so
  if (!isListed) field("model").append(element("option", {}, known.model));
  for (const name of FIELDS) field(name).value = known[name];
  markChanged();
}

// Shows the server's settings in grey. params: of /props.
export function showDefaults(params) {
  for (const name of NUMBERS) {
    const value = name === "max_tokens" ? params.n_predict : params[name];
    $(name).placeholder = shown(name, value);
  }
}

// Takes the names of the server's models; there is a choice between several ones.
export function showModels(names) {
  const chosen = field("model").value;
  field("model").replaceChildren(
    element("option", { value: "" }, "The server's first"),
    ...names.map((name) => element("option", { value: name }, name)),
  );
  field("model").value = names.includes(chosen) ? chosen : "";
  $("model-row").hidden = names.length < 2;
}

function shown(name, value) {
  if (value < 0) return { max_tokens: "no limit", seed: "random" }[name] ?? "off";
  // a number such as 0.95 that went through 32 bits
  return String(Number(value.toPrecision(6)));
}

function markChanged() {
  const isOurs = FIELDS.some((name) => field(name).value !== "");
  $("open-settings").classList.toggle("changed", isOurs);
}

// onSet: called when the dialog is closed.
export function startSettings(onSet) {
  showSettings(JSON.parse(ofTab.get(STORED) ?? "{}"));
  $("open-settings").addEventListener("click", () => $("settings").showModal());
  $("clear-settings").addEventListener("click", () => {
    for (const name of FIELDS) field(name).value = "";
    $("system").focus();
  });
  $("settings").addEventListener("close", () => {
    // Escape closes the dialog without a check
    for (const name of NUMBERS) if (!$(name).validity.valid) $(name).value = "";
    markChanged();
    ofTab.set(STORED, JSON.stringify(settings()));
    onSet();
  });
}

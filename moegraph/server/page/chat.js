// The page: the form that asks, the answers as they are written, and what belongs together.

import { ask, events, onKeyNeeded } from "./api.js";
import { startConversations } from "./conversations.js";
import { startDialog } from "./dialog.js";
import { $, say } from "./dom.js";
import { askForKey, startKeyDialog } from "./key.js";
import { UNFINISHED } from "./message.js";
import { allowPictures, attachOnly, hasPictures, startPictures, takePictures } from "./pictures.js";
import {
  chosenSettings, settings, showDefaults, showModels, showSettings, startSettings, systemPrompt,
} from "./settings.js";
import { startStatus } from "./status.js";
import * as store from "./store.js";
import { Talk } from "./talk.js";

// Pixels from the end within which the view follows what is written.
const NEAR = 80;
// An answer is kept that often while it is written.
const KEEP_MS = 1000;
const STREAM = {
  stream: true,
  stream_options: { include_usage: true },
  return_progress: true,
  timings_per_token: true,
};

const talk = new Talk({ edit: startEditing, again: tryAgain, drawn: follow });
let list = null;
let stopper = null;
// The question that is edited, or null; and what the form had before.
let edited = null;
let draft = null;
// How often a conversation was opened: of two that are read, the later one is shown.
let opened = 0;
// Another tab changed something while an answer was written.
let hasMissed = false;

function history(question) {
  const system = systemPrompt();
  const found = system ? [{ role: "system", content: system }] : [];
  for (const message of talk.tree.path(question.id)) {
    if (message.role === "user") found.push({ role: "user", content: parts(message) });
    else if (message.content || message.reasoning) {
      const said = { role: "assistant", content: message.content };
      if (message.reasoning) said.reasoning_content = message.reasoning;
      found.push(said);
    }
  }
  return found;
}

function parts({ content, pictures = [] }) {
  if (!pictures.length) return content;
  const shown = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return content ? [...shown, { type: "text", text: content }] : shown;
}

async function answer(question) {
  stopper = new AbortController();
  // "Try again" has the focus, and goes with its answer
  showBusy(true);
  const fields = { content: "", reasoning: "", note: UNFINISHED, figures: "", thought: 0 };
  const message = talk.add(question.id, "assistant", fields);
  const view = talk.view(message.id);
  view.wait();
  $("messages").scrollTop = $("messages").scrollHeight;
  list.show();
  const keeper = setInterval(() => store.putMessage({ ...message }, true), KEEP_MS);
  const why = await stream(view, history(question), stopper.signal);
  clearInterval(keeper);
  view.finish(why);
  await store.putMessage({ ...message });
  stopper = null;
  showBusy(false);
  say(why || "The answer is complete.");
  list.show();
  if (hasMissed) heard();
}

// Returns what the user should know of the end.
async function stream(view, messages, signal) {
  const body = { ...chosenSettings(), messages, ...STREAM };
  try {
    const response = await ask("v1/chat/completions", { body, signal });
    for await (const event of events(response)) view.take(event);
  } catch (error) {
    if (error.name === "AbortError") return "stopped";
    showTrouble(error.message);
    return "no complete answer";
  }
  if (body.model && body.model !== $("model").textContent) showModel();
  return "";
}

function showBusy(isBusy) {
  const { activeElement: focused } = document;
  const hadFocus = [$("send"), $("stop")].includes(focused);
  const isAgain = focused.classList.contains("change");
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy;
  if (isBusy && isAgain) $("stop").focus();
  // meanwhile no other version can be shown
  $("messages").classList.toggle("busy", isBusy);
  if (hadFocus) $("prompt").focus();
  if (isBusy) {
    showTrouble("");
    say("The answer is being written.");
  }
}

function showTrouble(text) {
  $("trouble").textContent = text;
  $("trouble").hidden = !text;
}

// Keeps the end in view unless the user has scrolled away from it.
let isNearEnd = true;
function follow() {
  const box = $("messages");
  if (isNearEnd) box.scrollTop = box.scrollHeight;
}

function startEditing(message) {
  draft ??= { text: $("prompt").value, pictures: takePictures() };
  edited = message;
  $("editing").hidden = false;
  attachOnly(message.pictures ?? []);
  fill(message.content);
}

// What was being written before is there again.
function endEditing() {
  if (!edited) return;
  const { text, pictures } = draft;
  edited = draft = null;
  $("editing").hidden = true;
  attachOnly(pictures);
  fill(text);
}

function fill(text) {
  $("prompt").value = text;
  fit();
  $("prompt").focus();
}

// The field grows with its text; the style limits it.
function fit() {
  const area = $("prompt");
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
}

function submit() {
  const content = $("prompt").value.trim();
  if ((!content && !hasPictures()) || stopper) return;
  const parent = edited ? edited.parent : talk.leaf;
  const pictures = takePictures();
  if (edited) endEditing();
  else fill("");
  isNearEnd = true;
  answer(talk.add(parent, "user", { content, pictures }));
}

function tryAgain(message) {
  if (!stopper) answer(talk.tree.get(message.parent));
}

// Another conversation, or a new one if there is no id, takes the place of the open one.
async function open(id) {
  if (id !== null && id === talk.id) return;
  stopper?.abort();
  showTrouble("");
  endEditing();
  isNearEnd = true;
  const turn = ++opened;
  if (id !== null && await talk.open(id, () => turn === opened)) {
    if (talk.head) showSettings(talk.head.settings);
  } else if (turn === opened) talk.close();
  $("messages").scrollTop = $("messages").scrollHeight;
  list.show();
}

// Another tab changed a conversation, or all of them, or the place where they are.
async function heard(id) {
  list.show();
  hasMissed = stopper !== null;
  const own = talk.id;
  if (own === null || stopper || (id && id !== own)) return;
  if (await talk.open(own, () => talk.id === own && !stopper)) {
    if (talk.head && !$("settings").open) showSettings(talk.head.settings);
  } else if (store.isKeeping()) open(null);
  else talk.keepAgain();
}

function onKey(event) {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (stopper) stopper.abort();
    else if (edited) endEditing();
  }
}

function onPromptKey(event) {
  // while an input method composes a word, Enter is its own; Safari says so with a code only
  const isComposing = event.isComposing || event.keyCode === 229;
  if (event.key !== "Enter" || event.shiftKey || isComposing) return;
  event.preventDefault();
  submit();
}

async function showModel() {
  try {
    const [props, models] = await Promise.all([ask("props"), ask("v1/models")]);
    const found = await props.json();
    const name = found.model_alias;
    $("model").textContent = name;
    document.title = `${name} – moegraph`;
    showDefaults(found.default_generation_settings.params);
    allowPictures(found.modalities.vision);
    showModels((await models.json()).data.map((model) => model.id));
  } catch {
    // without a key there are no defaults to show; the first message asks for one again
  }
}

function startForm() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  $("prompt").addEventListener("keydown", onPromptKey);
  $("prompt").addEventListener("input", fit);
  $("messages").addEventListener("scroll", () => {
    const box = $("messages");
    isNearEnd = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR;
  });
  $("stop").addEventListener("click", () => stopper?.abort());
  $("keep").addEventListener("click", endEditing);
  $("new").addEventListener("click", () => {
    open(null);
    $("prompt").focus();
  });
  document.addEventListener("keydown", onKey);
}

async function start() {
  onKeyNeeded(askForKey);
  startKeyDialog();
  startDialog();
  startSettings(() => talk.change({ settings: settings() }));
  startPictures(showTrouble);
  startForm();
  const openBefore = store.openId();
  list = startConversations({ talk, open, reload: heard, showTrouble });
  // on a phone, focus would open the keyboard over the page
  if (matchMedia("(hover: hover)").matches) $("prompt").focus();
  startStatus(showModel);
  await store.openStore(heard, (error) => {
    showTrouble(`The conversation is not kept: ${error.message}`);
  });
  if (openBefore !== null && talk.id === null) await open(openBefore);
  else list.show();
}

start();

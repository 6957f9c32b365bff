// The conversation: what was asked and answered, and the form that goes on with it.

import { ask, events, onKeyNeeded } from "./api.js";
import { $, button, say } from "./dom.js";
import { askForKey, startKeyDialog } from "./key.js";
import { AnswerView, questionView } from "./message.js";
import { chosenSettings, showDefaults, startSettings, systemPrompt } from "./settings.js";
import { startStatus } from "./status.js";

// Pixels from the end within which the view follows what is written.
const NEAR = 80;
const STREAM = {
  stream: true,
  stream_options: { include_usage: true },
  return_progress: true,
  timings_per_token: true,
};

// Each has the text of a question, its view, and the view of its answer.
const turns = [];
let stopper = null;
let isEditing = false;
const editButton = button("Edit", startEditing);
const againButton = button("Try again", () => replaceLast(turns.at(-1).text));

function history() {
  const system = systemPrompt();
  const found = system ? [{ role: "system", content: system }] : [];
  for (const { text, answer } of turns) {
    found.push({ role: "user", content: text });
    if (!answer?.content && !answer?.reasoning) continue;
    const said = { role: "assistant", content: answer.content };
    if (answer.reasoning) said.reasoning_content = answer.reasoning;
    found.push(said);
  }
  return found;
}

async function begin(text) {
  const question = questionView(text);
  const turn = { text, question };
  turns.push(turn);
  const messages = history();
  turn.answer = new AnswerView(follow);
  $("empty").hidden = true;
  $("messages").append(question.element, turn.answer.element);
  question.bar.append(editButton);
  turn.answer.bar.prepend(againButton);
  $("messages").scrollTop = $("messages").scrollHeight;
  await write(turn.answer, messages);
}

async function write(answer, messages) {
  stopper = new AbortController();
  showBusy(true);
  const why = await stream(answer, messages, stopper.signal);
  answer.finish(why);
  stopper = null;
  showBusy(false);
  say(why || "The answer is complete.");
}

// Returns what the user should know of the end.
async function stream(answer, messages, signal) {
  const body = { ...chosenSettings(), messages, ...STREAM };
  try {
    const response = await ask("v1/chat/completions", { body, signal });
    for await (const event of events(response)) answer.take(event);
  } catch (error) {
    if (error.name === "AbortError") return "stopped";
    showTrouble(error.message);
    return "no complete answer";
  }
  return "";
}

function showBusy(isBusy) {
  const hadFocus = [$("send"), $("stop")].includes(document.activeElement);
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy;
  editButton.hidden = againButton.hidden = isBusy;
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

function dropLast() {
  const { question, answer } = turns.pop();
  question.element.remove();
  answer.element.remove();
}

function replaceLast(text) {
  dropLast();
  begin(text);
}

function startEditing() {
  isEditing = true;
  $("editing").hidden = false;
  fill(turns.at(-1).text);
}

function endEditing() {
  isEditing = false;
  $("editing").hidden = true;
  fill("");
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
  const text = $("prompt").value.trim();
  if (!text || stopper) return;
  const isReplacing = isEditing;
  endEditing();
  isNearEnd = true;
  if (isReplacing) replaceLast(text);
  else begin(text);
}

function startOver() {
  stopper?.abort();
  while (turns.length) dropLast();
  $("empty").hidden = false;
  showTrouble("");
  endEditing();
}

function onKey(event) {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (stopper) stopper.abort();
    else if (isEditing) endEditing();
  }
}

function onPromptKey(event) {
  // while an input method composes a word, Enter is its own
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
}

async function showModel() {
  try {
    const props = await (await ask("props")).json();
    $("model").textContent = props.model_alias;
    document.title = `${props.model_alias} – moegraph`;
    showDefaults(props.default_generation_settings.params);
  } catch {
    // without a key there are no defaults to show; the first message asks for one again
  }
}

function start() {
  onKeyNeeded(askForKey);
  startKeyDialog();
  startSettings();
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
  $("new").addEventListener("click", startOver);
  document.addEventListener("keydown", onKey);
  // on a phone, focus would open the keyboard over the page
  if (matchMedia("(hover: hover)").matches) $("prompt").focus();
  startStatus(showModel);
}

start();

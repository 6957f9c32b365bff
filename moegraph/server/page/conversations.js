// The panel with the conversations: search, names, export and import, and whether they are kept.

import { askUser } from "./dialog.js";
import { $, button, element, say } from "./dom.js";
import { fromText, toText } from "./file.js";
import * as store from "./store.js";

const WIDE = matchMedia("(min-width: 60rem)");
const SEARCH_MS = 150;
const AROUND = 30;
const SAVE_MS = 60_000;

// Returns {show}, which lists the conversations as they are now.
// talk: the open one. open(id): opens another one. reload(): shows what was imported into the open
// one. showTrouble(text): tells of an error.
export function startConversations(page) {
  const panel = new Panel(page);
  panel.start();
  return panel;
}

class Panel {
  constructor({ talk, open, reload, showTrouble }) {
    Object.assign(this, { talk, open, reload, showTrouble });
    // looks at the list that were begun
    this.asked = 0;
  }

  start() {
    const toggle = () => this.unfold($("conversations").hidden);
    $("open-conversations").addEventListener("click", toggle);
    this.unfold(WIDE.matches);
    let timer = 0;
    $("search").addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => this.show(), SEARCH_MS);
    });
    $("export-all").addEventListener("click", async () => this.save(await store.everything()));
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", () => this.load());
    $("keep-them").checked = store.isKeeping();
    $("keep-them").addEventListener("change", () => this.changeKeeping());
  }

  unfold(isOpen) {
    $("conversations").hidden = !isOpen;
    $("open-conversations").setAttribute("aria-expanded", String(isOpen));
  }

  async show() {
    $("keep-them").checked = store.isKeeping();
    const asked = ++this.asked;
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = words.length ? await search(words) : await store.conversations();
    // a later look may have been quicker
    if (asked !== this.asked) return;
    const before = document.activeElement.closest?.("#list li")?.dataset.id;
    $("list").replaceChildren(...found.map((one) => this.item(one)));
    if (before) this.focus(before);
    const none = words.length ? "Nothing is found." : "There are no conversations yet.";
    const n = found.length === 1 ? "1 conversation" : `${found.length} conversations`;
    $("found").textContent = found.length ? (words.length ? `${n} found` : "") : none;
  }

  focus(id) {
    const item = [...$("list").children].find((one) => one.dataset.id === id);
    (item?.querySelector("button") ?? $("search")).focus();
  }

  item({ id, title, excerpt }) {
    const choose = button(title, () => this.choose(id), { className: "title" });
    const made = element("li", {}, choose);
    made.dataset.id = id;
    if (excerpt) choose.append(element("span", { className: "note" }, excerpt));
    if (id !== this.talk.id) return made;
    choose.setAttribute("aria-current", "true");
    made.append(element("div", { className: "acts" },
      button("Rename", () => this.rename(id, title)),
      button("Export", () => this.saveOne(id)),
      button("Delete", () => this.remove(id, title))));
    return made;
  }

  async choose(id) {
    await this.open(id);
    if (!WIDE.matches) {
      this.unfold(false);
      $("open-conversations").focus();
    } else $("prompt").focus();
    say("The conversation is open.");
  }

  async rename(id, title) {
    const text = await askUser({ title: "Rename the conversation", act: "Rename", text: title });
    if (text === null) return;
    if (id === this.talk.id) this.talk.change({ title: text });
    else await store.changeConversation(id, { title: text });
    await this.show();
    this.focus(id);
  }

  async remove(id, title) {
    const isSure = await askUser({ title: "Delete the conversation?", note: title, act: "Delete" });
    if (!isSure) return;
    await store.removeConversation(id);
    if (id === this.talk.id) await this.open(null);
    else await this.show();
    say("The conversation is deleted.");
  }

  async saveOne(id) {
    this.save([await store.withMessages(await store.conversation(id))]);
  }

  save(conversations) {
    const blob = new Blob([toText(conversations)], { type: "application/json" });
    const href = URL.createObjectURL(blob);
    element("a", { href, download: "conversations.json" }).click();
    // some browsers read it later
    setTimeout(() => URL.revokeObjectURL(href), SAVE_MS);
  }

  async load() {
    const [file] = $("import-file").files;
    if (!file) return;
    try {
      const found = fromText(await file.text());
      for (const { messages, ...one } of found) await store.addConversation(one, messages);
      say(`${found.length} conversations are imported.`);
      this.showTrouble("");
      this.reload();
    } catch (error) {
      this.showTrouble(`${file.name} is not imported: ${error.message}.`);
    }
    $("import-file").value = "";
    await this.show();
  }

  async changeKeeping() {
    const isKept = $("keep-them").checked;
    const note = "All conversations that this browser keeps of this server are deleted; the open"
      + " one stays until the page is closed.";
    if (!isKept && !(await askUser({ title: "Keep nothing?", note, act: "Delete all" }))) {
      $("keep-them").checked = true;
      return;
    }
    try {
      await store.keep(isKept);
    } catch (error) {
      this.showTrouble(`Conversations cannot be kept: ${error.message}`);
    }
    if (!isKept) this.talk.keepAgain();
    await this.show();
  }
}

// Returns the conversations with all words in their titles and messages.
async function search(words) {
  const found = [];
  for (const one of await store.conversations()) {
    const messages = await store.messagesOf(one.id);
    const texts = [one.title, ...messages.map((message) => message.content)];
    const all = texts.join("\n").toLowerCase();
    if (words.every((word) => all.includes(word))) {
      found.push({ ...one, excerpt: excerpt(texts.slice(1), words[0]) });
    }
  }
  return found;
}

function excerpt(texts, word) {
  for (const text of texts) {
    const at = text.toLowerCase().indexOf(word);
    if (at >= 0) return `… ${text.slice(Math.max(0, at - AROUND), at + word.length + AROUND)} …`;
  }
  return "";
}

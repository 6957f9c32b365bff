// Keeps conversations: in the browser's database, or only as long as the page is open.
//
// A conversation: {id, title, created, changed, leaf, settings}; leaf: the last message shown.
// Messages are records of their own and are only added, so two tabs lose nothing of each other.

import { ofBrowser, ofTab } from "./texts.js";
import { Tree } from "./tree.js";

const NAME = "moegraph";
const OFF = "moegraph.keep-nothing";
const TABLES = ["conversations", "messages"];

let place;
// The database cannot be opened, as in some private windows.
let isShut = false;
let onChange = () => {};
let onFailure = () => {};
const others = new BroadcastChannel(NAME);

// Opens the place; what was written before that was in memory, and moves there.
// changed(id): another tab changed a conversation, or all if there is no id. failed(error):
// something could not be kept.
export async function openStore(changed, failed) {
  [onChange, onFailure] = [changed, failed];
  others.addEventListener("message", ({ data }) => hear(data));
  if (!isKeeping()) return;
  try {
    await change(true);
  } catch (error) {
    onFailure(error);
  }
}

export function isKeeping() {
  return ofBrowser.get(OFF) === null && !isShut;
}

// Begins to keep conversations, or deletes what is kept.
export async function keep(isKept) {
  if (isKept) ofBrowser.remove(OFF);
  else ofBrowser.set(OFF, "1");
  const before = place;
  await change(isKept);
  if (!isKept && before instanceof Disk) await before.clear();
  others.postMessage({ keep: isKept });
}

// What was only in memory is kept from now on; what was kept is not taken along.
async function change(isKept) {
  const next = isKept ? new Disk(await openDatabase()) : new Memory();
  const before = place;
  place = next;
  // without a pause since the place was changed, so that what is written next comes after this
  const found = isKept && before instanceof Memory ? before.all() : [];
  await Promise.all(found.map((one) => place.add(...one)));
}

// What another tab tells.
async function hear({ keep: isKept, id }) {
  if (isKept !== undefined) await change(isKept);
  onChange(id);
}

// The conversation that this tab shows, which a reload shows again.
export const openId = () => ofTab.get("moegraph.open");

export function rememberOpen(id) {
  if (id === null) ofTab.remove("moegraph.open");
  else ofTab.set("moegraph.open", id);
}

// Returns all conversations without messages, the one that changed last first.
export async function conversations() {
  return (await place.conversations()).sort((a, b) => b.changed - a.changed);
}

export const conversation = (id) => place.conversation(id);
export const messagesOf = (id) => place.messages(id);

// Returns conversations with their messages.
export async function everything() {
  const found = await conversations();
  return Promise.all(found.map(withMessages));
}

export async function withMessages(one) {
  return { ...one, messages: new Tree(await messagesOf(one.id)).ordered() };
}

export const addConversation = (one, messages = []) => told(one.id, place.add(one, messages));
export const changeConversation = (id, fields) => told(id, place.change(id, fields));
export const removeConversation = (id) => told(id, place.remove(id));

// isQuiet: other tabs need not know, as more follows soon.
export function putMessage(message, isQuiet = false) {
  const done = place.put(message);
  return isQuiet ? done.catch(onFailure) : told(message.conversation, done);
}

async function told(id, done) {
  try {
    await done;
    others.postMessage({ id });
  } catch (error) {
    onFailure(error);
  }
}

async function openDatabase() {
  try {
    const found = await opened();
    isShut = false;
    return found;
  } catch (error) {
    isShut = true;
    throw error;
  }
}

function opened() {
  return new Promise((resolve, reject) => {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => {
      asked.result.createObjectStore("conversations", { keyPath: "id" });
      asked.result.createObjectStore("messages", { keyPath: ["conversation", "id"] });
    };
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

// The keys of a conversation's messages: an array comes after every text.
const within = (id) => IDBKeyRange.bound([id], [id, []]);

class Disk {
  constructor(database) {
    this.database = database;
    // a newer page in another tab may want to change the tables
    database.onversionchange = () => database.close();
  }

  // Runs steps in a transaction that is whole or did not happen; returns what read() finds.
  run(mode, act) {
    return new Promise((resolve, reject) => {
      const transaction = this.database.transaction(TABLES, mode);
      let found;
      act(...TABLES.map((name) => transaction.objectStore(name)), (value) => {
        found = value;
      });
      transaction.oncomplete = () => resolve(found);
      transaction.onabort = () => reject(transaction.error);
    });
  }

  read(act) {
    return this.run("readonly", (heads, messages, give) => {
      const asked = act(heads, messages);
      asked.onsuccess = () => give(asked.result);
    });
  }

  conversations() {
    return this.read((heads) => heads.getAll());
  }

  conversation(id) {
    return this.read((heads) => heads.get(id));
  }

  messages(id) {
    return this.read((_, messages) => messages.getAll(within(id)));
  }

  add(one, messages) {
    return this.run("readwrite", (heads, table) => {
      heads.put(one);
      for (const message of messages) table.put(message);
    });
  }

  // What another tab has deleted stays so.
  change(id, fields) {
    return this.run("readwrite", (heads) => {
      const asked = heads.get(id);
      asked.onsuccess = () => asked.result && heads.put({ ...asked.result, ...fields });
    });
  }

  put(message) {
    return this.run("readwrite", (heads, messages) => {
      const asked = heads.getKey(message.conversation);
      asked.onsuccess = () => asked.result !== undefined && messages.put(message);
    });
  }

  remove(id) {
    return this.run("readwrite", (heads, messages) => {
      heads.delete(id);
      messages.delete(within(id));
    });
  }

  clear() {
    return this.run("readwrite", (heads, messages) => {
      heads.clear();
      messages.clear();
    });
  }
}

class Memory {
  constructor() {
    this.heads = new Map();
    this.tables = new Map();
  }

  all() {
    return [...this.heads].map(([id, one]) => [one, [...this.tables.get(id).values()]]);
  }

  async conversations() {
    return [...this.heads.values()];
  }

  async conversation(id) {
    return this.heads.get(id);
  }

  async messages(id) {
    return [...(this.tables.get(id)?.values() ?? [])];
  }

  async add(one, messages) {
    this.heads.set(one.id, one);
    const table = this.tables.get(one.id) ?? new Map();
    for (const message of messages) table.set(message.id, message);
    this.tables.set(one.id, table);
  }

  async change(id, fields) {
    if (this.heads.has(id)) this.heads.set(id, { ...this.heads.get(id), ...fields });
  }

  async put(message) {
    this.tables.get(message.conversation)?.set(message.id, message);
  }

  async remove(id) {
    this.heads.delete(id);
    this.tables.delete(id);
  }
}

place = new Memory();

// The file of exported conversations, and what is accepted of one.

import { knownSettings } from "./settings.js";

const FORMAT = "moegraph.conversations";
const TITLE_LETTERS = 200;
const PICTURE = /^data:image\/(?:jpeg|png|gif|bmp);base64,[A-Za-z0-9+/]+=*$/;

export function toText(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

// Returns conversations with their messages; raises an error that says what is wrong.
export function fromText(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new Error("the file is not JSON");
  }
  if (found?.format !== FORMAT || found.version !== 1 || !Array.isArray(found.conversations)) {
    throw new Error(`the file is not of the format ${FORMAT}, version 1`);
  }
  return found.conversations.map(readConversation);
}

function readConversation(given, index) {
  const where = `conversation ${index + 1}`;
  want(given?.id, "string", `${where}: id`);
  want(given.title, "string", `${where}: title`);
  const title = given.title.trim().slice(0, TITLE_LETTERS) || "Untitled";
  if (!Array.isArray(given.messages)) throw new Error(`${where}: messages is no list`);
  const roles = new Map();
  const messages = given.messages.map((one, i) => {
    const message = readMessage(one, given.id, `${where}, message ${i + 1}`);
    const { id, parent, role } = message;
    // ids are new and a parent stands before its children, so there is no circle
    if (roles.has(id)) throw new Error(`${where}, message ${i + 1}: its id is another one's`);
    if (parent !== null && !roles.has(parent)) {
      throw new Error(`${where}, message ${i + 1}: its parent does not stand before it`);
    }
    if (role === "assistant" && roles.get(parent) !== "user") {
      throw new Error(`${where}, message ${i + 1}: an answer whose parent is no question`);
    }
    roles.set(id, role);
    return message;
  });
  return {
    id: given.id,
    title,
    created: time(given.created),
    changed: time(given.changed),
    leaf: roles.has(given.leaf) ? given.leaf : (messages.at(-1)?.id ?? null),
    settings: knownSettings(given.settings),
    messages,
  };
}

function readMessage(given, conversation, where) {
  want(given?.id, "string", `${where}: id`);
  want(given.content, "string", `${where}: content`);
  if (!["user", "assistant"].includes(given.role)) throw new Error(`${where}: role is unknown`);
  const pictures = given.pictures ?? [];
  if (!Array.isArray(pictures) || !pictures.every(isPicture)) {
    throw new Error(`${where}: a picture is no data URI of JPEG, PNG, GIF or BMP`);
  }
  const found = {
    id: given.id,
    conversation,
    parent: given.parent ?? null,
    role: given.role,
    content: given.content,
    created: time(given.created),
  };
  if (given.role === "user") return { ...found, pictures };
  const { reasoning = "", note = "", figures = "", thought = 0 } = given;
  const texts = { reasoning, note, figures };
  for (const [name, value] of Object.entries(texts)) want(value, "string", `${where}: ${name}`);
  return { ...found, ...texts, thought: Number(thought) || 0 };
}

// What comes later is newer than all that a file has.
const time = (value) => Math.min(Number(value) || 0, Date.now());

const isPicture = (one) => typeof one === "string" && PICTURE.test(one);

function want(value, type, where) {
  if (typeof value !== type) throw new Error(`${where} is no ${type}`);
}

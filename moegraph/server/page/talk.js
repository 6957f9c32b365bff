// The open conversation: its messages, which of their versions are shown, and what is kept of it.

import { $ } from "./dom.js";
import { AnswerView, QuestionView } from "./message.js";
import { settings } from "./settings.js";
import * as store from "./store.js";
import { Tree } from "./tree.js";

const TITLE_LETTERS = 60;

let last = 0;

// Returns the time, and never the same twice: messages are in the order of their times.
function now() {
  last = Math.max(Date.now(), last + 1);
  return last;
}

// crypto.randomUUID is only there under HTTPS
function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export class Talk {
  // acts: edit(message), again(message), drawn().
  constructor(acts) {
    this.acts = acts;
    this.forget();
  }

  forget() {
    this.head = null;
    this.tree = new Tree();
    this.leaf = null;
    this.views = [];
  }

  close() {
    this.forget();
    store.rememberOpen(null);
    this.show();
  }

  get id() {
    return this.head?.id ?? null;
  }

  // Shows a conversation that is kept, as it is now; returns whether there is one. isStill: asked
  // when it was read, as the user may have gone on meanwhile.
  async open(id, isStill) {
    const [head, messages] = [await store.conversation(id), await store.messagesOf(id)];
    if (!isStill()) return true;
    if (!head) return false;
    if (id !== this.id) this.views = [];
    const leaf = id === this.id ? this.leaf : head.leaf;
    [this.head, this.tree] = [head, new Tree(messages)];
    // what another tab has added goes on here
    this.leaf = this.tree.newest(this.tree.get(leaf) ? leaf : null);
    store.rememberOpen(id);
    this.show();
    return true;
  }

  // Keeps all of it again, after the place for it was changed.
  keepAgain() {
    if (this.head) store.addConversation({ ...this.head, leaf: this.leaf }, this.tree.ordered());
  }

  // Adds a message after another one, or null, and shows it.
  add(parent, role, fields) {
    if (!this.head) this.begin(fields);
    const message = { id: newId(), conversation: this.id, parent, role, created: now(), ...fields };
    this.tree.add(message);
    store.putMessage(message);
    this.showLeaf(message.id);
    return message;
  }

  begin({ content }) {
    const title = content.trim().split("\n")[0].slice(0, TITLE_LETTERS) || "Picture";
    const time = now();
    this.head = {
      id: newId(), title, created: time, changed: time, leaf: null, settings: settings(),
    };
    store.addConversation(this.head);
    store.rememberOpen(this.id);
  }

  change(fields) {
    if (!this.head) return;
    Object.assign(this.head, fields);
    store.changeConversation(this.id, fields);
  }

  showLeaf(id) {
    this.leaf = id;
    this.change({ leaf: id, changed: now() });
    this.show();
  }

  // Shows the version before or after of a message.
  turn(message, step) {
    const versions = this.tree.versions(message);
    const other = versions[versions.indexOf(message) + step];
    if (!other) return;
    this.showLeaf(this.tree.newest(other.id));
    this.view(other.id).versions.focus(step);
  }

  view(id) {
    return this.views.find((view) => view.message.id === id);
  }

  // Draws what is not drawn yet.
  show() {
    const path = this.tree.path(this.leaf);
    const isSame = (message, view) => view && sameText(message, view.message);
    let same = 0;
    while (same < path.length && isSame(path[same], this.views[same])) same++;
    const added = path.slice(same).map((message) => this.draw(message));
    this.views = [...this.views.slice(0, same), ...added];
    // what stays is not touched: it would lose focus and selection
    const box = $("messages");
    while (box.children.length > 1 + same) box.lastElementChild.remove();
    box.append(...added.map((view) => view.element));
    this.views.forEach((view, i) => {
      view.message = path[i];
      const versions = this.tree.versions(path[i]);
      view.versions.show(versions.indexOf(path[i]), versions.length);
    });
    $("empty").hidden = path.length > 0;
  }

  draw(message) {
    const kind = message.role === "user" ? QuestionView : AnswerView;
    const view = new kind(message, {
      // the message may have been read again, so it is not the one above
      turn: (step) => this.turn(view.message, step),
      edit: () => this.acts.edit(view.message),
      again: () => this.acts.again(view.message),
      drawn: this.acts.drawn,
    });
    return view;
  }
}

function sameText(a, b) {
  return a.id === b.id && a.content === b.content && a.note === b.note;
}

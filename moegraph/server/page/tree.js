// The messages of a conversation: each has a parent, so that another version is another child.

// A message: {id, parent, role, content, created, ...}; parent is null for a first question.
export class Tree {
  constructor(messages = []) {
    this.messages = new Map();
    // of each parent, in the order of their times
    this.below = new Map();
    for (const message of messages.toSorted((a, b) => a.created - b.created)) this.add(message);
  }

  add(message) {
    this.messages.set(message.id, message);
    const { parent } = message;
    if (this.below.has(parent)) this.below.get(parent).push(message);
    else this.below.set(parent, [message]);
  }

  get(id) {
    return this.messages.get(id);
  }

  // Returns the versions beside a message, and itself, the oldest first.
  versions(message) {
    return this.children(message.parent);
  }

  children(parent) {
    return this.below.get(parent) ?? [];
  }

  // Returns the messages from the first one down to this one.
  path(id) {
    const found = [];
    for (let one = this.get(id); one; one = this.get(one.parent)) found.push(one);
    return found.reverse();
  }

  // Returns all messages, each after its parent.
  ordered(parent = null) {
    const found = [...this.children(parent)];
    // grows while it is walked
    for (const one of found) found.push(...this.children(one.id));
    return found;
  }

  // Returns the id at the end of the newest versions below a message; null: of all messages.
  newest(id) {
    for (let below = this.children(id); below.length; below = this.children(id)) {
      id = below.at(-1).id;
    }
    return id;
  }
}

// How a question and its answer look.

import { button, copyButton, element, say } from "./dom.js";
import { Markdown } from "./markdown.js";
import { pictureView } from "./pictures.js";

const ENDS = { length: "cut off: a limit of tokens, context or time is reached" };
// Of an answer that another tab writes, or that was not complete when the page was left.
export const UNFINISHED = "not complete";

// The arrows between versions of a message. turn(step): shows another one.
class Versions {
  constructor(turn) {
    this.count = element("span", { className: "count" });
    this.before = button("←", () => turn(-1));
    this.before.setAttribute("aria-label", "Version before");
    this.after = button("→", () => turn(1));
    this.after.setAttribute("aria-label", "Next version");
    this.element = element("span", { className: "versions", hidden: true },
      this.before, this.count, this.after);
    this.element.setAttribute("role", "group");
    this.element.setAttribute("aria-label", "Versions");
  }

  show(index, n) {
    this.element.hidden = n < 2;
    this.count.textContent = `${index + 1}/${n}`;
    // not disabled, which would lose the focus
    this.before.setAttribute("aria-disabled", String(index === 0));
    this.after.setAttribute("aria-disabled", String(index === n - 1));
  }

  // Goes on with the keyboard where another version was left.
  focus(step) {
    (step < 0 ? this.before : this.after).focus();
    say(`Version ${this.count.textContent.replace("/", " of ")}`);
  }
}

export class QuestionView {
  // acts: edit(), turn(step).
  constructor(message, acts) {
    this.message = message;
    this.versions = new Versions(acts.turn);
    this.change = button("Edit", acts.edit, { className: "change" });
    const pictures = (message.pictures ?? []).map((uri, i) => pictureView(uri, i + 1));
    const body = element("p", { className: "text", hidden: !message.content }, message.content);
    const bar = element("footer", {}, this.versions.element, this.change,
      copyButton(() => message.content, "Copy your message"));
    this.element = element("article", { className: "question" }, ...pictures, body, bar);
    this.element.setAttribute("aria-label", "You");
  }
}

// An answer that grows by the events of its stream, or was kept.
export class AnswerView {
  // acts: again(), turn(step), drawn().
  constructor(message, acts) {
    this.message = message;
    this.onDrawn = acts.drawn;
    this.end = "";
    this.frame = 0;
    this.build(acts);
    this.showKept();
  }

  build(acts) {
    this.versions = new Versions(acts.turn);
    this.change = button("Try again", acts.again, { className: "change" });
    this.summary = element("summary", {}, "Reasoning");
    this.thoughts = element("div", { className: "thoughts" });
    this.details = element("details", { hidden: true }, this.summary, this.thoughts);
    this.text = element("div", { className: "text" });
    this.note = element("p", { className: "note" });
    this.figures = element("span", { className: "figures" });
    this.copy = copyButton(() => this.message.content, "Copy the answer");
    this.copy.hidden = true;
    this.bar = element("footer", {}, this.versions.element, this.change, this.copy, this.figures);
    this.element = element("article", { className: "answer" }, this.details, this.text,
      this.note, this.bar);
    this.element.setAttribute("aria-label", "Answer");
    this.markdown = new Markdown(this.text);
  }

  // An answer is asked for.
  wait() {
    this.note.textContent = "Waiting …";
    this.note.hidden = false;
  }

  // Takes one event of the stream.
  take({ choices = [], timings, moegraph, prompt_progress: read }) {
    if (read) this.note.textContent = progressText(read);
    for (const { delta, finish_reason: end } of choices) {
      if (delta.reasoning_content) this.addReasoning(delta.reasoning_content);
      if (delta.content) this.addContent(delta.content);
      this.end = end ?? this.end;
    }
    if (timings) this.message.figures = figuresText(timings, moegraph?.experts);
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  addReasoning(text) {
    this.began ??= performance.now();
    this.message.reasoning += text;
  }

  addContent(text) {
    this.endThought();
    this.message.content += text;
  }

  endThought() {
    if (this.began) this.message.thought ||= Math.max(1, performance.now() - this.began);
  }

  draw() {
    this.frame = 0;
    const { content, reasoning, thought, figures } = this.message;
    if (content || reasoning) this.note.hidden = true;
    this.details.hidden = !reasoning;
    if (this.thoughts.textContent.length !== reasoning.length) {
      this.thoughts.textContent = reasoning;
    }
    this.summary.textContent = `Reasoning${thought ? ` (${(thought / 1000).toFixed(1)} s)` : "…"}`;
    this.figures.textContent = figures;
    this.markdown.show(content);
    this.onDrawn();
  }

  // Nothing more comes. why: what the user should know of the end; it may be empty.
  finish(why) {
    cancelAnimationFrame(this.frame);
    this.endThought();
    this.message.note = why || ENDS[this.end] || (this.message.content ? "" : "an empty answer");
    this.showKept();
  }

  showKept() {
    this.draw();
    this.copy.hidden = !this.message.content;
    this.note.textContent = this.message.note;
    this.note.hidden = !this.message.note;
    this.onDrawn();
  }
}

function progressText({ processed, total }) {
  return processed ? `Reading the prompt: ${processed} of ${total} tokens` : "Waiting for a slot …";
}

function figuresText(t, experts) {
  const words = [t.predicted_n === 1 ? "1 token" : `${t.predicted_n} tokens`];
  if (t.predicted_n > 1) words.push(`${t.predicted_per_second.toFixed(1)} tokens/s`);
  const kept = t.cache_n ? ` and ${t.cache_n} kept` : "";
  words.push(`prompt: ${t.prompt_n}${kept}, ${(t.prompt_ms / 1000).toFixed(2)} s`);
  if (t.draft_n) words.push(`drafts: ${t.draft_n_accepted} of ${t.draft_n} accepted`);
  if (experts) words.push(`experts on the device: ${(100 * experts.hit_rate).toFixed(1)} %`);
  return words.join(" · ");
}

// How a question and its answer look.

import { copyButton, element } from "./dom.js";
import { Markdown } from "./markdown.js";

const ENDS = { length: "cut off: a limit of tokens, context or time is reached" };

export function questionView(text) {
  const body = element("p", { className: "text" }, text);
  const bar = element("footer", {}, copyButton(() => text, "Copy your message"));
  const made = element("article", { className: "question" }, body, bar);
  made.setAttribute("aria-label", "You");
  return { element: made, bar };
}

// An answer that grows by the events of its stream.
export class AnswerView {
  constructor(onDrawn) {
    this.content = "";
    this.reasoning = "";
    this.end = "";
    this.onDrawn = onDrawn;
    this.frame = 0;
    this.build();
  }

  build() {
    this.summary = element("summary", {}, "Reasoning");
    this.thoughts = element("div", { className: "thoughts" });
    this.details = element("details", { hidden: true }, this.summary, this.thoughts);
    this.text = element("div", { className: "text" });
    this.note = element("p", { className: "note" }, "Waiting …");
    this.figures = element("span", { className: "figures" });
    this.copy = copyButton(() => this.content, "Copy the answer");
    this.copy.hidden = true;
    this.bar = element("footer", {}, this.copy, this.figures);
    this.element = element("article", { className: "answer" }, this.details, this.text,
      this.note, this.bar);
    this.element.setAttribute("aria-label", "Answer");
    this.markdown = new Markdown(this.text);
  }

  // Takes one event of the stream.
  take({ choices = [], timings, prompt_progress: read }) {
    if (read) this.note.textContent = progressText(read);
    for (const { delta, finish_reason: end } of choices) {
      if (delta.reasoning_content) this.addReasoning(delta.reasoning_content);
      if (delta.content) this.addContent(delta.content);
      this.end = end ?? this.end;
    }
    if (timings) this.figures.textContent = figuresText(timings);
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  addReasoning(text) {
    this.began ??= performance.now();
    this.reasoning += text;
  }

  addContent(text) {
    if (this.reasoning) this.thought ??= performance.now() - this.began;
    this.content += text;
  }

  draw() {
    this.frame = 0;
    if (this.content || this.reasoning) this.note.hidden = true;
    this.details.hidden = !this.reasoning;
    if (this.thoughts.textContent.length !== this.reasoning.length) {
      this.thoughts.textContent = this.reasoning;
    }
    const seconds = this.thought === undefined ? "…" : ` (${(this.thought / 1000).toFixed(1)} s)`;
    this.summary.textContent = `Reasoning${seconds}`;
    this.markdown.show(this.content);
    this.onDrawn();
  }

  // Nothing more comes. why: what the user should know of the end; it may be empty.
  finish(why) {
    cancelAnimationFrame(this.frame);
    if (this.reasoning) this.thought ??= performance.now() - this.began;
    this.draw();
    this.copy.hidden = !this.content;
    this.note.textContent = why || ENDS[this.end] || (this.content ? "" : "an empty answer");
    this.note.hidden = !this.note.textContent;
    this.onDrawn();
  }
}

function progressText({ processed, total }) {
  return processed ? `Reading the prompt: ${processed} of ${total} tokens` : "Waiting for a slot …";
}

function figuresText(t) {
  const words = [t.predicted_n === 1 ? "1 token" : `${t.predicted_n} tokens`];
  if (t.predicted_n > 1) words.push(`${t.predicted_per_second.toFixed(1)} tokens/s`);
  const kept = t.cache_n ? ` and ${t.cache_n} kept` : "";
  words.push(`prompt: ${t.prompt_n}${kept}, ${(t.prompt_ms / 1000).toFixed(2)} s`);
  return words.join(" · ");
}

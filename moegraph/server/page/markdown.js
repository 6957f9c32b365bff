// Shows a small part of Markdown. Text of a model becomes text nodes only, never HTML.

import { copyButton, element } from "./dom.js";

const FENCE = /^( *)(`{3,}|~{3,}) *([\w+#.-]*)[^`]*$/;
const HEADING = /^(#{1,6}) +(.*)$/;
const ITEM = /^( *)(?:[-*+]|(\d{1,9})[.)]) +(.*)$/;
const RULE = /^ *([-*_])(?: *\1){2,} *$/;
const MARK = /`+|\*{1,2}/g;
// An emphasis that is longer is none; it also bounds the search for its end.
const MAX_EMPHASIS = 1000;

// A text that grows. Only blocks that changed are drawn again.
export class Markdown {
  constructor(container) {
    this.container = container;
    this.blocks = [];
  }

  show(text) {
    const blocks = parse(text);
    let same = 0;
    while (same < blocks.length && blocks[same].source === this.blocks[same]?.source) same++;
    while (this.container.childNodes.length > same) this.container.lastChild.remove();
    this.container.append(...blocks.slice(same).map(draw));
    this.blocks = blocks;
  }
}

// Returns the blocks of a text. source: their kind and lines, to compare them.
export function parse(text) {
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const block = readFence(lines, at) ?? readLine(lines[at]) ?? readItems(lines, at)
      ?? readParagraph(lines, at);
    block.n ??= 1;
    block.source = `${block.kind}\n${lines.slice(at, at + block.n).join("\n")}`;
    blocks.push(block);
    at += block.n;
  }
  return blocks;
}

function readFence(lines, at) {
  const found = FENCE.exec(lines[at]);
  if (!found) return null;
  const [, indent, fence, language] = found;
  let end = at + 1;
  while (end < lines.length && !closes(lines[end].trim(), fence)) end++;
  const code = lines.slice(at + 1, end).map((line) => unindented(line, indent.length));
  return { kind: "code", language, text: code.join("\n"), n: end + 1 - at };
}

function closes(line, fence) {
  return line.startsWith(fence) && line === fence[0].repeat(line.length);
}

function unindented(line, n) {
  return line.slice(Math.min(n, line.length - line.trimStart().length));
}

function readLine(line) {
  const heading = HEADING.exec(line);
  if (heading) return { kind: "heading", level: heading[1].length, text: heading[2] };
  return RULE.test(line) ? { kind: "rule" } : null;
}

// A list has one depth and one kind of mark; a deeper one is a block of its own.
function readItems(lines, at) {
  const [, indent, number] = ITEM.exec(lines[at]) ?? [];
  if (indent === undefined) return null;
  const items = [];
  let end = at;
  for (; end < lines.length; end++) {
    const line = lines[end];
    const found = ITEM.exec(line);
    if (found) {
      if (found[1] !== indent || (found[2] === undefined) !== (number === undefined)) break;
      items.push({ number: Number(found[2]), text: found[3] });
    } else {
      if (!line.trim() || !line.startsWith(`${indent}  `) || startsBlock(line)) break;
      items.at(-1).text += `\n${line.trim()}`;
    }
  }
  const depth = Math.min(3, indent.length >> 1);
  return { kind: "list", ordered: number !== undefined, depth, items, n: end - at };
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line);
}

function readParagraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines[end])
    && !ITEM.test(lines[end])) end++;
  return { kind: "paragraph", text: lines.slice(at, end).join("\n"), n: end - at };
}

function draw(block) {
  if (block.kind === "code") return drawCode(block);
  if (block.kind === "rule") return element("hr");
  if (block.kind === "list") return drawList(block);
  // the page has h1 and h2
  const name = block.kind === "heading" ? `h${Math.min(6, block.level + 2)}` : "p";
  return element(name, {}, ...inline(block.text));
}

function drawCode({ language, text }) {
  const bar = element("div", { className: "bar" }, element("span", {}, language || "code"),
    copyButton(() => text, "Copy code"));
  // long lines scroll, also with the keyboard
  const code = element("pre", { tabIndex: 0 }, element("code", {}, text));
  return element("div", { className: "code" }, bar, code);
}

function drawList({ ordered, depth, items }) {
  const list = element(ordered ? "ol" : "ul", { className: `depth${depth}` });
  for (const { number, text } of items) {
    list.append(element("li", ordered ? { value: number } : {}, ...inline(text)));
  }
  return list;
}

// Returns the nodes of a text with `code`, **strong** and *emphasis*.
function inline(text) {
  const nodes = [];
  let from = 0;
  MARK.lastIndex = 0;
  const marks = [...text.matchAll(MARK)];
  for (const { 0: mark, index } of marks) {
    if (index < from) continue;
    const end = closing(text, mark, index + mark.length);
    if (end < 0) continue;
    const inner = text.slice(index + mark.length, end);
    nodes.push(text.slice(from, index), span(mark, inner));
    from = end + mark.length;
  }
  nodes.push(text.slice(from));
  return nodes.filter((node) => node !== "");
}

function span(mark, inner) {
  if (mark[0] === "`") return element("code", {}, inner);
  return element(mark === "**" ? "strong" : "em", {}, ...inline(inner));
}

// Returns where a mark's partner is, or -1.
function closing(text, mark, start) {
  if (mark[0] !== "`" && !/\S/.test(text[start] ?? " ")) return -1;
  const limit = Math.min(text.length, start + MAX_EMPHASIS);
  for (let end = text.indexOf(mark, start + 1); end >= 0 && end < limit; ) {
    if (fits(text, mark, end)) return end;
    end = text.indexOf(mark, end + 1);
  }
  return -1;
}

function fits(text, mark, end) {
  const isWhole = text[end - 1] !== mark[0] && text[end + mark.length] !== mark[0];
  return isWhole && (mark[0] === "`" || /\S/.test(text[end - 1]));
}

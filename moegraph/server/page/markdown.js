// Shows a small part of Markdown. Text of a model becomes text nodes only, never HTML.

import { copyButton, element } from "./dom.js";
import { codeNodes, mathNode } from "./rich.js";

// With s, as "." is each letter of a line then: what cannot fail looks at a long line only once.
const FENCE = /^( *)(`{3,}|~{3,}) *([\w+#.-]*)/;
const HEADING = /^(#{1,6}) +(.*)$/s;
const ITEM = /^( *)(?:[-*+]|(\d{1,9})[.)]) +(.*)$/s;
const RULE = /^ *([-*_])(?: *\1){2,} *$/;
const MARK = /`+|\*{1,2}|\$\$?|\\[([]/g;
const PARTNERS = { "\\(": "\\)", "\\[": "\\]" };
const FORMULA = /^ *(\$\$|\\\[)/;
// An emphasis or formula that is longer is none; it also bounds the search for its end.
const MAX_SPAN = 1000;
const MAX_TRIES = 50;
const MAX_FORMULA_LINES = 100;

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
    const block = readFence(lines, at) ?? readFormula(lines, at) ?? readLine(lines[at])
      ?? readItems(lines, at) ?? readParagraph(lines, at);
    block.n ??= 1;
    block.source = `${block.kind}\n${lines.slice(at, at + block.n).join("\n")}`;
    blocks.push(block);
    at += block.n;
  }
  return blocks;
}

function beginFence(line) {
  const found = FENCE.exec(line);
  // no other ` stands in its line
  return found && !line.includes("`", found[0].length) ? found : null;
}

function readFence(lines, at) {
  const found = beginFence(lines[at]);
  if (!found) return null;
  const [, indent, fence, language] = found;
  let end = at + 1;
  while (end < lines.length && !closes(lines[end].trim(), fence)) end++;
  const code = lines.slice(at + 1, end).map((line) => unindented(line, indent.length));
  const isWhole = end < lines.length;
  return { kind: isWhole ? "code" : "open", language, text: code.join("\n"), n: end + 1 - at };
}

// A formula of its own: lines from $$ or \[ to its partner, without an empty one.
function readFormula(lines, at) {
  const [, mark] = FORMULA.exec(lines[at]) ?? [];
  if (!mark) return null;
  const partner = PARTNERS[mark] ?? mark;
  let rest = lines[at].trim().slice(mark.length);
  const inner = [];
  for (let end = at; ; rest = lines[++end]) {
    const found = rest.indexOf(partner);
    if (found >= 0) {
      if (rest.slice(found + partner.length).trim()) return null;
      const text = [...inner, rest.slice(0, found)].join("\n");
      return { kind: "formula", text, mark, n: end + 1 - at };
    }
    inner.push(rest);
    if (inner.length > MAX_FORMULA_LINES || !lines[end + 1]?.trim()) return null;
  }
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
  return beginFence(line) || HEADING.test(line) || RULE.test(line) || FORMULA.test(line);
}

function readParagraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines[end])
    && !ITEM.test(lines[end])) end++;
  return { kind: "paragraph", text: lines.slice(at, end).join("\n"), n: end - at };
}

function draw(block) {
  if (block.kind === "code" || block.kind === "open") return drawCode(block);
  if (block.kind === "formula") return drawFormula(block);
  if (block.kind === "rule") return element("hr");
  if (block.kind === "list") return drawList(block);
  // the page has h1 and h2
  const name = block.kind === "heading" ? `h${Math.min(6, block.level + 2)}` : "p";
  return element(name, {}, ...inline(block.text));
}

function drawFormula({ text, mark }) {
  const source = `${mark}${text}${PARTNERS[mark] ?? mark}`;
  // long formulas scroll, also with the keyboard
  return element("div", { className: "formula", tabIndex: 0 }, mathNode(text, true) ?? source);
}

// Code that is still being written has no colours yet.
function drawCode({ kind, language, text }) {
  const bar = element("div", { className: "bar" }, element("span", {}, language || "code"),
    copyButton(() => text, "Copy code"));
  // long lines scroll, also with the keyboard
  const nodes = kind === "code" ? codeNodes(text, language) : [text];
  const code = element("pre", { tabIndex: 0 }, element("code", {}, ...nodes));
  return element("div", { className: "code" }, bar, code);
}

function drawList({ ordered, depth, items }) {
  const list = element(ordered ? "ol" : "ul", { className: `depth${depth}` });
  for (const { number, text } of items) {
    list.append(element("li", ordered ? { value: number } : {}, ...inline(text)));
  }
  return list;
}

// Returns the nodes of a text with `code`, **strong**, *emphasis* and $formulas$.
function inline(text) {
  const nodes = [];
  let from = 0;
  MARK.lastIndex = 0;
  const marks = [...text.matchAll(MARK)];
  for (const { 0: mark, index } of marks) {
    if (index < from) continue;
    const partner = PARTNERS[mark] ?? mark;
    const end = closing(text, mark, partner, index + mark.length);
    if (end < 0) continue;
    const node = span(mark, text.slice(index + mark.length, end));
    nodes.push(text.slice(from, index), node ?? text.slice(index, end + partner.length));
    from = end + partner.length;
  }
  nodes.push(text.slice(from));
  return nodes.filter((node) => node !== "");
}

// Returns null if the text stays what it is.
function span(mark, inner) {
  if (mark[0] === "`") return element("code", {}, inner);
  if (isFormula(mark)) return mathNode(inner, mark === "$$" || mark === "\\[");
  return element(mark === "**" ? "strong" : "em", {}, ...inline(inner));
}

const isFormula = (mark) => mark[0] === "$" || mark[0] === "\\";

// Returns where a mark's partner is, or -1.
function closing(text, mark, partner, start) {
  const isTight = mark[0] === "*" || mark === "$";
  if (isTight && !/\S/.test(text[start] ?? " ")) return -1;
  if (mark[0] === "$" && text[start - mark.length - 1] === "\\") return -1;
  const near = text.slice(0, start + MAX_SPAN);
  let left = MAX_TRIES;
  for (let end = near.indexOf(partner, start + 1); end >= 0 && left--;) {
    if (fits(text, mark, partner, end)) return end;
    end = near.indexOf(partner, end + 1);
  }
  return -1;
}

function fits(text, mark, partner, end) {
  if (partner !== mark) return true;
  const after = text[end + mark.length];
  const isWhole = text[end - 1] !== mark[0] && after !== mark[0];
  if (!isWhole || mark[0] === "`" || mark === "$$") return isWhole;
  // "$5 and $10" are prices
  if (mark === "$" && (text[end - 1] === "\\" || /\d/.test(after ?? " "))) return false;
  return /\S/.test(text[end - 1]);
}

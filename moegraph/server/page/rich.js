// Formulas and coloured code, by KaTeX and highlight.js if the build has brought them (page/lib).

// Longer texts stay as they are: what colours them takes its time.
const MAX_CODE = 50_000;
const MAX_FORMULA = 5000;
// Of elements in one another: a tab ends when it lays out some 1000 of them.
const MAX_DEPTH = 200;
// Formulas that were drawn, as a paragraph is drawn again while it grows.
const MAX_KNOWN = 500;
const known = new Map();
const TAG = /<span class="([\w -]*)">|<\/span>|&(\w+|#x27);/g;
const LETTERS = { amp: "&", lt: "<", gt: ">", quot: '"', "#x27": "'" };

// Returns an element with a formula, and MathML in it for screen readers; null if it is none.
// isDisplay: it stands alone.
export function mathNode(tex, isDisplay) {
  if (!globalThis.katex || tex.length > MAX_FORMULA) return null;
  const key = `${isDisplay} ${tex}`;
  if (!known.has(key)) {
    if (known.size >= MAX_KNOWN) known.clear();
    known.set(key, drawn(tex, isDisplay));
  }
  return known.get(key)?.cloneNode(true) ?? null;
}

function drawn(tex, isDisplay) {
  const made = document.createElement("span");
  try {
    const limits = { maxExpand: 500, maxSize: 50, strict: "ignore", trust: false };
    globalThis.katex.render(tex, made, { displayMode: isDisplay, ...limits });
    return isDeep(made) ? null : made;
  } catch {
    return null;
  }
}

function isDeep(made) {
  let level = [made];
  for (let depth = 0; level.length && depth <= MAX_DEPTH; depth++) {
    level = level.flatMap((one) => [...one.children]);
  }
  return level.length > 0;
}

// Returns the nodes of a code. language: its name after the fence.
export function codeNodes(code, language) {
  const library = globalThis.hljs;
  const found = library?.getLanguage(language);
  // Markdown stays as it is: 8000 letters of it can take seconds
  if (!found || found.name === "Markdown" || code.length > MAX_CODE) return [code];
  return nodesOf(library.highlight(code, { language, ignoreIllegals: true }).value);
}

// highlight.js writes HTML with spans and nothing else; here it becomes nodes, as the page's policy
// makes no HTML of text.
function nodesOf(html) {
  const root = document.createDocumentFragment();
  let inside = root;
  let depth = 0;
  let from = 0;
  for (const { 0: found, 1: classes, 2: letter, index } of html.matchAll(TAG)) {
    inside.append(html.slice(from, index));
    from = index + found.length;
    if (letter) {
      inside.append(LETTERS[letter] ?? found);
    } else if (classes === undefined) {
      if (depth-- <= MAX_DEPTH) inside = inside.parentNode ?? root;
    } else if (++depth <= MAX_DEPTH) {
      const made = document.createElement("span");
      made.className = classes;
      inside.append(made);
      inside = made;
    }
  }
  inside.append(html.slice(from));
  root.normalize();
  return [root];
}

// Small helpers for nodes of the page.

export const $ = (id) => document.getElementById(id);

// Returns an element with properties and children; strings become text.
export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

export function button(text, act, properties = {}) {
  const made = element("button", { type: "button", ...properties }, text);
  made.addEventListener("click", act);
  return made;
}

// Tells a screen reader something that others see.
export function say(text) {
  $("said").textContent = text;
}

const COPIED_MS = 1500;

// Returns a button that copies what text() returns.
export function copyButton(text, label) {
  const made = button("Copy", async () => {
    const isDone = await copy(text());
    made.textContent = isDone ? "Copied" : "Not copied";
    say(made.textContent);
    setTimeout(() => {
      made.textContent = "Copy";
    }, COPIED_MS);
  });
  made.setAttribute("aria-label", label);
  return made;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // a page that came over plain HTTP from another machine has no clipboard
    return copySelected(text);
  }
}

function copySelected(text) {
  const before = document.activeElement;
  const area = element("textarea", { value: text, className: "unseen", readOnly: true });
  document.body.append(area);
  area.select();
  const isDone = document.execCommand("copy");
  area.remove();
  before?.focus();
  return isDone;
}

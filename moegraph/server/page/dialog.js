// A question to the user: yes or no, or a text.

import { $ } from "./dom.js";

// Returns the text that was given (true if none was asked for), or null. text: to begin with.
export function askUser({ title, note = "", act, text }) {
  const dialog = $("question");
  $("question-title").textContent = title;
  $("question-note").textContent = note;
  $("question-act").textContent = act;
  $("question-field").hidden = text === undefined;
  $("question-text").required = text !== undefined;
  $("question-text").value = text ?? "";
  dialog.returnValue = "";
  dialog.showModal();
  if (text === undefined) $("question-act").focus();
  else $("question-text").select();
  const given = () => (text === undefined ? true : $("question-text").value.trim());
  return new Promise((resolve) => {
    const closed = () => resolve(dialog.returnValue === "yes" ? given() || null : null);
    dialog.addEventListener("close", closed, { once: true });
  });
}

export function startDialog() {
  $("question-no").addEventListener("click", () => $("question").close());
}

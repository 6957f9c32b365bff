// The dialog that asks for an API key.

import { $ } from "./dom.js";

const FIRST = "This server answers only with a key.";
const REFUSED = "The server refused this key. Is it complete?";

// Returns the key that the user gives, or null. wasRefused: one was tried.
export function askForKey(wasRefused) {
  const dialog = $("ask-key");
  $("key-note").textContent = wasRefused ? REFUSED : FIRST;
  $("key").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const closed = () => resolve(dialog.returnValue === "use" ? $("key").value.trim() : null);
    dialog.addEventListener("close", closed, { once: true });
  });
}

export function startKeyDialog() {
  $("no-key").addEventListener("click", () => $("ask-key").close());
}

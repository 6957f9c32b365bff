// The browser's two places for short texts. What they do not take is there until the page is left:
// browsers can forbid them, and they can be full.

function texts(name) {
  const own = new Map();
  let kept = null;
  try {
    kept = globalThis[name];
  } catch {
    // the user's settings forbid it
  }
  return {
    get: (key) => own.get(key) ?? kept?.getItem(key) ?? null,
    set(key, text) {
      own.delete(key);
      try {
        kept.setItem(key, text);
      } catch {
        own.set(key, text);
      }
    },
    remove(key) {
      own.delete(key);
      kept?.removeItem(key);
    },
  };
}

export const ofTab = texts("sessionStorage");
export const ofBrowser = texts("localStorage");

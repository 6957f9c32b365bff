// Pictures that go with the next message: chosen, dropped or pasted.

import { $, button, element } from "./dom.js";

const READ = ["image/jpeg", "image/png", "image/gif", "image/bmp"];
const REFUSED = "This server reads no pictures: it was started without an encoder (--mmproj).";

// Each is a data URI.
let attached = [];
let isReader = false;
let showTrouble = () => {};

// Takes whether the server reads pictures: /props says it.
export function allowPictures(isAllowed) {
  isReader = isAllowed;
  $("attach").hidden = !isAllowed;
}

// Returns what is attached, and detaches it.
export function takePictures() {
  const taken = attached;
  attachOnly([]);
  return taken;
}

export const hasPictures = () => attached.length > 0;

export function attachOnly(pictures) {
  attached = [...pictures];
  show();
}

// Returns an image of a message. A model's text never becomes one.
export function pictureView(uri, number) {
  return element("img", { src: uri, alt: `Picture ${number}`, className: "picture" });
}

function show() {
  $("attached").hidden = !attached.length;
  $("attached").replaceChildren(...attached.map((uri, i) => {
    const remove = button("Remove", () => {
      attachOnly(attached.toSpliced(i, 1));
      $("prompt").focus();
    });
    remove.setAttribute("aria-label", `Remove picture ${i + 1}`);
    return element("li", {}, pictureView(uri, i + 1), remove);
  }));
}

async function add(files) {
  const found = [...files].filter((file) => file.type.startsWith("image/"));
  if (!found.length) return;
  if (!isReader) {
    showTrouble(REFUSED);
    return;
  }
  for (const file of found) {
    try {
      const uri = await toUri(READ.includes(file.type) ? file : await drawn(file));
      attachOnly([...attached, uri]);
    } catch {
      showTrouble(`${file.name} is not a picture that this browser can read.`);
    }
  }
}

function toUri(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

// The server's decoder does not know every kind that browsers do.
async function drawn(file) {
  const bitmap = await createImageBitmap(file);
  const canvas = element("canvas", { width: bitmap.width, height: bitmap.height });
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

export function startPictures(onTrouble) {
  showTrouble = onTrouble;
  $("attach").addEventListener("click", () => $("picture-file").click());
  $("picture-file").addEventListener("change", async () => {
    await add($("picture-file").files);
    $("picture-file").value = "";
    $("prompt").focus();
  });
  $("prompt").addEventListener("paste", (event) => {
    if (![...event.clipboardData.files].some((file) => file.type.startsWith("image/"))) return;
    event.preventDefault();
    add(event.clipboardData.files);
  });
  // a file that is dropped beside the field must not replace the page
  document.addEventListener("dragover", (event) => {
    if (event.dataTransfer?.types.includes("Files")) event.preventDefault();
  });
  document.addEventListener("drop", (event) => {
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    add(event.dataTransfer.files);
  });
}

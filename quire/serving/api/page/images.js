// Images of questions: read from files, shown small, and kept and sent as data: URLs.

import { element } from "./elements.js";

const LARGEST = 2048;  // pixels of the longer side, beyond which an image is made smaller before it is sent
const HEAVY = 4_000_000;  // bytes of a file from which it is written anew
const SMALL = 160;  // pixels of the longer side, as it is shown
const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];

// An image as turns have it, { name, url }. Raises a TypeError, in words, for a file that is none.
export async function readImage(file) {
  const bitmap = KINDS.includes(file.type) && await createImageBitmap(file).catch(() => null);
  if (!bitmap) throw new TypeError(`${file.name || "This"} is no image that can be read: take a PNG, JPEG, WebP, GIF or BMP.`);
  const { width, height } = bitmap, name = file.name || "Image";
  if (Math.max(width, height) <= LARGEST && file.size <= HEAVY) return { name, url: await dataUrl(file) };
  return { name, url: canvasOf(bitmap, LARGEST).toDataURL(file.type === "image/png" ? "image/png" : "image/jpeg", .92) };
}

// A small picture of it. Drawn, since the page's policy lets no address of an image be loaded.
export function thumbnail({ name, url }) {
  const canvas = element("canvas", { class: "thumbnail", role: "img", width: 1, height: 1, aria: { label: name }, title: name });
  createImageBitmap(blobOf(url)).then(bitmap => {
    const drawn = canvasOf(bitmap, SMALL);
    Object.assign(canvas, { width: drawn.width, height: drawn.height });
    canvas.getContext("2d").drawImage(drawn, 0, 0);
  }).catch(() => {});
  return canvas;
}

// Whether a value of a file is an image as turns have it.
export const isImage = image => typeof image?.name === "string" && /^data:image\/[a-z]+;base64,[A-Za-z0-9+/]+=*$/.test(image.url);

// What a question says: text, or parts.
export const contentOf = ({ text, images = [] }) =>
  images.length ? [...images.map(({ url }) => ({ type: "image_url", image_url: { url } })), ...(text ? [{ type: "text", text }] : [])] : text;

// The question of such a content; null where it is something else.
export function questionOf(content) {
  if (typeof content === "string") return { text: content };
  if (!Array.isArray(content)) return null;
  const images = content.map(({ image_url }, at) => ({ name: `Image ${at + 1}`, url: image_url?.url })).filter(isImage);
  return { text: content.map(({ text }) => text ?? "").join(""), ...(images.length && { images }) };
}

function canvasOf(bitmap, longest) {
  const scale = Math.min(1, longest / Math.max(bitmap.width, bitmap.height));
  const canvas = element("canvas", { width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale)) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas;
}

function dataUrl(file) {
  const reader = new FileReader();
  return new Promise((resolve, reject) => {
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(new TypeError(`${file.name} cannot be read.`)));
    reader.readAsDataURL(file);
  });
}

function blobOf(url) {
  const [head, data] = url.split(",");
  return new Blob([Uint8Array.from(atob(data), character => character.charCodeAt(0))], { type: head.slice(5).split(";")[0] });
}

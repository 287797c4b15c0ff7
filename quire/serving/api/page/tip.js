// The small note beside what the pointer or the keyboard is at.

import { byId } from "./elements.js";

const tip = byId("tip");

// Beside a point of the window; `content` is a text or a node.
export function showTip(content, x, y) {
  tip.replaceChildren(content);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - width - 8))}px`;
  tip.style.top = `${y + height + 24 > innerHeight ? Math.max(4, y - height - 10) : y + 16}px`;
}

export function hideTip() { tip.hidden = true; }

addEventListener("keydown", event => { if (event.key === "Escape") hideTip(); });

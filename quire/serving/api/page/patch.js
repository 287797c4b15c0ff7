// Brings shown nodes up to date. What is the same stays the same node, so that a selection in it stays, too.

// Give `shown` the children of `fresh`.
export function patch(shown, fresh) {
  const before = [...shown.childNodes], after = [...fresh.childNodes];
  after.forEach((node, at) => {
    const has = before[at];
    if (!has) shown.append(node);
    else if (!isAlike(has, node)) has.replaceWith(node);
    else if (has.nodeType === Node.TEXT_NODE) patchText(has, node.data);
    else if (!has.matches(".math, button")) {
      patchAttributes(has, node);
      patch(has, node);
    }
  });
  for (const node of before.slice(after.length)) node.remove();
}

const isAlike = (one, other) => one.nodeType === other.nodeType && one.nodeName === other.nodeName && one.className === other.className
  && one.dataset?.source === other.dataset?.source && one.dataset?.drawn === other.dataset?.drawn;

function patchText(shown, text) {
  if (text === shown.data) return;
  if (text.startsWith(shown.data)) shown.appendData(text.slice(shown.data.length));
  else shown.data = text;
}

function patchAttributes(shown, fresh) {
  for (const { name, value } of fresh.attributes) if (shown.getAttribute(name) !== value) shown.setAttribute(name, value);
  for (const { name } of [...shown.attributes]) if (!fresh.hasAttribute(name)) shown.removeAttribute(name);
}

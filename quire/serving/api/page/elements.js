// DOM nodes without markup: texts stay texts, whatever is in them.

export const byId = id => document.getElementById(id);

// An element with properties; `class`, `data`, `aria` and `on` set what their names say.
export function element(name, { class: classes, data = {}, aria = {}, on = {}, ...properties } = {}, ...children) {
  const made = document.createElement(name);
  if (classes) made.className = classes;
  Object.assign(made.dataset, data);
  for (const [key, value] of Object.entries(aria)) made.setAttribute(`aria-${key}`, value);
  for (const [event, listener] of Object.entries(on)) made.addEventListener(event, listener);
  Object.assign(made, properties);
  made.append(...children);
  return made;
}

export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// A button that copies `text(button)`, and says for a moment what it did.
export function copyButton(label, text) {
  const button = element("button", { type: "button", class: "quiet" }, label);
  button.addEventListener("click", async () => {
    const done = await copy(text(button));
    button.textContent = done ? "Copied" : "Not copied";
    setTimeout(() => { button.textContent = label; }, 1500);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {  // without TLS there is no clipboard but this one
    const area = element("textarea", { value: text, class: "unseen" });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

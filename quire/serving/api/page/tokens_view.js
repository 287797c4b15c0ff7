// An answer token by token: how sure the model was, and what else it could have said.

import { element } from "./elements.js";
import { hideTip, showTip } from "./tip.js";

const SURE = [0.3, 0.6, 0.9, 0.99];  // probabilities below which a token has the colour 0, 1, 2, 3

const sureness = logprob => SURE.findIndex(bound => Math.exp(logprob) < bound);
const percent = logprob => {
  const value = Math.exp(logprob) * 100;
  return value >= 99.95 ? "100%" : value < 0.01 ? "<0.01%" : `${value.toPrecision(3)}%`;
};
const visible = token => token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";

export function tokensView(tokens) {
  const spans = tokens.map(({ token, logprob }) => element("span", { class: "token", data: { sure: sureness(logprob) } }, token));
  const text = element("div", { class: "tokens", tabIndex: 0, role: "group", aria: { label: "Tokens of the answer; arrow keys go from one to the next" } }, ...spans);
  const said = element("p", { class: "unseen", role: "status" });
  let current = -1;

  function show(at, speak) {
    spans[current]?.classList.remove("current");
    current = at;
    if (!spans[at]) return hideTip();
    if (speak) { spans[at].classList.add("current"); said.textContent = words(tokens[at]); }
    const { left, bottom } = spans[at].getBoundingClientRect();
    showTip(alternatives(tokens[at]), left, bottom - 8);
  }

  text.addEventListener("pointerover", event => show(spans.indexOf(event.target), false));
  text.addEventListener("pointerleave", hideTip);
  text.addEventListener("blur", () => show(-1, false));
  text.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    show(Math.max(0, Math.min(spans.length - 1, current + step)), true);
  });
  return element("div", {}, text, scale(), said);
}

function alternatives({ token, logprob, top_logprobs: others }) {
  const rows = others.some(other => other.token === token) ? others : [{ token, logprob }, ...others];
  return element("table", {}, ...rows.map(row => element("tr", { class: row.token === token ? "chosen" : "" },
    element("td", {}, visible(row.token)), element("td", {}, percent(row.logprob)))));
}

const words = ({ token, logprob, top_logprobs: others }) =>
  `“${token}”, ${percent(logprob)}; ` + others.filter(other => other.token !== token).map(other => `“${other.token}” ${percent(other.logprob)}`).join(", ");

function scale() {
  const names = ["below 30%", "below 60%", "below 90%", "below 99%"];
  return element("div", { class: "scale" }, ...names.map((name, sure) => element("span", {}, element("span", { class: "token", data: { sure } }, " "), name)));
}

// Colours for code: comments, texts, numbers, and the words that most languages share.

const MAX_LENGTH = 50_000;  // longer code stays plain
const WORDS = new Set((
  "and as assert async await break case catch class const continue def default del do elif else enum except export extends " +
  "false False finally fn for from func function global if impl import in interface is let match mut new nil None nonlocal " +
  "not null or pass private public pub raise return self static struct super switch this throw true True try type typeof " +
  "undefined use var void while with yield SELECT FROM WHERE JOIN ON GROUP BY ORDER INSERT UPDATE DELETE VALUES CREATE TABLE"
).split(" "));
const WITH_HASH = /^(?:py|python|python3|sh|bash|zsh|shell|console|rb|ruby|r|pl|perl|ya?ml|toml|ini|make|makefile|dockerfile)$/i;
const PARTS = { hash: parts("#.*"), slashes: parts(String.raw`/\*[^]*?(?:\*/|$)|//.*|--\s.*`) };

function parts(comment) {
  return new RegExp([
    `(?<comment>${comment})`,
    String.raw`(?<string>"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'|` + "`(?:[^`\\\\]|\\\\[^])*`?)",
    String.raw`(?<number>\b\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?\b)`,
    String.raw`(?<word>[A-Za-z_$][\w$]*)`,
  ].join("|"), "g");
}

export function codeColours(code, language) {
  const made = document.createDocumentFragment();
  if (code.length > MAX_LENGTH) {
    made.append(code);
    return made;
  }
  let at = 0;
  for (const found of code.matchAll(WITH_HASH.test(language) ? PARTS.hash : PARTS.slashes)) {
    const kind = Object.keys(found.groups).find(name => found.groups[name] !== undefined);
    if (kind === "word" && !WORDS.has(found[0])) continue;
    const span = document.createElement("span");
    span.className = `code-${kind}`;
    span.textContent = found[0];
    made.append(code.slice(at, found.index), span);
    at = found.index + found[0].length;
  }
  made.append(code.slice(at));
  return made;
}

// How full the model's context is, and where a conversation has to begin to fit into it.

const CHARACTERS = 3;  // of a token, while none was counted yet
const ROOMY = 0.5;  // share of the context that a shortened conversation takes
const FULL = 0.9;

// Of images what they are called, which says nothing about their tokens: the server counts these.
export const sizeOf = messages => JSON.stringify(messages, (key, value) => key === "url" ? "" : value).length;

// Tokens of a conversation with what is being written; exact where the server has counted them.
export function usedTokens(conversation, draft = "") {
  const { path } = conversation, written = draft.length / charactersPerToken(path), last = path.at(-1);
  if (!last) return Math.round(written);
  const { usage, sent } = last.answer ?? {};
  if (usage && sent.from === conversation.from) return Math.round(usage.prompt_tokens + usage.completion_tokens + written);
  return Math.round(estimated(conversation, last) + written);
}

// Leave out so many of the oldest turns before `last` that there is room for an answer of it. `isForced`: also where all
// seems to fit.
export function makeRoom(conversation, last, limit, isForced) {
  if (!limit || (!isForced && estimated(conversation, last) < FULL * limit)) return;
  const path = conversation.path, began = path.findIndex(turn => turn.id === conversation.from);
  const questions = path.slice(began + 1, path.indexOf(last) + 1).filter(turn => !turn.answer && turn.parent !== null);
  for (const question of questions) {
    conversation.from = question.id;
    if (estimated(conversation, last) <= ROOMY * limit) return;
  }
}

const estimated = (conversation, last) => sizeOf(conversation.messages(last, "")) / charactersPerToken(conversation.path);

function charactersPerToken(path) {
  const counted = path.findLast(turn => turn.answer?.usage && turn.answer.sent.characters)?.answer;
  return counted ? counted.sent.characters / counted.usage.prompt_tokens : CHARACTERS;
}

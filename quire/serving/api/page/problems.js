// What goes wrong, in words for whoever asked.

const TOO_LONG = "context_length_exceeded";
const BY_STATUS = {
  0: () => "The server does not answer. See whether it still runs and whether this device reaches it, then try again.",
  401: (error, key) => key ? "The server refused the key. Give it another one with “Key” at the top." : "The server wants an API key: give it with “Key” at the top.",
  429: () => "The server has as many requests as it takes.",
  503: error => `The server takes no requests now: ${error.message}`,
};

// The fields of an answer that say it; isText: a text was sent that gets no answer.
export function problemOf(error, key, isText = false) {
  if (error.status === undefined) return { problem: "The connection was lost before the answer was complete. What came until then is kept." };
  if (error.code === TOO_LONG) return { problem: tooLong(error.message, isText), isTooLong: true };
  const words = (BY_STATUS[error.status] ?? (() => error.message))(error, key);
  return { problem: words + (error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "") };
}

function tooLong(message, isText) {
  const found = /has (?:at least )?(\d+) tokens(.*); the maximum context length is (\d+)/.exec(message);
  if (!found) return message;
  const [, has, more, longest] = found, number = text => Number(text).toLocaleString("en");
  if (isText) return `A text has ${number(has)} tokens: the model reads ${number(longest)}. Shorten it.`;
  const asked = /is (\d+)/.exec(more)?.[1];
  return `The conversation has ${number(has)} tokens${asked ? ` and max tokens is ${number(asked)}` : ""}: the model reads and writes ${number(longest)} altogether.`;
}

// Server-sent events through fetch, which can send an Authorization header and a body where EventSource cannot.

const MOST_HELD = 1 << 24; // characters of one unfinished event: a bound on what a broken server makes us keep

/** The `data` of each event of a response, in order, until it ends. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (held + value).split(/\r?\n/);
      held = lines.pop();
      if (held.length > MOST_HELD) throw new Error("the server sent an event without an end");
      for (const line of lines) {
        if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

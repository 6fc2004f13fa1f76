// What the server tells of its engine (serve/live.py), as the view needs it.

const OWNERS = 8; // colours that the style sheet has for them

/** Kinds of block: a class of the style sheet and a word. Of those that share a cell of the map the last is seen. */
export const KINDS = [
  { style: "free", word: "free" },
  { style: "cached", word: "cached" },
  ...Array.from({ length: OWNERS }, (_, owner) => ({ style: `owner-${owner}`, word: "used" })),
  { style: "shared", word: "shared" },
];
const FIRST_OWNER = 2;
const SHARED = KINDS.length - 1;
const MOST_BLOCKS = 1 << 24; // a bound on what a broken server makes us allocate

/** The part of an event that is shown, or null while there is no engine. `last` is what was read before. */
export function read(event, last) {
  const { engine } = event;
  if (!engine) return null;
  const { work } = engine;
  const elapsed = last ? event.at - last.at : 0;
  return {
    at: event.at,
    generated: work.generation_tokens,
    tokensPerSecond: elapsed > 0 ? Math.max(0, work.generation_tokens - last.generated) / elapsed : 0,
    running: engine.running.length,
    waiting: engine.waiting,
    sequences: engine.running.reduce((sum, request) => sum + request.sequences, 0),
    cachedShare: work.prompt_tokens ? work.cached_tokens / work.prompt_tokens : NaN,
    waste: work.waste,
    preemptions: work.preemptions,
    pool: pool(engine.pool),
    drafts: engine.drafts,
    store: event.store ?? null,
  };
}

function pool(told) {
  const kinds = new Uint8Array(Math.min(told.blocks, MOST_BLOCKS));
  const owners = new Int32Array(kinds.length).fill(-1);
  let from = 0;
  for (const [length, state, owner] of told.runs) {
    kinds.fill(kindOf(told.states[state], owner), from, from + length);
    owners.fill(owner ?? -1, from, from + length);
    from += length;
  }
  const { blank, cached, used, shared } = told.counts;
  return {
    kinds,
    usage: told.usage,
    dtype: told.dtype,
    bytes: told.blocks * told.block_bytes,
    counts: [
      { style: "used", word: "used", number: used },
      { style: "shared", word: "shared", number: shared },
      { style: "cached", word: "cached", number: cached },
      { style: "free", word: "free", number: blank },
    ],
    describe: (block) => (owners[block] < 0 ? KINDS[kinds[block]].word : `used by request ${owners[block]}`),
  };
}

function kindOf(state, owner) {
  if (state === "used") return FIRST_OWNER + (Math.max(0, owner ?? 0) % OWNERS);
  return { cached: 1, shared: SHARED }[state] ?? 0;
}

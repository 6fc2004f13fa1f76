// A small part of Markdown, as DOM nodes: paragraphs, headings, lists, code, bold, italic. Links and HTML stay text.
// Every scan is linear in the text, which is whatever a model wrote.

import { make } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+(.*)$/;
const MARK = /`+|\*\*|\*/g;
const DEEPEST = 4;

/** Show `text` in `container`. What it showed before and has not changed keeps its nodes, and so a selection. */
export function render(container, text) {
  const next = split(text);
  const before = container.renderedBlocks ?? [];
  let same = 0;
  while (same < next.length && same < before.length && next[same].key === before[same]) same += 1;
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const block of next.slice(same)) container.append(build(block));
  container.renderedBlocks = next.map((block) => block.key);
}

/** The blocks of a text: {kind, lines, key, ...}. */
export function split(text) {
  const blocks = [];
  let open = null;
  const start = (kind, more) => blocks.push(open = { kind, lines: [], ...more });
  for (const line of text.replaceAll("\r\n", "\n").split("\n")) {
    if (open?.kind === "code") {
      if (closes(line, open.fence)) open = null;
      else open.lines.push(line);
      continue;
    }
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    if (fence) {
      start("code", { fence: fence[1], language: fence[2] });
    } else if (heading) {
      start("heading", { level: heading[1].length });
      open.lines.push(heading[2]);
      open = null;
    } else if (line.trim() === "") {
      if (open?.kind === "list") open.lines.push("");
      else open = null;
    } else {
      const item = ITEM.test(line);
      const goesOn = open?.kind === "list" && (item || /^\s/.test(line) || open.lines.at(-1) !== "");
      if (item && open?.kind !== "list") start("list");
      else if (!item && !goesOn && open?.kind !== "paragraph") start("paragraph");
      open.lines.push(line);
    }
  }
  for (const block of blocks) block.key = JSON.stringify(block);
  return blocks;
}

function closes(line, fence) {
  const end = line.trim();
  return end.length >= fence.length && end === fence[0].repeat(end.length);
}

function build(block) {
  if (block.kind === "code") return codeBlock(block);
  if (block.kind === "heading") return make(`h${Math.min(6, block.level + 2)}`, {}, inline(block.lines[0]));
  if (block.kind === "list") return list(block.lines);
  return make("p", {}, inline(block.lines.join("\n")));
}

function codeBlock(block) {
  const text = block.lines.join("\n");
  const copy = make("button", { type: "button", class: "quiet copy-code", "data-copy": "" }, "Copy");
  const bar = make("figcaption", {}, make("span", {}, block.language || "code"), copy);
  return make("figure", { class: "code" }, bar, make("pre", { tabindex: "0" }, make("code", {}, text)));
}

function list(lines) {
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found) items.push({ indent: width(found[1]), mark: found[2], lines: [found[3]] });
    else if (line.trim()) items.at(-1).lines.push(line.trim());
  }
  return level(items, 0, items.length, 0);
}

const width = (blank) => blank.replaceAll("\t", "    ").length;

function level(items, from, to, depth) {
  const first = items[from];
  const ordered = /\d/.test(first.mark);
  const root = make(ordered ? "ol" : "ul", ordered ? { start: parseInt(first.mark, 10) } : {});
  for (let at = from; at < to;) {
    let next = at + 1;
    while (next < to && items[next].indent > first.indent + 1) next += 1;
    const entry = make("li", {}, inline(items[at].lines.join("\n")));
    if (next > at + 1 && depth < DEEPEST) entry.append(level(items, at + 1, next, depth + 1));
    else next = at + 1;
    root.append(entry);
    at = next;
  }
  return root;
}

function inline(text, depth = 0) {
  const nodes = [];
  const never = new Set(); // marks that do not occur again: not looked for twice
  let shown = 0;
  MARK.lastIndex = 0;
  for (let at = 0, found; (found = next(text, at)); ) {
    const mark = found[0];
    const from = found.index + mark.length;
    const end = never.has(mark) ? -1 : closing(text, mark, from);
    if (end < 0) never.add(mark);
    if (end <= from || (mark[0] === "*" && (depth > 1 || /\s/.test(text[from]) || /\s/.test(text[end - 1])))) {
      at = from;
      continue;
    }
    if (found.index > shown) nodes.push(text.slice(shown, found.index));
    const inside = text.slice(from, end);
    if (mark[0] === "`") nodes.push(make("code", {}, inside));
    else nodes.push(make(mark === "**" ? "strong" : "em", {}, inline(inside, depth + 1)));
    at = shown = end + mark.length;
  }
  if (shown < text.length) nodes.push(text.slice(shown));
  return nodes;
}

function next(text, from) {
  MARK.lastIndex = from;
  return MARK.exec(text);
}

function closing(text, mark, from) {
  if (mark[0] === "*") return text.indexOf(mark, from);
  for (let end = text.indexOf(mark, from); end >= 0; ) {
    let past = end + mark.length;
    while (text[past] === "`") past += 1;
    if (past === end + mark.length) return end;
    end = text.indexOf(mark, past);
  }
  return -1;
}

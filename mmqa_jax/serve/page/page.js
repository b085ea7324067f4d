"use strict";
// Everything that a document, a question or a model wrote is put on the page as text.

const $ = (id) => document.getElementById(id);
const form = $("form"), question = $("question"), system = $("system"), picture = $("picture");
let about = { systems: [] };
let chosen = null; // the question's picture as a data: URL
let running = null; // AbortController of the answer that is coming

function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

async function call(path, options = {}) {
  const key = sessionStorage.getItem("key");
  const headers = { ...(options.headers || {}), ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const reply = await fetch(path, { ...options, headers });
  if (reply.status === 401) {
    await askKey();
    return call(path, options);
  }
  if (!reply.ok) {
    const found = await reply.json().catch(() => null);
    throw new Error(found?.error?.message || `The server answered ${reply.status}.`);
  }
  return reply;
}

function askKey() {
  return new Promise((resolve) => {
    $("unlock").onsubmit = () => {
      sessionStorage.setItem("key", $("key").value);
      $("key").value = "";
      resolve();
    };
    if (!$("locked").open) $("locked").showModal();
  });
}

async function begin() {
  await showFolder();
  document.title = about.title;
  $("title").textContent = about.title;
  for (const one of about.systems) {
    const option = make("option", "", one.label);
    option.value = one.name;
    system.append(option);
  }
  choose();
  for (const turn of conversation.open(about.title)) card(turn.question, null).answer(turn.row);
  if (conversation.turns.length) $("answers").lastElementChild.scrollIntoView();
  showTools();
}

// What the server has read, and whether it takes more.
async function showFolder() {
  about = await (await call("/api/about")).json();
  $("add").hidden = !about.uploads;
  $("documents").accept = about.endings.join(",");
  const files = Object.entries(about.files);
  $("read").hidden = !files.length;
  $("read").querySelector("summary").textContent = `What was read (${files.length.toLocaleString("en")} ${files.length === 1 ? "file" : "files"})`;
  $("read").querySelector("ul").replaceChildren(...files.map(([file, count]) =>
    make("li", "", `${file}: ${count.toLocaleString("en")} ${count === 1 ? "source" : "sources"}`)));
  $("unread").hidden = !about.unread.length;
  $("unread").querySelector("ul").replaceChildren(...about.unread.map((line) => make("li", "", line)));
  $("credits").replaceChildren(...about.credits.map((line) => make("p", "", line)));
}

async function addDocuments() {
  const files = [...$("documents").files];
  $("refused").textContent = "";
  for (const [index, file] of files.entries()) {
    $("added").textContent = `Reading ${file.name} (${index + 1} of ${files.length}) ...`;
    try {
      const data = (await dataOf(file)).split(",")[1] || "";
      const reply = await call("/api/upload", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ name: file.name, data }),
      });
      const { sources } = await reply.json();
      $("added").textContent = `${file.name} was added: ${sources} ${sources === 1 ? "source" : "sources"}.`;
    } catch (error) {
      $("added").textContent = "";
      $("refused").textContent = sentenceOf(error, false);
      break;
    }
  }
  $("documents").value = "";
  await showFolder();
  choose();
}

function choose() {
  const one = about.systems.find((found) => found.name === system.value);
  if (!one) return;
  const count = about.sources ? `${about.sources.toLocaleString("en")} sources. ` : "";
  $("about").textContent = count + one.about;
  $("examples").replaceChildren(...one.examples.map((text) => {
    const button = make("button", "", text);
    button.type = "button";
    button.addEventListener("click", () => { question.value = text; ask(); });
    return button;
  }));
  $("attach").hidden = !one.pictures;
  if (!one.pictures) forget();
}

function showTools() {
  $("tools").hidden = !conversation.turns.length;
}

function forget() {
  chosen = null;
  picture.value = "";
  $("chosen").hidden = true;
}

picture.addEventListener("change", async () => {
  const file = picture.files[0];
  if (!file) return;
  $("refused").textContent = "";
  try {
    chosen = await readPicture(file);
    $("preview").src = chosen;
    $("chosen").hidden = false;
  } catch (error) {
    forget();
    $("refused").textContent = error.message;
  }
});

function place(source) {
  const parts = [source.file || source.title || source.id];
  if (source.page) parts.push(`page ${source.page}`);
  const [first, last] = source.lines || [];
  if (first) parts.push(first === last ? `line ${first}` : `lines ${first}-${last}`);
  const cells = (source.cells || []).filter((cell) => !cell.startsWith("slide "));
  if (cells.length) parts.push(cells.length === 1 ? cells[0] : `${cells[0]} to ${cells.at(-1)}`);
  return parts.join(", ");
}

function pictureOf(source, className) {
  const image = make("img", className);
  image.alt = source.title || source.text.slice(0, 80);
  image.loading = "lazy";
  call(addressOf("picture", source))
    .then((reply) => reply.blob())
    .then((blob) => { image.src = URL.createObjectURL(blob); })
    .catch(() => image.remove());
  return image;
}

function sourceButton(source, scored) {
  const button = make("button", "source");
  button.type = "button";
  button.append(make("span", "number", String(source.number)));
  const body = make("span");
  const title = source.file && source.title && !source.title.startsWith(source.file) ? ` · ${source.title}` : "";
  body.append(make("span", "place", place(source) + title));
  body.append(make("span", "text", source.text));
  if (scored && source.score !== null) body.append(make("span", "score", `score ${source.score.toFixed(3)}`));
  button.append(body);
  if (source.image) button.append(pictureOf(source, ""));
  button.addEventListener("click", () => openSource(source));
  const item = make("li");
  item.append(button);
  return item;
}

function marked(text, quote) {
  const mark = make("mark"), at = quote ? text.indexOf(quote.text) : -1;
  if (at < 0) mark.append(text);
  else mark.append(text.slice(0, at), make("b", "", quote.text), text.slice(at + quote.text.length));
  return mark;
}

// Where a source stands in its own file: the page of a PDF, the rows of a sheet, the lines of a text.
async function inOriginal(source, quote) {
    if (/\.pdf$/i.test(source.file) && source.page) {
    const reply = await call(addressOf("page", source));
    const [width, height] = reply.headers.get("X-Page-Size").split(" ").map(Number);
    const sheet = make("div", "sheet"), image = make("img");
    image.alt = `Page ${source.page} of ${source.file}, with the passage marked`;
    image.src = URL.createObjectURL(await reply.blob());
    await image.decode().catch(() => {});
    sheet.append(image);
    const boxes = [["box", source.boxes], ["box quoted", quote?.boxes || []]];
    for (const [name, [left, top, right, bottom]] of boxes.flatMap(([name, all]) => all.map((one) => [name, one]))) {
      const box = make("div", name);
      box.style.left = `${100 * left / width}%`;
      box.style.top = `${100 * top / height}%`;
      box.style.width = `${100 * (right - left) / width}%`;
      box.style.height = `${100 * (bottom - top) / height}%`;
      sheet.append(box);
    }
    return sheet;
  }
  if (source.rows.length) {
    const table = make("table", "cells"), header = source.text.split("\n")[0];
    const rows = header === source.rows[0].text ? source.rows : [{ cell: "", text: header }, ...source.rows];
    for (const { cell, text } of rows) {
      const row = make("tr", cell ? "" : "head");
      row.append(make("th", "", cell), ...text.split(" | ").map((value) => make("td", "", value)));
      table.append(row);
    }
    return table;
  }
  if (!source.lines) return null;
  const lines = (await (await call(addressOf("original", source))).text()).split("\n");
  const [first, last] = source.lines, begin = Math.max(1, first - 12);
  const list = make("ol", "lines");
  list.start = begin;
  for (const [index, text] of lines.slice(begin - 1, last + 12).entries()) {
    const number = begin + index, line = make("li"), inside = number >= first && number <= last;
    const quoted = inside && quote?.lines && number >= quote.lines[0] && number <= quote.lines[1];
    line.append(inside ? marked(text, quoted ? quote : null) : text);
    list.append(line);
  }
  return list;
}

function originalLink(source) {
  const link = make("a", "original", "Open the original file");
  link.href = addressOf("original", source) + (source.page ? `#page=${source.page}` : "");
  link.target = "_blank";
  link.rel = "noopener";
  link.addEventListener("click", async (event) => {
    if (!sessionStorage.getItem("key")) return;
    event.preventDefault(); // a link sends no key
    const blob = await (await call(link.href)).blob(), save = make("a");
    save.href = URL.createObjectURL(blob);
    save.download = source.file.split("/").pop();
    save.click();
  });
  return link;
}

async function openSource(source) {
  $("reader-title").textContent = source.title || source.file || source.id;
  $("reader-place").textContent = place(source);
  const body = $("reader-body");
  body.replaceChildren(make("p", "", "Opening ..."));
  $("reader").showModal();
  try {
    const found = { ...(await (await call(addressOf("source", source))).json()), folder: source.folder };
    const parts = [];
    if (found.original) parts.push(originalLink(found));
    const shown = found.original ? await inOriginal(found, source.quote).catch((error) => make("p", "bad", error.message)) : null;
    if (shown) parts.push(shown);
    if (!["lines", "cells"].includes(shown?.className)) {
      parts.push(...found.before.map((one) => make("p", "", one.text)));
      if (found.image) parts.push(pictureOf(found, ""));
      parts.push(marked(found.text, source.quote), ...found.after.map((one) => make("p", "", one.text)));
    }
    body.replaceChildren(...parts);
    body.querySelector(".sheet .box, mark")?.scrollIntoView({ block: "center" });
  } catch (error) {
    body.replaceChildren(make("p", "", error.message));
  }
}

function withCitations(text, sources) {
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(/\[(\d+(?:\s*[,;]\s*\d+)*)\]/g)) {
    const named = found[1].split(/[,;]/).map((one) => sources.find((source) => source.number === Number(one)));
    if (named.includes(undefined)) continue;
    parts.push(document.createTextNode(text.slice(end, found.index)));
    for (const source of named) {
      const chip = make("button", "cite", String(source.number));
      chip.type = "button";
      chip.title = place(source);
      chip.setAttribute("aria-label", `Source ${source.number}: ${place(source)}`);
      chip.addEventListener("click", () => openSource(source));
      parts.push(chip);
    }
    end = found.index + found[0].length;
  }
  parts.push(document.createTextNode(text.slice(end)));
  return parts;
}

function tree(step) {
  const item = make("li");
  if (step.prompt) {
    const fold = make("details");
    fold.append(make("summary", "who", step.who), make("pre", "", step.prompt));
    item.append(fold);
  } else {
    item.append(make("span", "who", step.who));
  }
  if (step.steps?.length) {
    const inner = make("ul");
    inner.append(...step.steps.map(tree));
    item.append(inner);
  }
  return item;
}

function card(text, image) {
  const node = $("answer-template").content.cloneNode(true).querySelector("article");
  const part = (name) => node.querySelector(`.${name}`);
  part("asked").textContent = text;
  if (image) {
    part("asked-picture").src = image;
    part("asked-picture").hidden = false;
  }
  $("empty").hidden = true;
  $("answers").append(node);
  let sources = [];
  let said = "";
  const showCandidates = () => {
    part("candidates").hidden = !sources.length;
    part("candidates").querySelector("summary").textContent = `What was found (${sources.length})`;
    part("candidates").querySelector("ol").replaceChildren(...sources.map((one) => sourceButton(one, true)));
  };
  return {
    node,
    state(sentence, bad) {
      part("state").textContent = sentence;
      part("state").classList.toggle("bad", Boolean(bad));
    },
    queries(queries) {
      part("hops").hidden = queries.length < 2;
      part("hops").querySelector("ol").replaceChildren(...queries.map((one) => make("li", "", one)));
    },
    sources(found) {
      sources = found;
      showCandidates();
      this.state("Reading ...");
    },
    text(piece) {
      said += piece;
      this.state("");
      part("said").replaceChildren(...withCitations(said, sources));
    },
    answer(row) {
      this.state("");
      sources = row.sources;
      part("said").classList.toggle("none", !row.found);
      const cite = (text) => withCitations(text, sources);
      part("said").classList.add("whole");
      part("said").replaceChildren(...nodesOf(row.elements?.length ? row.elements : [row.answer || "(no answer)"], cite));
      part("copy").hidden = false;
      part("copy").onclick = () => copyTurn({ question: text, row }, part("copy"));
      part("first").hidden = !row.quote;
      part("said").classList.toggle("unsure", Boolean(row.quote));
      if (row.quote) {
        const source = { ...sources.find((one) => one.id === row.quote.id), quote: row.quote };
        const open = make("button", "cite", String(source.number));
        open.type = "button";
        open.setAttribute("aria-label", `Source ${source.number}: ${place(source)}`);
        open.addEventListener("click", () => openSource(source));
        const { passage, text: span } = row.quote, at = passage.indexOf(span);
        const quoted = [passage.slice(0, at), make("mark", "", span), passage.slice(at + span.length)];
        part("first").querySelector("blockquote").replaceChildren(...quoted, " ", open);
      }
      part("notes").replaceChildren(...row.notes.map((one) => make("li", "", one)));
      const cited = sources.filter((one) => one.cited !== null);
      part("sources").replaceChildren(...cited.map((one) => sourceButton(one, false)));
      if (row.picture && !image) {
        part("asked-picture").src = row.picture;
        part("asked-picture").hidden = false;
      }
      if (row.steps?.length) {
        part("steps").hidden = false;
        const list = make("ul");
        list.append(...row.steps.map(tree));
        part("tree").replaceChildren(list);
      }
      showCandidates();
      const uncited = row.found && sources.length && !cited.length ? "The answer cites no source. " : "";
      part("seconds").textContent = `${uncited}${row.seconds.toFixed(1)} s`;
    },
  };
}

async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    left += value;
    const parts = left.split("\n\n");
    left = parts.pop();
    for (const part of parts) {
      const kind = /^event: (.*)$/m.exec(part), data = /^data: (.*)$/m.exec(part);
      if (kind && data) yield [kind[1], JSON.parse(data[1])];
    }
  }
}

async function ask() {
  const text = question.value.trim();
  if (!text || running) return;
  const body = { question: text, system: system.value, history: conversation.sent() };
  if (chosen) body.image = chosen;
  const shown = card(text, chosen);
  shown.state("Searching ...");
  shown.node.scrollIntoView({ block: "start", behavior: "smooth" });
  question.value = "";
  grow();
  forget();
  running = new AbortController();
  let isAnswering = false;
  $("stop").hidden = false;
  $("send").disabled = true;
  try {
    const reply = await call("/api/ask", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: running.signal,
    });
    let ended = false;
    isAnswering = true;
    for await (const [kind, value] of events(reply)) {
      if (kind === "error") throw new Error(value.message);
      shown[kind]?.(value);
      if (kind !== "answer") continue;
      ended = true;
      conversation.add({ question: text, row: value });
      showTools();
    }
    if (!ended) throw new Error("The server ended the answer early; ask again.");
  } catch (error) {
    shown.state(sentenceOf(error, isAnswering), error.name !== "AbortError");
  } finally {
    running = null;
    $("stop").hidden = true;
    $("send").disabled = false;
    question.focus();
  }
}

function grow() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight + 2}px`;
}

form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });
question.addEventListener("input", grow);
question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !event.target.closest("textarea, input, select, dialog")) {
    event.preventDefault();
    question.focus();
  }
});
for (const [label, input] of [["attach", picture], ["add", $("documents")]]) {
  $(label).addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); input.click(); }
  });
}
$("documents").addEventListener("change", addDocuments);
system.addEventListener("change", choose);
$("remove").addEventListener("click", forget);
$("stop").addEventListener("click", () => running?.abort());
$("close").addEventListener("click", () => $("reader").close());
$("reader").addEventListener("click", (event) => { if (event.target === $("reader")) $("reader").close(); });
$("export").addEventListener("click", exportConversation);
$("new").addEventListener("click", () => {
  running?.abort();
  conversation.clear();
  $("answers").replaceChildren();
  $("empty").hidden = false;
  showTools();
  question.focus();
});
begin().catch((error) => { $("about").textContent = sentenceOf(error, false); });
question.focus();

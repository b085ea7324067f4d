"use strict";
// The conversation: Markdown as nodes, what the browser keeps of it, copies and exports.

const TAGS = new Set([
  "p", "em", "strong", "s", "ul", "ol", "li", "table", "thead", "tr", "td", "pre", "code",
  "blockquote", "h3", "a", "br", "hr", "span",
]);
const MOST_TURNS = 50; // kept in the browser

// Nodes of an answer's elements ([tag, children, address]); `ofText` makes nodes of a text.
function nodesOf(elements, ofText) {
  return elements.flatMap((one) => {
    if (typeof one === "string") return ofText(one);
    const [tag, children, address] = one;
    if (!TAGS.has(tag)) return nodesOf(children, ofText);
    const node = document.createElement(tag);
    if (tag === "a" && /^https?:/.test(address)) {
      node.href = address;
      node.rel = "noopener noreferrer";
      node.target = "_blank";
    }
    node.append(...nodesOf(children, tag === "code" || tag === "pre" ? (text) => [text] : ofText));
    return [node];
  });
}

// Questions and answers of this page's conversation, kept in the browser under the page's title.
const conversation = {
  turns: [],
  place: "",
  open(title) {
    this.place = `conversation ${title}`;
    try {
      const kept = JSON.parse(localStorage.getItem(this.place) || "[]");
      this.turns = Array.isArray(kept) ? kept.filter((turn) => turn?.row?.sources) : [];
    } catch {
      this.turns = []; // damaged, or the browser keeps nothing
    }
    return this.turns;
  },
  add(turn) {
    this.turns = [...this.turns, turn].slice(-MOST_TURNS);
    this.keep();
  },
  clear() {
    this.turns = [];
    this.keep();
  },
  keep() {
    for (let first = 0; first <= this.turns.length; first += 1) {
      try { // the oldest go where there is no room
        localStorage.setItem(this.place, JSON.stringify(this.turns.slice(first)));
        return;
      } catch (error) {
        if (error.name !== "QuotaExceededError") return;
      }
    }
  },
  // What the server is told of it.
  sent() {
    return this.turns.slice(-8).map(({ question, row }) => ({ question, answer: row.answer }));
  },
};

// Where the server has something of a source: of which of its folders the source says.
function addressOf(kind, source) {
  const folder = source.folder ? `?folder=${encodeURIComponent(source.folder)}` : "";
  return `/api/${kind}/${encodeURIComponent(source.id)}${folder}`;
}

// A turn as Markdown, its sources below it.
function written({ question, row }) {
  const cited = row.sources.filter((source) => source.cited !== null);
  const lines = cited.map((source) => `[${source.number}] ${place(source)}`);
  const quote = row.quote ? [`> ${row.quote.text} (${place(row.quote)})`, "The model, not sure:"] : [];
  return [`## ${question}`, ...quote, row.marked || row.answer, ...(lines.length ? [lines.join("\n")] : [])].join("\n\n");
}

function exportConversation() {
  const text = [`# ${document.title}`, ...conversation.turns.map(written)].join("\n\n");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([`${text}\n`], { type: "text/markdown" }));
  link.download = "conversation.md";
  link.click();
  URL.revokeObjectURL(link.href);
}

async function copyTurn(turn, button) {
  try {
    await navigator.clipboard.writeText(written(turn));
    button.textContent = "Copied";
  } catch {
    button.textContent = "The browser does not allow copies here";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}

// A sentence for an error of fetch or of a stream, which browsers word as they like.
function sentenceOf(error, isAnswering) {
  if (error.name === "AbortError") return "Stopped.";
  if (!(error instanceof TypeError) && error.name !== "NetworkError") return error.message;
  return isAnswering
    ? "The connection broke before the answer ended; ask again."
    : "The server cannot be reached; see whether it still runs, and ask again.";
}

// A file as a data: URL.
function dataOf(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onerror = () => reject(new Error(`${file.name} cannot be read; choose it again.`));
    reader.onload = () => resolve(reader.result);
    reader.readAsDataURL(file);
  });
}

// The picture of a file as a data: URL; an error where the browser cannot show it.
async function readPicture(file) {
  const image = new Image();
  image.src = await dataOf(file);
  await image.decode().catch(() => {
    throw new Error(`${file.name} is no picture that can be shown; choose a PNG, JPEG, WebP or GIF.`);
  });
  return image.src;
}

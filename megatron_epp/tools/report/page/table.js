// The table of chunks of the listed plan.

const table = {sort: "chunk", descending: false, plan: null, rows: new Map()};
const MOST_SEGMENTS = 12;

// Compute time of every chunk over all ranks.
function computeTimes(plan) {
  if (plan.times) return plan.times;
  const times = new Float64Array(plan.chunks.tokens.length);
  const {planned} = plan;
  for (let i = 0; i < planned.first[planned.numRanks]; i++) times[planned.chunk[i]] += planned.end[i] - planned.start[i];
  return (plan.times = times);
}

// Fill the table if the plan, its order or the search has changed.
function fillTable() {
  const plan = PLANS[state.plan];
  const times = computeTimes(plan);
  const body = document.querySelector("#chunks tbody");
  const wanted = document.getElementById("find").value.trim();
  const value = {
    chunk: (c) => c,
    kind: (c) => plan.chunks.kind[c],
    tokens: (c) => plan.chunks.tokens[c],
    time: (c) => times[c],
    sequence: (c) => plan.chunks.segments[c][0],
  }[table.sort];
  const order = [...plan.chunks.tokens.keys()].filter(
    (c) => wanted === "" || plan.segments(c).some((one) => `${one.sequence}` === wanted),
  );
  order.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : a - b) * (table.descending ? -1 : 1));
  table.rows.clear();
  const rows = document.createDocumentFragment();
  for (const chunk of order) rows.append(rowOf(plan, chunk, times[chunk]));
  body.replaceChildren(rows);
  table.plan = plan;
  document.getElementById("chunks-title").textContent =
    `${formatCount(order.length)} chunks${PLANS.length > 1 ? ` of ${plan.name}` : ""}`;
  for (const button of document.querySelectorAll("#chunks th button")) {
    const isSorted = button.dataset.column === table.sort;
    button.parentElement.setAttribute("aria-sort", isSorted ? (table.descending ? "descending" : "ascending") : "none");
  }
  markRow();
}

function rowOf(plan, chunk, timeUs) {
  const row = document.createElement("tr");
  const texts = segmentTexts(plan, chunk);
  const shown =
    texts.length > MOST_SEGMENTS ? [...texts.slice(0, MOST_SEGMENTS), `and ${texts.length - MOST_SEGMENTS} more`] : texts;
  const cells = [chunk, plan.chunks.kind[chunk], formatCount(plan.chunks.tokens[chunk]), formatUs(timeUs)];
  cells.forEach((text, column) => {
    const cell = document.createElement("td");
    cell.textContent = text;
    if (column !== 1) cell.className = "number";
    row.append(cell);
  });
  const sequences = document.createElement("td");
  sequences.title = shown.join(" ");
  for (const text of shown) sequences.append(Object.assign(document.createElement("span"), {textContent: text}), " ");
  row.append(sequences);
  row.dataset.chunk = chunk;
  row.tabIndex = -1;
  table.rows.set(chunk, row);
  return row;
}

// Mark the row of the selected chunk, and bring it into view.
function markRow() {
  if (table.plan === null) return; // not filled yet
  if (table.plan !== PLANS[state.plan]) return void fillTable();
  const before = document.querySelector("#chunks tr[aria-selected=true]");
  before?.removeAttribute("aria-selected");
  const isListed = state.chunk !== null && state.chunk.plan === state.plan;
  const row = isListed ? table.rows.get(state.chunk.chunk) : undefined;
  for (const other of document.querySelectorAll("#chunks tr[tabindex='0']")) other.tabIndex = -1;
  (row ?? document.querySelector("#chunks tbody tr"))?.setAttribute("tabindex", "0");
  if (!row) return;
  row.setAttribute("aria-selected", "true");
  row.scrollIntoView({block: "nearest"});
}

function startTable() {
  const body = document.querySelector("#chunks tbody");
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (row) selectChunk(PLANS[state.plan], Number(row.dataset.chunk));
  });
  body.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr");
    const next = {ArrowDown: row?.nextElementSibling, ArrowUp: row?.previousElementSibling, Enter: row, " ": row}[event.key];
    if (!next) return;
    event.preventDefault();
    event.stopPropagation();
    selectChunk(PLANS[state.plan], Number(next.dataset.chunk));
    next.focus();
  });
  for (const button of document.querySelectorAll("#chunks th button")) {
    button.addEventListener("click", () => {
      table.descending = table.sort === button.dataset.column && !table.descending;
      table.sort = button.dataset.column;
      fillTable();
    });
  }
  document.getElementById("find").addEventListener("input", fillTable);
}

// Start: panes, legend, keys and buttons.

const KEYS = [
  ["← →", "pan"],
  ["↑ ↓", "choose a rank: its memory is drawn, its actions are stepped through"],
  ["+ −", "zoom"],
  ["0", "whole iteration"],
  [", .", "previous and next action of the chosen rank"],
  ["z", "zoom to the selected action"],
  ["c", "critical path on and off"],
  ["s", "every iteration as wide as the page, or one time axis"],
  ["t", "light or dark"],
  ["Tab", "through timelines, buttons and the table; there ↑ ↓ choose a chunk"],
  ["Esc", "end the selection, or close this"],
  ["?", "this help"],
];
const MOUSE = [
  ["move", "what a box is, or what an idle rank waits for; the arrow comes from what ended last"],
  ["click", "select an action and its chunk"],
  ["drag", "pan"],
  ["Ctrl + wheel", "zoom at the pointer"],
  ["Shift + wheel", "pan"],
  ["double click", "zoom to a box"],
];

function onSelection() {
  markRow();
  showDetails();
  redraw();
}

function showDetails() {
  const details = document.getElementById("details");
  if (state.selected) return fill(details, describeBox(state.selected.pane, state.selected.box));
  const plan = PLANS[state.plan];
  if (state.chunk) {
    const {chunk} = state.chunk;
    const tokens = plan.chunks.tokens[chunk];
    const rows = [
      ["kind", plan.chunks.kind[chunk]],
      ["tokens", formatCount(tokens)],
      ["compute", `${formatUs(computeTimes(plan)[chunk])} over all ranks`],
    ];
    return fill(details, {title: `chunk ${chunk}`, rows: [...rows, ["sequences", sequencesText(plan, chunk, 12).join("; ")]]});
  }
  const pane = currentPane();
  const lines = plan.data.headline.map((line, i) => [i ? "" : "plan", line]);
  fill(details, {title: plan.name, rows: [...lines, [`rank ${state.rank}`, rankTexts(pane, state.rank).join("; ")]]});
}

function addLegend() {
  const legend = document.getElementById("legend");
  const present = new Set();
  const kinds = new Set(PLANS.flatMap((plan) => plan.chunks.kind));
  const pale = PLANS.flatMap((plan) => plan.chunks.strength.filter((_, chunk) => plan.chunks.kind[chunk] === "batched"));
  const strengths = [...(kinds.has("split") || kinds.has("hybrid") ? [1] : []), ...(pale.length ? [Math.max(...pale)] : [])];
  const isMixed = kinds.has("batched") && kinds.size > 1;
  for (const {boxes} of PANES) for (const op of boxes.op) present.add(op);
  const entry = (text, ...colours) => {
    const item = document.createElement("span");
    const swatch = document.createElement("i");
    swatch.style.background = colours.length > 1 ? `linear-gradient(90deg, ${colours[0]} 50%, ${colours[1]} 50%)` : colours[0];
    item.append(swatch, text);
    legend.append(item);
    return swatch;
  };
  for (const op of [...present].sort((a, b) => a - b)) {
    const isCompute = PANES.some(({boxes}) => boxes.op.some((each, i) => each === op && boxes.isCompute(i)));
    entry(OPERATIONS[op].text, ...(isCompute ? strengths : [1]).map((strength) => tint(op, strength).css));
  }
  if (PANES.some(({boxes}) => boxes.recompute.size))
    entry("recompute, at the start of its backward", OPERATIONS[RECOMPUTE].colour);
  entry("idle", "var(--lane)");
  entry("critical path", "none").className = "line";
  if (isMixed)
    legend.append(
      Object.assign(document.createElement("span"), {
        textContent: "strong colour: slice of a long sequence; pale: whole sequences",
      }),
    );
}

// Items of memory, where the plans have a breakdown of it.
function addItemLegend() {
  const items = PLANS.find((plan) => plan.data.items)?.data.items;
  if (!items) return;
  const legend = document.createElement("div");
  legend.className = "items";
  items.names.forEach((name, i) => {
    const item = document.createElement("span");
    const swatch = document.createElement("i");
    swatch.style.background = items.colours[i];
    item.append(swatch, name);
    legend.append(item);
  });
  document.getElementById("legend").append(legend);
}

function press(id, isOn) {
  document.getElementById(id).setAttribute("aria-pressed", isOn);
}

const COMMANDS = {
  "zoom-in": () => zoom(2),
  "zoom-out": () => zoom(0.5),
  whole: () => show(0, 1),
  critical: () => {
    press("critical", (state.showsCritical = !state.showsCritical));
    redraw();
  },
  "own-scale": () => {
    press("own-scale", (state.ownScale = !state.ownScale));
    redraw();
  },
  theme: () => setTheme(!isDark()),
  help: () => document.getElementById("keys").showModal(),
};
const KEY_COMMANDS = {
  "+": "zoom-in",
  "=": "zoom-in",
  "-": "zoom-out",
  _: "zoom-out",
  0: "whole",
  c: "critical",
  s: "own-scale",
  t: "theme",
  "?": "help",
};

const SYSTEM_THEME = matchMedia("(prefers-color-scheme: dark)");

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  readTheme();
  document.getElementById("theme").textContent = dark ? "light" : "dark";
  redraw();
}

// Pane of the selection, or the last one clicked, or the first of the listed plan.
const currentPane = () =>
  state.selected?.pane ??
  (state.pane?.plan.number === state.plan ? state.pane : PANES.find((pane) => pane.plan.number === state.plan));

function chooseRank(by) {
  state.rank = Math.min(currentPane().boxes.numRanks - 1, Math.max(0, state.rank + by));
  showDetails();
  redraw();
}

// Select the next or previous action of the chosen rank; at first the first visible one.
function step(by) {
  const pane = currentPane();
  const {boxes} = pane;
  const box = state.selected?.box;
  const isHere = box !== undefined && boxes.rank(box) === state.rank;
  const first = Math.min(boxes.firstEndingAfter(state.rank, scaleOf(pane).from), boxes.first[state.rank + 1] - 1);
  const next = isHere ? boxes.neighbour(box, by) : first;
  if (next < boxes.first[state.rank]) return;
  selectBox(pane, next);
  reveal(pane, next);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input") || document.getElementById("keys").open)
    return;
  const command = KEY_COMMANDS[event.key];
  const actions = {
    ArrowLeft: () => pan(-0.15),
    ArrowRight: () => pan(0.15),
    ArrowUp: () => chooseRank(-1),
    ArrowDown: () => chooseRank(1),
    ",": () => step(-1),
    ".": () => step(1),
    z: () => state.selected && zoomTo(state.selected.pane, state.selected.box),
    Escape: () => {
      hover(null);
      selectChunk(PLANS[state.plan], null);
    },
  };
  const action = command ? COMMANDS[command] : actions[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

function addHelp() {
  const dialog = document.getElementById("keys");
  for (const [title, rows] of [
    ["Keys", KEYS],
    ["Mouse", MOUSE],
  ]) {
    const section = document.createElement("section");
    fill(section, {title, rows});
    dialog.append(section);
  }
  dialog.addEventListener("click", () => dialog.close());
}

function listenToOverview() {
  const holder = document.getElementById("overview");
  const move = (event) => {
    const share = (event.clientX - holder.getBoundingClientRect().left - GUTTER) / (holder.clientWidth - GUTTER - MARGIN);
    pan((share - (state.from + state.to) / 2) / (state.to - state.from));
  };
  holder.addEventListener("pointerdown", (event) => {
    holder.setPointerCapture(event.pointerId);
    move(event);
  });
  holder.addEventListener("pointermove", (event) => {
    if (event.buttons) move(event);
  });
}

function start() {
  document.getElementById("title").textContent = DATA.title;
  PLANS.forEach(addPanes);
  longestUs = Math.max(...PANES.map((pane) => pane.makespanUs)) || 1;
  press("own-scale", (state.ownScale = DATA.equal_widths));
  document.getElementById("own-scale").hidden = new Set(PANES.map((pane) => pane.makespanUs)).size < 2;
  addLegend();
  addItemLegend();
  addHelp();
  for (const [id, command] of Object.entries(COMMANDS)) document.getElementById(id).addEventListener("click", command);
  document.addEventListener("keydown", onKey);
  SYSTEM_THEME.addEventListener("change", () => setTheme(SYSTEM_THEME.matches));
  addEventListener("resize", resize);
  listenToOverview();
  startTable();
  showDetails();
  setTheme(SYSTEM_THEME.matches);
  resize();
  requestAnimationFrame(() => setTimeout(fillTable)); // the lanes come first
}

start();

// For the console and for tests; nothing on the page depends on it.
window.epp = {state, plans: PLANS, panes: PANES, hit, scaleOf, laneBox};

// What is visible and selected, and the colours of the theme.

const state = {
  from: 0,
  to: 1, // the visible part of the time axis
  rank: 0,
  pane: null, // the last one clicked
  plan: 0, // whose chunks the table lists
  selected: null, // {pane, box}
  chunk: null, // {plan, chunk, marks: by plan a table over its chunks: 1 for its tokens, 2 for its trees, 0 for others}
  hovered: null, // {pane, rank, time, box}
  showsCritical: true,
  ownScale: false,
};
const PANES = [];
const MOST_ZOOM = 2e6;
let longestUs = 1;

const axisUs = (pane) => (state.ownScale ? pane.makespanUs || 1 : longestUs);

// Show a part of the axis, within its ends.
function show(from, to) {
  const length = Math.min(1, Math.max(1 / MOST_ZOOM, to - from));
  const start = Math.min(1 - length, Math.max(0, from + (to - from - length) / 2));
  state.from = start;
  state.to = start + length;
  redraw();
}

// Zoom by a factor; `at` (0 to 1 of the visible part) stays where it is.
function zoom(factor, at = 0.5) {
  const length = state.to - state.from;
  const middle = state.from + at * length;
  const target = Math.min(1, length / factor);
  show(middle - at * target, middle + (1 - at) * target);
}

function pan(share) {
  const length = state.to - state.from;
  const by = Math.min(1 - state.to, Math.max(-state.from, share * length));
  show(state.from + by, state.to + by);
}

// Select a chunk of a plan; chunks of other plans with its tokens are highlighted, too, and those of its trees half as much.
function selectChunk(plan, chunk, box = null) {
  if (chunk === null) {
    Object.assign(state, {chunk: null, selected: null});
  } else {
    const segments = plan.segments(chunk);
    state.chunk = {
      plan: plan.number,
      chunk,
      marks: PLANS.map((other) => (other === plan ? plan.marksOf(chunk) : other.chunksWith(segments, plan.data.lengths))),
    };
    state.selected = box;
    state.plan = plan.number;
  }
  onSelection();
}

function selectBox(pane, box) {
  state.rank = pane.boxes.rank(box);
  selectChunk(pane.plan, pane.boxes.chunk[box], {pane, box});
}

// Make a box visible, with some of what is around it, if it is not.
function reveal(pane, box) {
  const length = axisUs(pane);
  const start = pane.boxes.start[box] / length;
  const end = pane.boxes.end[box] / length;
  if (start >= state.from && end <= state.to) return;
  const middle = (start + end) / 2;
  const half = Math.max((state.to - state.from) / 2, end - start);
  show(middle - half, middle + half);
}

const theme = {};

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "muted", "grid", "lane", "surface", "accent", "critical", "memory", "static", "cap"]) {
    theme[name] = style.getPropertyValue(`--${name}`).trim();
  }
}

const isDark = () => document.documentElement.dataset.theme === "dark";

const tints = new Map();

// Colour of an operation mixed with white, and whether dark text is legible on it.
function tint(op, strength) {
  const key = op * 1024 + Math.round(strength * 1000);
  let found = tints.get(key);
  if (!found) {
    const hex = OPERATIONS[op].colour;
    const [r, g, b] = [1, 3, 5].map((at) => Math.round(255 - strength * (255 - parseInt(hex.slice(at, at + 2), 16))));
    found = {
      css: `rgb(${r},${g},${b})`,
      rgba: ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0,
      isLight: 0.299 * r + 0.587 * g + 0.114 * b > 140,
    };
    tints.set(key, found);
  }
  return found;
}

let isDue = false;

// Draw before the next frame, once for any number of calls.
function redraw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    for (const pane of PANES) drawPane(pane);
    drawOverview();
  });
}

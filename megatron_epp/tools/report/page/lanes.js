// Lanes of boxes on a canvas: one by one where they are wide enough, as shares of time where many fall on a pixel.

const GUTTER = 64;
const MARGIN = 12;
const AXIS = 20;
const NARROW = 3; // mean width in pixels below which a lane shows shares of time
const BIN = 3; // pixels that share one column of shares
const RECOMPUTE = OPERATIONS.findIndex((each) => each.op === "R");
const LABEL_FONT = "11px system-ui, sans-serif";

// Position of times and lanes of a pane on its canvas.
function scaleOf(pane) {
  const width = pane.width - GUTTER - MARGIN;
  const length = axisUs(pane);
  const from = state.from * length;
  const to = state.to * length;
  const perUs = width / (to - from);
  return {from, to, perUs, width, x: (time) => GUTTER + (time - from) * perUs, time: (x) => from + (x - GUTTER) / perUs};
}

// Top and height of a lane; copies and messages have a strip at the bottom of their rank's.
function laneBox(pane, lane) {
  const rank = lane % pane.boxes.numRanks;
  const stream = Math.floor(lane / pane.boxes.numRanks);
  const gap = pane.laneHeight >= 14 ? 3 : 1;
  const whole = pane.laneHeight - gap;
  const strips = pane.strips;
  const strip = strips.length ? Math.max(2, Math.round(whole * 0.2)) : 0;
  const top = AXIS + rank * pane.laneHeight;
  const compute = whole - strips.length * strip;
  if (stream === 0) return {top, height: compute};
  return {top: top + compute + strips.indexOf(stream) * strip, height: strip};
}

function drawPane(pane) {
  const context = pane.base.getContext("2d");
  const scale = scaleOf(pane);
  context.setTransform(pane.ratio, 0, 0, pane.ratio, 0, 0);
  context.clearRect(0, 0, pane.width, pane.height);
  drawAxis(context, pane, scale);
  const {boxes} = pane;
  const dense = [];
  const sparse = [];
  for (let rank = 0; rank < boxes.numRanks; rank++) {
    const {top} = laneBox(pane, rank);
    context.fillStyle = theme.lane;
    const end = Math.min(scale.x(pane.makespanUs), pane.width - MARGIN);
    context.fillRect(GUTTER, top, Math.max(0, end - GUTTER), pane.laneHeight - (pane.laneHeight >= 14 ? 3 : 1));
  }
  for (const stream of [0, ...pane.strips]) {
    for (let rank = 0; rank < boxes.numRanks; rank++) {
      const lane = stream * boxes.numRanks + rank;
      const first = boxes.firstEndingAfter(lane, scale.from);
      const last = Math.min(boxes.first[lane + 1], boxes.firstEndingAfter(lane, scale.to) + 1);
      if (first >= last) continue;
      const pixels = (Math.min(boxes.end[last - 1], scale.to) - Math.max(boxes.start[first], scale.from)) * scale.perUs;
      (pixels / (last - first) < NARROW ? dense : sparse).push({lane, first, last});
    }
  }
  context.save();
  context.beginPath();
  context.rect(GUTTER, 0, scale.width, pane.height);
  context.clip();
  if (dense.length) drawShares(context, pane, scale, dense);
  drawBoxes(context, pane, scale, sparse);
  if (state.chunk) drawMarked(context, pane, scale, dense);
  if (state.showsCritical) drawCritical(context, pane, scale);
  context.restore();
  drawRankNames(context, pane);
  drawOverlay(pane);
  if (pane.memory) drawMemory(pane, scale);
}

function drawBoxes(context, pane, scale, lanes) {
  const {boxes, plan} = pane;
  const strength = plan.chunks.strength;
  const marks = state.chunk?.marks[plan.number];
  context.font = LABEL_FONT;
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (const {lane, first, last} of lanes) {
    const {top, height} = laneBox(pane, lane);
    const hasText = height >= 11;
    for (let i = first; i < last; i++) {
      const left = scale.x(boxes.start[i]);
      const width = (boxes.end[i] - boxes.start[i]) * scale.perUs;
      const colour = tint(boxes.op[i], boxes.isCompute(i) ? strength[boxes.chunk[i]] : 1);
      const edge = width > 4 ? 1 : 0;
      context.globalAlpha = marks ? [0.22, 1, 0.6][marks[boxes.chunk[i]]] : 1;
      context.fillStyle = colour.css;
      context.fillRect(left, top, Math.max(width - edge, 0.6), height);
      const front = boxes.recompute.get(i);
      const covered = front ? front.us * scale.perUs : 0;
      if (front) {
        context.fillStyle = tint(RECOMPUTE, 1).css;
        context.fillRect(left, top, Math.min(covered, Math.max(width - edge, 0.6)), height);
      }
      if (hasText && width - covered > 12)
        drawLabel(
          context,
          pane,
          i,
          Math.max(left + covered, GUTTER),
          Math.min(left + width, pane.width - MARGIN),
          top + height / 2,
          colour,
        );
    }
  }
  context.globalAlpha = 1;
}

// Number of the chunk, or stage and chunk, in the visible part of a box; nothing if it does not fit.
function drawLabel(context, pane, i, left, right, middle, colour) {
  const {boxes, plan} = pane;
  const text = plan.severalStages ? `${boxes.stage[i]}.${boxes.chunk[i]}` : `${boxes.chunk[i]}`;
  if (right - left < 6.6 * text.length + 4) return;
  context.fillStyle = colour.isLight ? "#000" : "#fff";
  context.fillText(text, (left + right) / 2, middle + 0.5);
}

// Columns of a few pixels whose height is divided by the shares of time of each operation; the rest is idle.
function drawShares(context, pane, scale, lanes) {
  const bins = Math.ceil(scale.width / BIN);
  const perBin = BIN / scale.perUs;
  const {boxes} = pane;
  const number = OPERATIONS.length;
  const dimmed = state.chunk ? 0.22 : 1;
  const shares = new Float64Array(bins * number);
  const solid = OPERATIONS.map((_, op) => tint(op, 0.85).css);
  const rects = OPERATIONS.map(() => new Path2D());
  for (const {lane, first, last} of lanes) {
    shares.fill(0);
    const add = (op, start, end) => {
      let at = Math.max(start, scale.from);
      const last = Math.min(end, scale.to);
      while (at < last) {
        const bin = Math.min(bins - 1, Math.floor((at - scale.from) / perBin));
        const until = Math.min(last, Math.max(scale.from + (bin + 1) * perBin, at + perBin * 1e-6));
        shares[bin * number + op] += until - at;
        at = until;
      }
    };
    for (let i = first; i < last; i++) {
      const again = boxes.start[i] + (boxes.recompute.get(i)?.us ?? 0);
      if (again > boxes.start[i]) add(RECOMPUTE, boxes.start[i], again);
      add(boxes.op[i], again, boxes.end[i]);
    }
    const {top, height} = laneBox(pane, lane);
    for (let op = 0; op < number; op++) addShares(rects[op], shares, {bins, op, number, top, height, perBin});
  }
  context.globalAlpha = dimmed;
  rects.forEach((path, op) => {
    context.fillStyle = solid[op];
    context.fill(path);
  });
  context.globalAlpha = 1;
}

// Add an operation's part of every column of a lane to a path; neighbours of equal height become one rectangle.
function addShares(path, shares, {bins, op, number, top, height, perBin}) {
  let start = 0;
  let low = -1;
  let high = -1;
  for (let bin = 0; bin <= bins; bin++) {
    let from = -1;
    let to = -1;
    if (bin < bins && shares[bin * number + op] > 0) {
      let below = 0;
      for (let other = 0; other < op; other++) below += shares[bin * number + other];
      from = Math.round(height * Math.min(1, below / perBin) * 4) / 4;
      to = Math.round(height * Math.min(1, (below + shares[bin * number + op]) / perBin) * 4) / 4;
    }
    if (from === low && to === high) continue;
    if (high > low) path.rect(GUTTER + start * BIN, top + low, (bin - start) * BIN, high - low);
    [start, low, high] = [bin, from, to];
  }
}

// Boxes of the selected chunk over lanes of shares, at least two pixels wide.
function drawMarked(context, pane, scale, dense) {
  const {boxes, plan} = pane;
  const marks = state.chunk.marks[plan.number];
  const lanes = new Set(dense.map(({lane}) => lane));
  for (let chunk = 0; chunk < marks.length; chunk++) {
    if (!marks[chunk]) continue;
    for (const i of boxes.ofChunk(chunk)) {
      if (!lanes.has(boxes.lane[i]) || boxes.end[i] < scale.from || boxes.start[i] > scale.to) continue;
      const {top, height} = laneBox(pane, boxes.lane[i]);
      context.fillStyle = tint(boxes.op[i], 1).css;
      context.fillRect(scale.x(boxes.start[i]), top, Math.max(2, (boxes.end[i] - boxes.start[i]) * scale.perUs), height);
    }
  }
}

// The critical path: a line through its boxes, and from rank to rank.
function drawCritical(context, pane, scale) {
  const {boxes} = pane;
  const path = boxes.columns.critical;
  context.beginPath();
  let isOpen = false;
  for (const i of path) {
    if (boxes.end[i] < scale.from && !isOpen) continue;
    const {top, height} = laneBox(pane, boxes.lane[i]);
    const y = top + height - 1.5;
    const left = Math.max(scale.x(boxes.start[i]), GUTTER - 50);
    const right = Math.min(scale.x(boxes.end[i]), pane.width + 50);
    if (isOpen) context.lineTo(left, y);
    else context.moveTo(left, y);
    context.lineTo(right, y);
    isOpen = true;
    if (boxes.start[i] > scale.to) break;
  }
  context.lineJoin = "round";
  for (const [colour, width] of [
    [theme.surface, 3.5],
    [theme.critical, 1.8],
  ]) {
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.stroke();
  }
}

function drawRankNames(context, pane) {
  const every = Math.ceil(11 / pane.laneHeight);
  context.font = LABEL_FONT;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (let rank = 0; rank < pane.boxes.numRanks; rank++) {
    const isChosen = rank === state.rank;
    if (!isChosen && (rank % every || Math.abs(rank - state.rank) < every)) continue;
    context.fillStyle = isChosen ? theme.accent : theme.muted;
    context.font = isChosen ? `bold ${LABEL_FONT}` : LABEL_FONT;
    context.fillText(`rank ${rank}`, GUTTER - 8, AXIS + (rank + 0.5) * pane.laneHeight - 1);
  }
}

// Ticks of the visible times, in a unit that suits the whole axis.
function drawAxis(context, pane, scale) {
  const [size, unit] = axisUs(pane) >= 1e7 ? [1e6, "s"] : axisUs(pane) >= 1e3 ? [1e3, "ms"] : [1, "µs"];
  const about = (scale.to - scale.from) / (scale.width / 110);
  const power = 10 ** Math.floor(Math.log10(about));
  const step = power * ([1, 2, 5, 10].find((times) => times * power >= about) ?? 10);
  const digits = Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9));
  context.font = LABEL_FONT;
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  context.lineWidth = 1;
  for (let tick = Math.ceil(scale.from / step - 1e-9); tick * step <= scale.to; tick++) {
    const x = Math.round(scale.x(tick * step)) + 0.5;
    context.strokeStyle = theme.grid;
    context.beginPath();
    context.moveTo(x, AXIS - 4);
    context.lineTo(x, pane.height);
    context.stroke();
    context.fillStyle = theme.muted;
    context.fillText(((tick * step) / size).toFixed(digits), x, AXIS - 7);
  }
  context.textAlign = "right";
  context.fillText(unit, GUTTER - 12, AXIS - 7);
}

// Panes: an iteration each, with its title, lanes and memory; what the pointer does on them, and what lies over the boxes.

const MEMORY_HEIGHT = 80; // least pixels of a curve of memory, which gets what the lanes leave
const LANES = [52, 220]; // pixels of a rank's lane that come before more memory, and most
const LANES_SHARE = 0.75; // of the height that lanes and memory share

// Make the panes of a plan: the plan as simulated, and a run of it.
function addPanes(plan) {
  const forms = [{boxes: plan.planned, isMeasured: false}];
  if (plan.measured) forms.push({boxes: plan.measured, isMeasured: true});
  for (const form of forms) {
    const pane = {
      ...form,
      plan,
      index: PANES.length,
      makespanUs: form.boxes.columns.makespan_us,
      strips: [1, 2].filter((stream) => form.boxes.hasStream(stream)),
    };
    PANES.push(pane);
    document.getElementById("panes").append(elementOf(pane));
    listen(pane);
  }
}

function elementOf(pane) {
  const {plan} = pane;
  const section = document.createElement("section");
  const head = document.createElement("div");
  const name = document.createElement("strong");
  section.className = "pane";
  head.className = "head";
  name.textContent = [plan.name, plan.measured ? (pane.isMeasured ? "measured" : "planned") : ""].filter(Boolean).join(", ");
  const figures = document.createElement("span");
  figures.textContent = figuresOf(pane).join(" · ");
  const ownAxis = Object.assign(document.createElement("span"), {className: "own-axis", textContent: "on a time axis of its own"});
  head.append(name, figures, ownAxis);
  if (!pane.isMeasured && !plan.data.calibrated) {
    const badge = document.createElement("em");
    badge.textContent = "times by formula, not calibrated";
    badge.title =
      "The costs of this plan follow from formulas over the model's shape and the device's rates. Compare times with each other; a machine may be slower or faster in all.";
    head.append(badge);
  }
  pane.holder = document.createElement("div");
  pane.holder.className = "lanes";
  pane.holder.tabIndex = 0;
  pane.holder.setAttribute("role", "application");
  pane.holder.setAttribute("aria-label", `timeline, ${name.textContent}: ${figures.textContent}`);
  pane.base = document.createElement("canvas");
  pane.overlay = document.createElement("canvas");
  pane.holder.append(pane.base, pane.overlay);
  section.append(head, pane.holder);
  if (!pane.isMeasured) {
    pane.memory = document.createElement("canvas");
    pane.memory.className = "memory";
    section.append(pane.memory);
  }
  return section;
}

function figuresOf(pane) {
  const {plan} = pane;
  const columns = pane.boxes.columns;
  const texts = [`makespan ${formatUs(columns.makespan_us)}`, `bubble ${formatShare(columns.bubble)}`];
  if (pane.isMeasured)
    return [...texts, `${(columns.makespan_us / (plan.data.planned.makespan_us || 1)).toFixed(2)} times as planned`];
  const shortest = Math.min(...PLANS.map((each) => each.data.planned.makespan_us));
  if (PLANS.length > 1 && columns.makespan_us > shortest)
    texts.push(`${(columns.makespan_us / shortest).toFixed(2)} times the shortest`);
  if (plan.data.recompute_share > 0) texts.push(`recompute ${formatShare(plan.data.recompute_share)}`);
  texts.push(
    `peak ${formatBytes(plan.memory.peak.reduce((a, b) => Math.max(a, b), 0))}`,
    `${formatCount(plan.chunks.tokens.length)} chunks`,
  );
  return texts;
}

// Share the height of the page among lanes and memory, and give every canvas its size.
function resize() {
  const available = document.getElementById("panes").clientHeight;
  const withMemory = PANES.filter((pane) => pane.memory).length;
  const lanes = PANES.reduce((sum, pane) => sum + pane.boxes.numRanks, 0);
  const free = available - PANES.length * (AXIS + 38) - withMemory * MEMORY_HEIGHT;
  const wanted = Math.max(Math.min(LANES[0], free / lanes), Math.min(LANES[1], (LANES_SHARE * free) / lanes));
  const height = Math.max(PANES.length > 1 ? 13 : 7, Math.floor(wanted));
  const memoryHeight = Math.max(MEMORY_HEIGHT, MEMORY_HEIGHT + (free - height * lanes) / withMemory);
  for (const pane of PANES) {
    pane.ratio = devicePixelRatio || 1;
    pane.laneHeight = height;
    pane.memoryHeight = Math.floor(memoryHeight);
    pane.width = pane.holder.clientWidth;
    pane.height = AXIS + height * pane.boxes.numRanks + 2;
    pane.holder.style.height = `${pane.height}px`;
    for (const [canvas, tall] of [
      [pane.base, pane.height],
      [pane.overlay, pane.height],
      [pane.memory, pane.memoryHeight],
    ]) {
      if (!canvas) continue;
      canvas.style.height = `${tall}px`;
      canvas.width = Math.round(pane.width * pane.ratio);
      canvas.height = Math.round(tall * pane.ratio);
    }
  }
  redraw();
}

// What is at a point of a pane: rank, time, and the box there or -1.
function hit(pane, x, y) {
  const scale = scaleOf(pane);
  const rank = Math.floor((y - AXIS) / pane.laneHeight);
  const time = scale.time(x);
  if (rank < 0 || rank >= pane.boxes.numRanks || x < GUTTER || time < 0 || time > pane.makespanUs) return null;
  for (const stream of pane.strips) {
    const lane = stream * pane.boxes.numRanks + rank;
    const {top, height} = laneBox(pane, lane);
    if (y >= top && y <= top + height) {
      const box = pane.boxes.at(lane, time);
      if (box >= 0) return {pane, rank, time, box};
    }
  }
  return {pane, rank, time, box: pane.boxes.at(rank, time)};
}

function listen(pane) {
  const {holder} = pane;
  let drag = null;
  const point = (event) => {
    const area = holder.getBoundingClientRect();
    return [event.clientX - area.left, event.clientY - area.top];
  };
  holder.addEventListener("pointerdown", (event) => {
    drag = {x: event.clientX, from: state.from, to: state.to, hasMoved: false};
    holder.setPointerCapture(event.pointerId);
  });
  holder.addEventListener("pointermove", (event) => {
    if (drag && Math.abs(event.clientX - drag.x) > 3) drag.hasMoved = true;
    if (drag?.hasMoved) {
      const by = ((drag.x - event.clientX) / scaleOf(pane).width) * (drag.to - drag.from);
      const within = Math.min(1 - drag.to, Math.max(-drag.from, by));
      hover(null);
      show(drag.from + within, drag.to + within);
    } else {
      hover(hit(pane, ...point(event)), event);
    }
  });
  holder.addEventListener("pointerup", (event) => {
    const found = hit(pane, ...point(event));
    if (drag && !drag.hasMoved) click(pane, found, point(event));
    drag = null;
  });
  holder.addEventListener("pointercancel", () => {
    drag = null;
  });
  holder.addEventListener("pointerleave", () => hover(null));
  holder.addEventListener(
    "wheel",
    (event) => {
      const sideways = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        zoom(Math.exp(-event.deltaY * 0.0025), (point(event)[0] - GUTTER) / scaleOf(pane).width);
      } else if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) {
        event.preventDefault();
        pan(sideways / scaleOf(pane).width);
      }
    },
    {passive: false},
  );
  holder.addEventListener("dblclick", (event) => {
    const found = hit(pane, ...point(event));
    if (found?.box >= 0) zoomTo(pane, found.box);
    else zoom(3, (point(event)[0] - GUTTER) / scaleOf(pane).width);
  });
}

function click(pane, found, [, y]) {
  const rank = Math.floor((y - AXIS) / pane.laneHeight);
  if (rank >= 0 && rank < pane.boxes.numRanks) state.rank = rank;
  state.pane = pane;
  if (found?.box >= 0) return selectBox(pane, found.box);
  state.plan = pane.plan.number;
  selectChunk(pane.plan, null);
}

// Zoom until a box takes an eighth of the width.
function zoomTo(pane, box) {
  const length = axisUs(pane);
  const middle = (pane.boxes.start[box] + pane.boxes.end[box]) / 2 / length;
  const half = (4 * (pane.boxes.end[box] - pane.boxes.start[box])) / length;
  show(middle - half, middle + half);
}

function hover(found, event) {
  const before = state.hovered;
  const tooltip = document.getElementById("tooltip");
  state.hovered = found;
  if (before) drawOverlay(before.pane);
  tooltip.hidden = !found;
  if (!found) return;
  drawOverlay(found.pane);
  fill(tooltip, found.box >= 0 ? describeBox(found.pane, found.box) : describeGap(found.pane, found.rank, found.time));
  const {offsetWidth: width, offsetHeight: height} = tooltip;
  const left = event.clientX + 16 + width > innerWidth ? event.clientX - width - 16 : event.clientX + 16;
  tooltip.style.left = `${Math.max(4, left)}px`;
  // Below the lanes, if they end nearby: there it hides none of them.
  const below = found.pane.holder.getBoundingClientRect().bottom + 6;
  const isNear = below - event.clientY < 240 && below + height < innerHeight;
  tooltip.style.top = `${Math.max(4, Math.min(isNear ? below : event.clientY + 16, innerHeight - height - 4))}px`;
}

// Outlines of the box under the pointer and of the selected one, and an arrow from what each waited for.
function drawOverlay(pane) {
  const context = pane.overlay.getContext("2d");
  const scale = scaleOf(pane);
  context.setTransform(pane.ratio, 0, 0, pane.ratio, 0, 0);
  context.clearRect(0, 0, pane.width, pane.height);
  context.save();
  context.beginPath();
  context.rect(GUTTER, 0, scale.width, pane.height);
  context.clip();
  if (state.selected?.pane === pane) outline(context, pane, scale, state.selected.box, theme.accent);
  const found = state.hovered?.pane === pane ? state.hovered : null;
  if (found) {
    const next = found.box >= 0 ? found.box : pane.boxes.gapAt(found.rank, found.time).next;
    if (found.box < 0) outlineGap(context, pane, scale, found);
    if (next >= 0) {
      if (found.box >= 0) outline(context, pane, scale, next, theme.ink);
      arrow(context, pane, scale, next);
    }
    const x = scale.x(found.time);
    context.strokeStyle = theme.muted;
    context.lineWidth = 0.5;
    context.strokeRect(x, AXIS, 0, pane.height);
  }
  context.restore();
}

function outline(context, pane, scale, i, colour) {
  const {top, height} = laneBox(pane, pane.boxes.lane[i]);
  const left = scale.x(pane.boxes.start[i]);
  context.strokeStyle = colour;
  context.lineWidth = 2;
  context.strokeRect(left - 1, top - 1, Math.max(3, (pane.boxes.end[i] - pane.boxes.start[i]) * scale.perUs + 1), height + 2);
}

function outlineGap(context, pane, scale, found) {
  const gap = pane.boxes.gapAt(found.rank, found.time);
  const {top, height} = laneBox(pane, found.rank);
  const left = scale.x(gap.from);
  context.strokeStyle = theme.muted;
  context.lineWidth = 1;
  context.setLineDash([4, 3]);
  context.strokeRect(left, top + 0.5, scale.x(gap.to) - left, height - 1);
  context.setLineDash([]);
}

// Arrow from the end of the box that another waited for to its start.
function arrow(context, pane, scale, i) {
  const other = pane.boxes.because[i];
  if (other < 0 || pane.boxes.lane[other] === pane.boxes.lane[i]) return;
  const [from, to] = [laneBox(pane, pane.boxes.lane[other]), laneBox(pane, pane.boxes.lane[i])];
  const [x0, y0, x1, y1] = [
    scale.x(pane.boxes.end[other]),
    from.top + from.height / 2,
    scale.x(pane.boxes.start[i]),
    to.top + to.height / 2,
  ];
  const angle = Math.atan2(y1 - y0, x1 - x0);
  for (const [colour, width] of [
    [theme.surface, 4],
    [theme.ink, 1.6],
  ]) {
    context.strokeStyle = context.fillStyle = colour;
    context.lineWidth = width;
    context.beginPath();
    context.moveTo(x0, y0);
    context.lineTo(x1, y1);
    context.stroke();
  }
  context.beginPath();
  context.moveTo(x1, y1);
  for (const turn of [0.4, -0.4]) context.lineTo(x1 - 9 * Math.cos(angle + turn), y1 - 9 * Math.sin(angle + turn));
  context.fill();
}

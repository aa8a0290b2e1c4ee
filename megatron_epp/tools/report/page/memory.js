// The memory of the selected rank, and the overview of the whole iteration.

const CAP_IN_SIGHT = 3; // largest ratio of cap to peak for which the cap is drawn

// Most bytes and, where they change, all values of the visible part, by pixel.
function drawMemory(pane, scale) {
  const {plan, memoryHeight: height} = pane;
  const context = pane.memory.getContext("2d");
  const {time, bytes} = plan.live(state.rank);
  const cap = plan.memory.cap[state.rank];
  const peak = plan.memory.peak[state.rank];
  const highest = plan.memory.peak.reduce((a, b) => Math.max(a, b), 1);
  const isCapShown = cap !== null && cap <= CAP_IN_SIGHT * highest;
  const top = 20;
  const bottom = height - 4;
  const most = isCapShown ? Math.max(cap, highest) : highest;
  const y = (value) => bottom - ((bottom - top) * value) / most;
  context.setTransform(pane.ratio, 0, 0, pane.ratio, 0, 0);
  context.clearRect(0, 0, pane.width, height);
  context.save();
  context.beginPath();
  context.rect(GUTTER, 0, scale.width, height);
  context.clip();
  const items = plan.itemsOf(state.rank);
  const end = Math.min(scale.x(pane.makespanUs), pane.width - MARGIN);
  if (items) {
    const {names, colours} = plan.data.items;
    for (let item = names.length - 1; item >= 0; item--)
      fillCurve(context, items.time, (at) => items.table[at * names.length + item], colours[item], {scale, pane, y});
  } else {
    fillCurve(context, time, (at) => bytes[at], theme.memory, {scale, pane, y});
    context.fillStyle = theme.static;
    context.fillRect(GUTTER, y(plan.memory.static[state.rank]), end - GUTTER, bottom - y(plan.memory.static[state.rank]));
  }
  if (isCapShown) {
    context.strokeStyle = theme.cap;
    context.lineWidth = 1.5;
    context.setLineDash([6, 4]);
    context.beginPath();
    context.moveTo(GUTTER, y(cap));
    context.lineTo(pane.width - MARGIN, y(cap));
    context.stroke();
    context.setLineDash([]);
  }
  context.restore();
  const capText = cap === null ? "no cap" : `cap ${formatBytes(cap)}${isCapShown ? " (dashed)" : ", not drawn"}`;
  context.font = LABEL_FONT;
  context.textBaseline = "alphabetic";
  context.textAlign = "left";
  context.fillStyle = theme.ink;
  const legend = items ? "" : ", grey: held throughout";
  context.fillText(`planned memory of rank ${state.rank}: peak ${formatBytes(peak)}, ${capText}${legend}`, GUTTER, 12);
  context.textAlign = "right";
  context.fillStyle = theme.muted;
  const [size, unit] = byteUnit(most);
  context.fillText(`${(most / size).toFixed(most / size < 100 ? 1 : 0)} ${unit}`, GUTTER - 8, top + 8);
  context.fillText("0", GUTTER - 8, bottom);
}

// Fill the area below a curve of steps; several steps on a pixel are drawn as their least and most.
function fillCurve(context, time, valueAt, colour, {scale, pane, y}) {
  let low = 0;
  let high = time.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (time[middle] <= scale.from) low = middle + 1;
    else high = middle;
  }
  const first = Math.max(0, low - 1);
  const end = Math.min(scale.to, pane.makespanUs);
  let value = valueAt(first);
  let x = GUTTER;
  context.beginPath();
  context.moveTo(x, y(0));
  context.lineTo(x, y(value));
  for (let at = first + 1; at < time.length && time[at] <= end; at++) {
    x = Math.max(x, scale.x(time[at]));
    context.lineTo(x, y(value));
    value = valueAt(at);
    context.lineTo(x, y(value));
  }
  context.lineTo(scale.x(end), y(value));
  context.lineTo(scale.x(end), y(0));
  context.fillStyle = colour;
  context.fill();
}

// Share of the ranks that compute, over the whole iteration of the listed plan; the window shows the visible part.
function drawOverview() {
  const holder = document.getElementById("overview");
  const canvas = holder.querySelector("canvas");
  const pane = PANES.find((each) => each.plan.number === state.plan) ?? PANES[0];
  const width = holder.clientWidth - GUTTER - MARGIN;
  const height = holder.clientHeight;
  const [from, to] = [GUTTER + state.from * width, GUTTER + state.to * width];
  const frame = document.getElementById("window");
  frame.style.left = `${from}px`;
  frame.style.width = `${Math.max(3, to - from)}px`;
  const key = `${pane.index} ${width} ${state.ownScale} ${isDark()}`;
  if (drawOverview.key === key) return;
  drawOverview.key = key;
  const ratio = devicePixelRatio || 1;
  const context = canvas.getContext("2d");
  canvas.width = holder.clientWidth * ratio;
  canvas.height = height * ratio;
  context.scale(ratio, ratio);
  const busy = busyShares(pane, Math.max(1, Math.floor(width)));
  context.fillStyle = theme.lane;
  context.fillRect(GUTTER, 0, width, height);
  context.fillStyle = theme.muted;
  busy.forEach((share, x) => context.fillRect(GUTTER + x, height * (1 - share), 1, height * share));
  context.font = LABEL_FONT;
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.fillText("busy", GUTTER - 8, height / 2);
}

function busyShares(pane, bins) {
  const {boxes} = pane;
  const shares = new Float64Array(bins);
  const perBin = axisUs(pane) / bins;
  for (let i = 0; i < boxes.first[boxes.numRanks]; i++) {
    let at = boxes.start[i];
    for (let bin = Math.floor(at / perBin); at < boxes.end[i] && bin < bins; bin++) {
      const until = Math.min(boxes.end[i], (bin + 1) * perBin);
      shares[bin] += until - at;
      at = until;
    }
  }
  return shares.map((us) => Math.min(1, us / (perBin * boxes.numRanks)));
}

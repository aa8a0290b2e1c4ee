// The memory of the selected rank, and the overview of the whole iteration.

const MEMORY_HEIGHT = 92;
const CAP_IN_SIGHT = 3; // largest ratio of cap to peak for which the cap is drawn

// Most bytes and, where they change, all values of the visible part, by pixel.
function drawMemory(pane, scale) {
  const {plan} = pane, canvas = pane.memory, context = canvas.getContext("2d");
  const {time, bytes} = plan.live(state.rank), cap = plan.memory.cap[state.rank], peak = plan.memory.peak[state.rank];
  const highest = plan.memory.peak.reduce((a, b) => Math.max(a, b), 1), isCapShown = cap !== null && cap <= CAP_IN_SIGHT * highest;
  const top = 20, bottom = MEMORY_HEIGHT - 4, most = isCapShown ? Math.max(cap, highest) : highest;
  const y = (value) => bottom - (bottom - top) * value / most;
  context.setTransform(pane.ratio, 0, 0, pane.ratio, 0, 0);
  context.clearRect(0, 0, pane.width, MEMORY_HEIGHT);
  context.save();
  context.beginPath();
  context.rect(GUTTER, 0, scale.width, MEMORY_HEIGHT);
  context.clip();
  context.beginPath();
  context.moveTo(GUTTER, bottom);
  const points = visibleSteps(time, bytes, scale, pane.makespanUs);
  for (const {x, low, high} of points) {
    context.lineTo(x, y(low));
    context.lineTo(x, y(high));
  }
  context.lineTo(points.at(-1).x, bottom);
  context.fillStyle = theme.memory;
  context.fill();
  context.fillStyle = theme.static;
  context.fillRect(GUTTER, y(plan.memory.static[state.rank]), points.at(-1).x - GUTTER, bottom - y(plan.memory.static[state.rank]));
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
  context.fillText(`planned memory of rank ${state.rank}: peak ${formatBytes(peak)}, ${capText}, grey: held throughout`, GUTTER, 12);
  context.textAlign = "right";
  context.fillStyle = theme.muted;
  const [size, unit] = byteUnit(most);
  context.fillText(`${(most / size).toFixed(1)} ${unit}`, GUTTER - 8, top + 8);
  context.fillText("0", GUTTER - 8, bottom);
}

// The steps of a curve in the visible part: for each x the value before and after; one pair of extremes per pixel.
function visibleSteps(time, bytes, scale, makespanUs) {
  let low = 0, high = time.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (time[middle] <= scale.from) low = middle + 1; else high = middle;
  }
  let at = Math.max(0, low - 1), value = bytes[at];
  const points = [{x: GUTTER, low: value, high: value}], end = Math.min(scale.to, makespanUs);
  for (at++; at < time.length && time[at] <= end; at++) {
    const x = scale.x(time[at]), last = points.at(-1);
    if (x - last.x < 0.5 && points.length > 1) {
      points.push({x: last.x, low: value, high: bytes[at]});
    } else {
      points.push({x, low: value, high: bytes[at]});
    }
    value = bytes[at];
  }
  points.push({x: scale.x(end), low: value, high: value});
  return points;
}

// Share of the ranks that compute, over the whole iteration of the listed plan; the window shows the visible part.
function drawOverview() {
  const holder = document.getElementById("overview"), canvas = holder.querySelector("canvas");
  const pane = PANES.find((each) => each.plan.number === state.plan) ?? PANES[0];
  const width = holder.clientWidth - GUTTER - MARGIN, height = holder.clientHeight;
  const [from, to] = [GUTTER + state.from * width, GUTTER + state.to * width], frame = document.getElementById("window");
  frame.style.left = `${from}px`;
  frame.style.width = `${Math.max(3, to - from)}px`;
  const key = `${pane.index} ${width} ${state.ownScale} ${isDark()}`;
  if (drawOverview.key === key) return;
  drawOverview.key = key;
  const ratio = devicePixelRatio || 1, context = canvas.getContext("2d");
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
  const {boxes} = pane, shares = new Float64Array(bins), perBin = axisUs(pane) / bins;
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

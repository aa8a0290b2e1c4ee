// Numbers and boxes in words.

const counts = new Intl.NumberFormat("en-US");
const formatCount = (number) => counts.format(number);

function formatUs(us) {
  if (Math.abs(us) < 1e3) return `${us.toFixed(1)} µs`;
  return Math.abs(us) < 1e6 ? `${(us / 1e3).toFixed(2)} ms` : `${(us / 1e6).toFixed(3)} s`;
}

function byteUnit(bytes) {
  for (const [size, name] of [
    [2 ** 30, "GiB"],
    [2 ** 20, "MiB"],
    [2 ** 10, "KiB"],
  ])
    if (Math.abs(bytes) >= size) return [size, name];
  return [1, "B"];
}

function formatBytes(bytes) {
  const [size, name] = byteUnit(bytes);
  return `${(bytes / size).toFixed(size === 1 ? 0 : 2)} ${name}`;
}

const formatShare = (share) => `${(100 * share).toFixed(1)}\u202f%`;

function actionName(boxes, i) {
  const also = boxes.columns.also?.[i] ?? [];
  return [`${boxes.stage[i]}${OPERATIONS[boxes.op[i]].op}${boxes.chunk[i]}`, ...also].join("+");
}

// Segments of a chunk as text: a number for a whole sequence, `5[0:1228]` for a slice, `5[2000:6000]<3` for one whose first
// tokens sequence 3 has.
function segmentTexts(plan, chunk) {
  return plan
    .segments(chunk)
    .map(
      (one) =>
        (plan.isWhole(one) ? `${one.sequence}` : `${one.sequence}[${one.start}:${one.end}]`) + lenderText(plan, one, "<"),
    );
}

// What a sequence borrows: with a mark in front of the sequence that has it, else as a part of a sentence; empty for nothing.
function lenderText(plan, {sequence}, mark) {
  const [lender, tokens] = plan.data.borrowed[sequence] ?? [-1, 0];
  if (!tokens) return "";
  return mark ? `${mark}${lender}` : `, its first ${formatCount(tokens)} from sequence ${lender}`;
}

function sequencesText(plan, chunk, most) {
  const texts = plan
    .segments(chunk)
    .map((one) =>
      plan.isWhole(one)
        ? `${one.sequence} (${formatCount(one.end)})`
        : `${one.sequence}, tokens ${formatCount(one.start)} to ${formatCount(one.end)} of ${formatCount(plan.data.lengths[one.sequence])}${lenderText(plan, one)}`,
    );
  const rest = texts.length - most;
  return rest > 0 ? [...texts.slice(0, most), `and ${rest} more`] : texts;
}

// Sentence for what a box waited for last.
function reasonText(boxes, i) {
  const cause = boxes.columns.cause[i];
  const other = boxes.because[i];
  if (cause === CAUSE.START || other < 0) return "nothing: it may start with the iteration";
  const name = actionName(boxes, other);
  const rank = boxes.rank(other);
  const until = formatUs(boxes.end[other]);
  if (cause === CAUSE.ORDER) {
    return boxes.start[i] - boxes.end[other] > 0.01
      ? `nothing in the plan: ${name} before it ended at ${until}`
      : `${name} before it, until ${until}`;
  }
  if (cause === CAUSE.HOST_LINK) return `the link to the host, which carried ${name} of rank ${rank} until ${until}`;
  if (cause === CAUSE.TRANSFER) {
    const carried = boxes.columns.carried[i];
    const what = carried >= 0 ? boxes.columns.transfers[carried] : "result";
    return `${name} of rank ${rank}, until ${until}, then its ${what} for ${formatUs(Math.max(0, boxes.start[i] - boxes.end[other]))}`;
  }
  const where = rank === boxes.rank(i) ? "" : ` of rank ${rank}`;
  const memory = boxes.isCompute(other) ? "" : ", which brings its activations back to the device";
  return `${name}${where}${memory}, until ${until}`;
}

// Title and rows (name, value) of a box.
function describeBox(pane, i) {
  const {plan, boxes} = pane;
  const kind = OPERATIONS[boxes.op[i]];
  const chunk = boxes.chunk[i];
  const planned = pane.isMeasured ? boxes.columns.planned[i] : i;
  const rows = [["rank", `${boxes.rank(i)}, ${kind.site} ${boxes.stage[i]}`]];
  rows.push(["time", `${formatUs(boxes.start[i])} to ${formatUs(boxes.end[i])}, ${formatUs(boxes.end[i] - boxes.start[i])}`]);
  rows.push(...comparisonRows(pane, i, planned));
  if (planned >= 0) rows.push(...memoryRows(plan, planned));
  if (!pane.isMeasured || planned >= 0) rows.push(["waits for", reasonText(boxes, i)]);
  if (boxes.isCritical[i]) rows.push(["critical", "on the critical path"]);
  const tokens = plan.chunks.tokens[chunk];
  const padded = plan.chunks.padded[chunk];
  rows.push([
    "chunk",
    `${plan.chunks.kind[chunk]}, ${formatCount(tokens)} tokens${padded > tokens ? `, padded to ${formatCount(padded)}` : ""}`,
  ]);
  rows.push(["sequences", sequencesText(plan, chunk, 6).join("; ")]);
  return {title: `${actionName(boxes, i)}: ${kind.text} of chunk ${chunk}`, rows};
}

// Rows on the same action planned and measured.
function comparisonRows(pane, i, planned) {
  if (planned < 0) return [];
  const {plan, boxes} = pane;
  const measured = plan.measuredBox.get(planned);
  const took = (of, at) => of.end[at] - of.start[at];
  const ratio = (a, b) => (b > 0 ? `, ${(a / b).toFixed(2)} times as planned` : "");
  if (pane.isMeasured)
    return [["planned", `${formatUs(took(plan.planned, planned))}${ratio(took(boxes, i), took(plan.planned, planned))}`]];
  if (measured === undefined) return [];
  return [["measured", `${formatUs(took(plan.measured, measured))}${ratio(took(plan.measured, measured), took(boxes, i))}`]];
}

function memoryRows(plan, planned) {
  const {alloc, free} = plan.data.planned;
  const rows = [];
  const again = plan.planned.recompute.get(planned);
  if (again) rows.push(["recompute", `${formatUs(again.us)} of it: ${again.mode}`]);
  rows.push(["memory", `${formatBytes(alloc[planned])} allocated, ${formatBytes(free[planned])} freed`]);
  if (plan.planned.isCompute(planned)) {
    const middle = (plan.planned.start[planned] + plan.planned.end[planned]) / 2;
    rows.push(["live", formatBytes(plan.liveAt(plan.planned.rank(planned), middle))]);
  }
  return rows;
}

// Title and rows of a time in which a rank does not compute.
function describeGap(pane, rank, time) {
  const {boxes} = pane;
  const gap = boxes.gapAt(rank, time);
  const rows = [["time", `${formatUs(gap.from)} to ${formatUs(gap.to)}, ${formatUs(gap.to - gap.from)}`]];
  if (gap.next < 0) {
    rows.push(["waits for", "nothing: the rank has no further actions"]);
  } else {
    rows.push([
      "next",
      `${actionName(boxes, gap.next)}: ${OPERATIONS[boxes.op[gap.next]].text} of chunk ${boxes.chunk[gap.next]}`,
    ]);
    rows.push(["waits for", reasonText(boxes, gap.next)]);
  }
  return {title: `rank ${rank} is idle`, rows};
}

// Shares of the makespan in which a rank computes, and in which it waits, by what it waits for.
function rankTexts(pane, rank) {
  const {boxes} = pane;
  const shares = new Map();
  const whole = boxes.columns.makespan_us || 1;
  let busy = 0;
  let end = 0;
  const add = (what, us) => {
    if (us > 0) shares.set(what, (shares.get(what) ?? 0) + us / whole);
  };
  for (let i = boxes.first[rank]; i < boxes.first[rank + 1]; i++) {
    add(i === boxes.first[rank] ? "before its first action" : waitedFor(boxes, i), boxes.start[i] - end);
    busy += (boxes.end[i] - boxes.start[i]) / whole;
    end = boxes.end[i];
  }
  add("after its last action", whole - end);
  const found = [...shares].filter(([, share]) => share >= 5e-4).sort((a, b) => b[1] - a[1]);
  return [`computes ${formatShare(busy)}`, ...found.map(([what, share]) => `${formatShare(share)} ${what}`)];
}

function waitedFor(boxes, i) {
  const other = boxes.because[i];
  const cause = boxes.columns.cause[i];
  if (other < 0 || cause === CAUSE.ORDER) return "overhead of the machine";
  if (cause === CAUSE.HOST_LINK) return "waits for the link to the host";
  const where = boxes.rank(other) === boxes.rank(i) ? "" : ` of rank ${boxes.rank(other)}`;
  return `waits for a ${OPERATIONS[boxes.op[other]].text}${where}`;
}

// Fill an element with a title and rows.
function fill(element, {title, rows}) {
  const heading = document.createElement("h3");
  const list = document.createElement("dl");
  heading.textContent = title;
  for (const [name, value] of rows) {
    const term = document.createElement("dt");
    const text = document.createElement("dd");
    term.textContent = name;
    text.textContent = value;
    list.append(term, text);
  }
  element.replaceChildren(heading, list);
}

// Data of the page as typed arrays, and searches in them.

const DATA = JSON.parse(document.getElementById("data").textContent);
const OPERATIONS = DATA.operations;
const CAUSE = {START: 0, ORDER: 1, NEED: 2, TRANSFER: 3, HOST_LINK: 4};

// Boxes of one iteration, planned or measured. Lane r is the compute of rank r, then copies follow, then messages.
class Boxes {
  constructor(columns, numRanks) {
    const count = columns.op.length;
    this.count = count;
    this.numRanks = numRanks;
    this.columns = columns;
    this.op = new Uint8Array(columns.op);
    this.stage = new Uint16Array(columns.stage);
    this.chunk = new Uint32Array(columns.chunk);
    this.start = new Float64Array(columns.start_us);
    this.end = new Float64Array(count);
    this.first = new Uint32Array(columns.lanes.length + 1);
    this.lane = new Uint16Array(count);
    columns.lanes.forEach((number, lane) => {
      this.first[lane + 1] = this.first[lane] + number;
      this.lane.fill(lane, this.first[lane], this.first[lane + 1]);
    });
    this.because = new Int32Array(count);
    for (let i = 0; i < count; i++) {
      this.end[i] = this.start[i] + columns.time_us[i];
      this.because[i] = columns.because[i] === 0 ? -1 : i - columns.because[i];
    }
    this.isCritical = new Uint8Array(count);
    for (const i of columns.critical) this.isCritical[i] = 1;
    this.recompute = new Map();
    const again = columns.recompute;
    if (again) again.box.forEach((i, at) => this.recompute.set(i, {us: again.time_us[at], mode: again.modes[again.mode[at]]}));
  }

  numLanes() {
    return this.first.length - 1;
  }
  rank(i) {
    return this.lane[i] % this.numRanks;
  }
  isCompute(i) {
    return this.lane[i] < this.numRanks;
  }
  hasStream(stream) {
    const from = stream * this.numRanks;
    return from < this.numLanes() && this.first[from + this.numRanks] > this.first[from];
  }

  // First box of a lane that ends after a time; the end of the lane if there is none.
  firstEndingAfter(lane, time) {
    let low = this.first[lane];
    let high = this.first[lane + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.end[middle] > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // Box of a lane at a time; -1 if the lane is idle then.
  at(lane, time) {
    const i = this.firstEndingAfter(lane, time);
    return i < this.first[lane + 1] && this.start[i] <= time ? i : -1;
  }

  // Boxes of a chunk, in the order of the lanes.
  ofChunk(chunk) {
    if (!this.chunkFirst) this.#index();
    return this.chunkBoxes.subarray(this.chunkFirst[chunk] ?? 0, this.chunkFirst[chunk + 1] ?? 0);
  }

  #index() {
    const most = this.chunk.reduce((a, b) => Math.max(a, b), 0);
    this.chunkFirst = new Uint32Array(most + 2);
    for (let i = 0; i < this.count; i++) this.chunkFirst[this.chunk[i] + 1]++;
    for (let c = 0; c <= most; c++) this.chunkFirst[c + 1] += this.chunkFirst[c];
    const next = this.chunkFirst.slice();
    this.chunkBoxes = new Uint32Array(this.count);
    for (let i = 0; i < this.count; i++) this.chunkBoxes[next[this.chunk[i]]++] = i;
  }

  // The compute step for which a rank is idle at a time, with the gap's start and end.
  gapAt(rank, time) {
    const next = this.firstEndingAfter(rank, time);
    const from = next > this.first[rank] ? this.end[next - 1] : 0;
    const isLast = next === this.first[rank + 1];
    return {next: isLast ? -1 : next, from, to: isLast ? this.columns.makespan_us : this.start[next]};
  }

  // Number of the box that started last before another in its lane ended, or follows it.
  neighbour(i, step) {
    const lane = this.lane[i];
    const next = i + step;
    return next >= this.first[lane] && next < this.first[lane + 1] ? next : i;
  }
}

// A plan with its planned boxes, those of a run of it (or null), and its memory.
class PlanModel {
  constructor(data, number) {
    Object.assign(this, {number, name: data.name, data, numRanks: data.num_ranks, chunks: data.chunks, memory: data.memory});
    this.planned = new Boxes(data.planned, data.num_ranks);
    this.measured = data.measured ? new Boxes(data.measured, data.num_ranks) : null;
    this.severalStages = data.stages.some((stages) => stages.length > 1);
    this.measuredBox = new Map();
    if (data.measured)
      data.measured.planned.forEach((planned, i) => {
        if (planned >= 0) this.measuredBox.set(planned, i);
      });
    this.#shareRecompute();
    this.liveOf = [];
    this.itemTables = [];
  }

  // In a run, recompute has the planned share of its backward.
  #shareRecompute() {
    for (const [planned, {us, mode}] of this.planned.recompute) {
      const box = this.measuredBox.get(planned);
      if (box === undefined) continue;
      const share = us / (this.planned.end[planned] - this.planned.start[planned]);
      this.measured.recompute.set(box, {us: share * (this.measured.end[box] - this.measured.start[box]), mode});
    }
  }

  // Segments of a chunk: sequence, start, end.
  segments(chunk) {
    const numbers = this.chunks.segments[chunk];
    const found = [];
    for (let i = 0; i < numbers.length; i += 3) found.push({sequence: numbers[i], start: numbers[i + 1], end: numbers[i + 2]});
    return found;
  }

  isWhole(segment) {
    return segment.start === 0 && segment.end === this.data.lengths[segment.sequence];
  }

  // A table with 1 for a chunk, 2 for others with sequences of its trees, and 0.
  marksOf(chunk) {
    const {roots} = this.data;
    const trees = new Set(this.segments(chunk).map((one) => roots[one.sequence] ?? -1));
    const isOfTree = (other) => this.segments(other).some((one) => trees.has(roots[one.sequence]));
    return Uint8Array.from(this.chunks.tokens, (_, other) => (other === chunk ? 1 : isOfTree(other) ? 2 : 0));
  }

  // Live bytes of a rank: values valid from a time until the next.
  live(rank) {
    return (this.liveOf[rank] ??= this.#live(rank));
  }

  #live(rank) {
    const {alloc, free} = this.data.planned;
    const events = this.memory.events[rank];
    const boxes = this.planned;
    const time = [0];
    const bytes = [this.memory.static[rank]];
    const add = (at, delta) => {
      if (delta) {
        time.push(at);
        bytes.push(bytes[bytes.length - 1] + delta);
      }
    };
    if (events) {
      events.code.forEach((code, i) => add(events.time_us[i], code % 2 ? -free[code >> 1] : alloc[code >> 1]));
    } else {
      for (let i = boxes.first[rank]; i < boxes.first[rank + 1]; i++) {
        add(boxes.start[i], alloc[i]);
        add(boxes.end[i], -free[i]);
      }
    }
    return {time: new Float64Array(time), bytes: new Float64Array(bytes)};
  }

  // Memory of a rank by item: for each moment the bytes below and with every item, in the order of the names; null if unknown.
  itemsOf(rank) {
    if (!this.data.items) return null;
    return (this.itemTables[rank] ??= this.#stack(this.data.items.ranks[rank], this.data.items.names.length));
  }

  #stack({time_us: time, changes}, number) {
    const table = new Float64Array(time.length * number);
    const now = new Float64Array(number);
    let at = 0;
    time.forEach((_, moment) => {
      for (; at < changes.length && changes[at] === moment; at += 3) now[changes[at + 1]] += changes[at + 2];
      let sum = 0;
      for (let item = 0; item < number; item++) table[moment * number + item] = sum += now[item];
    });
    return {time: new Float64Array(time), table};
  }

  // Live bytes of a rank at a time.
  liveAt(rank, at) {
    const {time, bytes} = this.live(rank);
    let low = 0;
    let high = time.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (time[middle] <= at) low = middle + 1;
      else high = middle;
    }
    return bytes[Math.max(0, low - 1)];
  }

  // Chunks of this plan that hold tokens of a chunk of another plan, as a table of 0 and 1; none if its batch is another.
  chunksWith(segments, lengths) {
    const found = new Uint8Array(this.chunks.tokens.length);
    if (`${lengths}` !== `${this.data.lengths}`) return found;
    for (let chunk = 0; chunk < found.length; chunk++) {
      const own = this.segments(chunk);
      const meets = (a) => segments.some((b) => a.sequence === b.sequence && a.start < b.end && b.start < a.end);
      if (own.some(meets)) found[chunk] = 1;
    }
    return found;
  }
}

const PLANS = DATA.plans.map((data, number) => new PlanModel(data, number));

// The timeline: lanes on one canvas, drawn for the interval that is seen.
const canvas = document.getElementById('canvas'), overview = document.getElementById('overview');
const C = {};
const NAMES = [
  'queue', 'prefill', 'decode', 'preempted', 'restart', 'send', 'reader', 'own', 'other', 'idle', 'usual',
  'memory', 'compute', 'ink', 'soft', 'line', 'card', 'band', 'focus',
];
const PHASE_COLOURS = {
  queue: 'queue', prefill: 'prefill', decode: 'decode', preempted: 'preempted', engine_restart: 'restart',
};
const KIND_COLOURS = {
  prefill: 'prefill', own_prefill: 'own', preemption: 'preempted', engine_restart: 'restart', arrival: 'send',
  reader: 'reader', service: 'send', queue: 'queue', device: 'decode',
  host_idle: 'idle', host_read: 'idle', other_steps: 'other', unknown: 'other', usual: 'usual',
};
const STRETCHES = [
  ['scheduled', 'other'], ['device', 'decode'], ['read', 'idle'], ['service', 'send'], ['sent', 'reader'],
];
const ROWS = 10, ROW = 15, STRETCH = 15, MANY = 2000;
const everyone = neighbours(0, S.id.length), memberships = new Map();
let rows = [], lanes = [], context = null, width = 0, pending = false;

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of NAMES) C[name] = style.getPropertyValue('--' + name).trim();
  C.hatch = {};
}

function hatch(colour) {
  if (!C.hatch[colour]) {
    const tile = document.createElement('canvas');
    tile.width = tile.height = 6;
    const ink = tile.getContext('2d');
    ink.fillStyle = C[colour];
    ink.fillRect(0, 0, 6, 6);
    ink.strokeStyle = C.card;
    ink.lineWidth = 1.2;
    ink.beginPath();
    ink.moveTo(-1, 7); ink.lineTo(7, -1); ink.moveTo(-4, 4); ink.lineTo(4, -4); ink.moveTo(2, 10); ink.lineTo(10, 2);
    ink.stroke();
    C.hatch[colour] = context.createPattern(tile, 'repeat');
  }
  return C.hatch[colour];
}

// Rows of the lane of others: the requests with the longest prompts among those in the visible
// steps (among all, where very many steps are visible), and the chosen one.
function pickRows() {
  const [first, end] = visibleSteps();
  const top = (end - first > MANY ? everyone : neighbours(first, end)).slice(0, ROWS);
  if (view.name >= 0 && view.name !== OWN && !top.some(row => row.name === view.name))
    top[Math.min(top.length, ROWS - 1)] = { name: view.name };
  rows = top.map(({ name }) => ({ name, in: membership(name) }));
}

// Per step: 0 not in it, 1 decodes, 2 prefills.
function membership(name) {
  if (memberships.has(name)) return memberships.get(name);
  const inSet = D.sets.map(set => set.includes(name));
  const found = Uint8Array.from(S.id, (_, s) =>
    S.prefills[s].some(([who]) => who === name) ? 2 : inSet[S.members[s]] ? 1 : 0);
  memberships.set(name, found);
  return found;
}

function layOut() {
  lanes = [];
  let top = 24;
  const lane = (id, label, height, draw) => { lanes.push({ id, label, top, height, draw }); top += height + 10; };
  lane('phases', ['request'], 30, drawPhases);
  lane('waits', ['wait per token'], 92, drawWaits);
  lane('tokens', STRETCHES.map(([name]) => name), STRETCHES.length * STRETCH, drawTokens);
  lane('steps', ['prefill tokens', 'decodes'], 104, drawSteps);
  lane('shares', ['bandwidth', 'FLOP/s'], 26, drawShares);
  // As high whoever is seen, so that nothing below jumps while one moves.
  if (everyone.length) lane('others', [], Math.min(ROWS, everyone.length) * ROW, drawOthers);
  return top;
}

function x(time) { return LEFT + (time - view.from) / (view.to - view.from) * (width - LEFT); }

function timeAt(pixel) { return view.from + (pixel - LEFT) / (width - LEFT) * (view.to - view.from); }

function visibleTokens() {
  const first = lowerBound(arrived, view.from, view.first, view.end);
  const last = lowerBound(i => T.scheduled[i] ?? arrived(i), view.to, first, view.end);
  return [first, Math.min(last + 1, view.end)];
}

function visibleSteps() {
  return [lowerBound(s => S.end[s], view.from, 0, S.id.length), lowerBound(s => S.start[s], view.to, 0, S.id.length)];
}

// Draws a stretch of time as a rectangle at least a pixel wide, unless it falls on the pixel of the
// one before.
function box(begin, end, top, height, before) {
  const left = Math.max(x(begin), LEFT), right = Math.min(x(end), width);
  if (right < LEFT || left > width || right < before + 0.5) return before;
  context.fillRect(left, top, Math.max(right - left - (right - left > 4 ? 1 : 0), 1), height);
  return Math.max(left + 1, right);
}

function size(target, height) {
  const ratio = window.devicePixelRatio || 1, across = target.clientWidth;
  if (target.width !== Math.round(across * ratio) || target.height !== Math.round(height * ratio)) {
    target.width = Math.round(across * ratio);
    target.height = Math.round(height * ratio);
    target.style.height = height + 'px';
  }
  const drawn = target.getContext('2d');
  drawn.setTransform(ratio, 0, 0, ratio, 0, 0);
  drawn.clearRect(0, 0, across, height);
  return drawn;
}

function draw() {
  pending = false;
  pickRows();
  const height = layOut();
  context = size(canvas, height);
  width = canvas.clientWidth;
  context.font = '11px system-ui, sans-serif';
  context.textBaseline = 'middle';
  lanes.forEach(drawGround);
  drawChoice(height);
  drawAxis(height);
  for (const lane of lanes) {
    drawLabels(lane);
    context.save();
    context.beginPath();
    context.rect(LEFT, lane.top - 2, width - LEFT, lane.height + 4);
    context.clip();
    lane.draw(lane);
    context.restore();
  }
  drawOverview();
}

function redraw() {
  if (!pending) requestAnimationFrame(draw);
  pending = true;
}

function drawAxis(height) {
  const wanted = (view.to - view.from) / Math.max((width - LEFT) / 110, 1);
  const power = 10 ** Math.floor(Math.log10(wanted));
  const tick = [1, 2, 5, 10].map(n => n * power).find(n => n >= wanted);
  context.textAlign = 'center';
  for (let at = Math.ceil(view.from / tick) * tick; at <= view.to; at += tick) {
    const place = Math.round(x(at)) + 0.5;
    context.strokeStyle = C.line;
    context.beginPath(); context.moveTo(place, 18); context.lineTo(place, height); context.stroke();
    context.fillStyle = C.soft;
    context.fillText(axisText(at, tick), place, 9);
  }
}

function axisText(at, tick) {
  const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10(tick / MS))));
  if (tick < 1e8) return (at / MS).toFixed(digits) + ' ms';
  return (at / 1e9).toFixed(Math.max(0, Math.ceil(-Math.log10(tick / 1e9)))) + ' s';
}

function drawLabels(lane) {
  context.textAlign = 'left';
  context.fillStyle = C.soft;
  const labels = lane.id === 'others' ? rows.map(row => short(D.names[row.name])) : lane.label;
  labels.forEach((label, n) => {
    context.fillStyle = lane.id === 'others' && rows[n].name === view.name ? C.focus : C.soft;
    const row = lane.id === 'others' ? ROW : lane.height / labels.length;
    context.fillText(label, 2, lane.top + (n + 0.5) * row, LEFT - 8);
  });
}

function short(name) { return name.length > 19 ? name.slice(0, 8) + '\u2026' + name.slice(-9) : name; }

// What lies under everything, what is chosen included: the rows' ground.
function drawGround(lane) {
  const ground = (top, height) => context.fillRect(LEFT, top, width - LEFT, height);
  context.fillStyle = C.band;
  if (lane.id === 'phases') ground(lane.top, lane.height);
  if (lane.id === 'tokens') for (let n = 0; n < STRETCHES.length; n += 2) ground(lane.top + n * STRETCH, STRETCH);
  if (lane.id !== 'others') return;
  rows.forEach((row, n) => {
    context.fillStyle = row.name === view.name ? C.line : C.band;
    ground(lane.top + n * ROW + 1, ROW - 2);
  });
}

function drawPhases(lane) {
  for (const [name, begin, end] of D.phases) {
    const colour = PHASE_COLOURS[name];
    context.fillStyle = name === 'preempted' || name === 'engine_restart' ? hatch(colour) : C[colour];
    box(begin, end, lane.top, 19, -1);
    const left = Math.max(x(begin), LEFT), room = Math.min(x(end), width) - left;
    const text = name.replace('_', ' ') + (room > 120 ? '  ' + ms(end - begin) : '');
    const across = context.measureText(text).width;
    if (room < across + 12) continue;
    context.fillStyle = C[colour];
    context.fillRect(left + 3, lane.top + 3, across + 6, 13);
    context.fillStyle = C.card;
    context.textAlign = 'left';
    context.fillText(text, left + 6, lane.top + 10);
  }
  context.fillStyle = C.own;
  let before = -1;
  for (const [, , , begin, end] of D.chunks) before = box(begin, end, lane.top + 22, 8, before);
}

function drawWaits(lane) {
  const [first, end] = visibleTokens();
  let most = 2 * D.usual.gap;
  for (let i = first; i < end; i++) if (i !== view.first && T.wait[i] > most) most = T.wait[i];
  const bottom = lane.top + lane.height;
  most ||= 1;
  // The unusual ones last: where a pixel has many, it is they who are to be seen.
  for (const unusual of [false, true]) {
    for (let i = first; i < end; i++) {
      if (T.wait[i] === null || (T.kind[i] !== 'usual') !== unusual) continue;
      const at = arrived(i), height = Math.max(2, Math.min(1, T.wait[i] / most) * (lane.height - 14));
      context.fillStyle = i === view.first ? hatch(KIND_COLOURS[T.kind[i]]) : C[KIND_COLOURS[T.kind[i]]];
      const left = Math.max(x(at - T.wait[i] * MS), LEFT), right = Math.min(x(at), width);
      context.fillRect(left, bottom - height, Math.max(right - left - (right - left > 4 ? 1 : 0), 1), height);
    }
  }
  const usual = bottom - D.usual.gap / most * (lane.height - 14);
  context.strokeStyle = C.ink;
  context.setLineDash([3, 4]);
  context.beginPath(); context.moveTo(LEFT, usual); context.lineTo(width, usual); context.stroke();
  context.setLineDash([]);
  context.fillStyle = C.soft;
  context.textAlign = 'right';
  context.fillText('highest ' + msText(most) + ', usual ' + msText(D.usual.gap), width - 4, lane.top + 4);
}

function drawTokens(lane) {
  const [first, end] = visibleTokens();
  const before = STRETCHES.map(() => -1), roomy = (end - first) * 40 < width;
  for (let i = Math.max(first - 1, view.first); i < end; i++) {
    way(i).forEach(([, begin, until], n) => {
      if (begin === null) return;
      context.fillStyle = C[STRETCHES[n][1]];
      context.globalAlpha = n === 0 ? 0.55 : 1;
      before[n] = box(begin, until, lane.top + n * STRETCH + 2, STRETCH - 4, before[n]);
      context.globalAlpha = 1;
      if (roomy && n === 1 && x(until) - x(begin) > 22) {
        context.fillStyle = C.card;
        context.textAlign = 'center';
        const middle = (Math.max(x(begin), LEFT) + Math.min(x(until), width)) / 2;
        context.fillText(String(T.index[i]), middle, lane.top + 1.5 * STRETCH);
      }
    });
  }
}

function drawSteps(lane) {
  const [first, end] = visibleSteps();
  let prompts = 1, decodes = 1;
  for (let s = first; s < end; s++) {
    prompts = Math.max(prompts, S.prefill_tokens[s]);
    decodes = Math.max(decodes, S.decodes[s]);
  }
  const middle = lane.top + 62, over = 58, under = lane.height - 64;
  for (let s = first; s < end; s++) {
    const left = Math.max(x(S.start[s]), LEFT), right = Math.min(x(S.end[s]), width);
    const across = Math.max(right - left - (right - left > 4 ? 1 : 0), 1);
    const up = S.prefill_tokens[s] / prompts * over, own = ownTokens(s) / prompts * over;
    const down = S.decodes[s] / decodes * under;
    context.globalAlpha = S.own[s] ? 1 : 0.4;
    if (up) {
      context.fillStyle = hatch('prefill');
      context.fillRect(left, middle - up, across, Math.max(up - own, 1));
    }
    if (own) { context.fillStyle = C.own; context.fillRect(left, middle - own, across, own); }
    context.fillStyle = C.decode;
    context.fillRect(left, middle + 2, across, down);
    context.globalAlpha = 1;
    if (across > 44) {
      context.fillStyle = C.card;
      context.textAlign = 'center';
      if (down > 14) context.fillText(String(S.id[s]), left + across / 2, middle + 10);
    }
  }
  context.fillStyle = C.soft;
  context.textAlign = 'right';
  const most = 'at most ' + count(prompts) + ' prefill tokens, ' + count(decodes) + ' decodes';
  context.fillText(most, width - 4, lane.top + 4);
}

function drawShares(lane) {
  const [first, end] = visibleSteps();
  [['bandwidth_share', 'memory'], ['flops_share', 'compute']].forEach(([name, colour], n) => {
    let before = -1;
    context.fillStyle = C[colour];
    for (let s = first; s < end; s++) {
      if (S[name][s] === null) continue;
      context.globalAlpha = 0.12 + 0.88 * Math.min(1, S[name][s]);
      before = box(S.start[s], S.end[s], lane.top + n * 13, 12, before);
    }
    context.globalAlpha = 1;
  });
}

function drawOthers(lane) {
  const [first, end] = visibleSteps();
  rows.forEach((row, n) => {
    const before = [0, -1, -1], top = lane.top + n * ROW;
    for (let s = first; s < end; s++) {
      const how = row.in[s];
      if (!how) continue;
      context.fillStyle = how === 2 ? hatch('prefill') : C.decode;
      context.globalAlpha = how === 2 ? 1 : 0.55;
      before[how] = box(S.start[s], S.end[s], top + 3, ROW - 6, before[how]);
    }
    context.globalAlpha = 1;
  });
}

function drawChoice(height) {
  const band = (begin, end, colour, alpha) => {
    const left = Math.max(x(begin), LEFT), right = Math.min(x(end), width);
    if (right < LEFT || left > width) return;
    context.fillStyle = colour;
    context.globalAlpha = alpha;
    context.fillRect(left, 18, Math.max(right - left, 2), height - 18);
    context.globalAlpha = 1;
  };
  if (view.token >= 0 && T.wait[view.token] !== null)
    band(arrived(view.token) - T.wait[view.token] * MS, arrived(view.token), C.focus, 0.16);
  if (view.step >= 0) band(S.start[view.step], S.end[view.step], C.ink, 0.08);
}

function drawOverview() {
  const ink = size(overview, 34), across = overview.clientWidth, [low, high] = view.whole;
  const place = time => LEFT + (time - low) / (high - low) * (across - LEFT);
  ink.fillStyle = C.band;
  ink.fillRect(LEFT, 0, across - LEFT, 34);
  for (const [name, begin, end] of D.phases) {
    ink.fillStyle = C[PHASE_COLOURS[name]];
    ink.fillRect(place(begin), 0, Math.max(place(end) - place(begin), 1), 6);
  }
  for (let i = view.first + 1; i < view.end; i++) {
    if (T.wait[i] === null || T.kind[i] === 'usual') continue;
    ink.fillStyle = C[KIND_COLOURS[T.kind[i]]];
    const begin = place(arrived(i) - T.wait[i] * MS);
    ink.fillRect(begin, 9, Math.max(place(arrived(i)) - begin, 2), 25);
  }
  ink.strokeStyle = C.focus;
  ink.lineWidth = 2;
  ink.strokeRect(place(view.from) + 1, 1, Math.max(place(view.to) - place(view.from) - 2, 3), 32);
}

function legend() {
  const list = document.getElementById('legend');
  const add = (text, name) => {
    const item = document.createElement('li');
    if (name) {
      const mark = document.createElement('span');
      mark.className = 'mark ' + name;
      item.append(mark);
    }
    item.append(text);
    list.append(item);
  };
  const seen = new Set(T.kind);
  for (const kind of Object.keys(KIND_WORDS)) if (seen.has(kind)) add(KIND_WORDS[kind], 'kind-' + kind);
  add('in steps: its own prefill (that of others is hatched)', 'kind-own_prefill');
  add('pale: steps that it was not in');
  if (everyone.length > ROWS)
    add(`${count(everyone.length)} other requests shared its steps; the rows show up to ${ROWS} of those in sight`);
}

function startLanes() {
  readColours();
  legend();
  listeners.push(redraw);
  new ResizeObserver(redraw).observe(canvas);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { readColours(); redraw(); });
  startPointer();
}

// What is seen and chosen: the interval of time, the output, the token or step. Parts of the page
// that show it register for its changes.
const LEFT = 118;
const SHORTEST = 20000;
const view = {
  from: 0, to: 1, output: T.output.length ? T.output[0] : 0, first: 0, end: 0, token: -1, step: -1, name: -1,
  whole: [0, Math.max(D.request.end, 1) * 1.01],
};
const listeners = [];

function changed(what) { for (const listener of listeners) listener(what); }

function showInterval(from, to) {
  const [low, high] = view.whole;
  const length = Math.min(Math.max(to - from, SHORTEST), high - low);
  view.from = Math.min(Math.max(from, low), high - length);
  view.to = view.from + length;
  changed('time');
}

function zoom(factor, around) {
  const at = around ?? (view.from + view.to) / 2;
  showInterval(at - (at - view.from) * factor, at + (view.to - at) * factor);
}

function move(share) {
  const by = (view.to - view.from) * share;
  showInterval(view.from + by, view.to + by);
}

function fit() { showInterval(...view.whole); }

function setOutput(output) {
  view.output = output;
  [view.first, view.end] = rangeOf(output);
  changed('output');
}

// Chooses a token (its place) and with it its step; brings it into sight, closely where asked to.
function chooseToken(i, closely) {
  if (i < 0 || i >= T.index.length) return;
  if (T.output[i] !== view.output) setOutput(T.output[i]);
  view.token = i;
  view.step = stepAt.get(T.step[i]) ?? -1;
  const end = arrived(i), wait = (T.wait[i] ?? 1) * MS, begin = end === null ? null : end - wait;
  if (end !== null && (closely || end > view.to || end < view.from)) {
    const around = closely ? Math.max(wait * 1.5, 8 * D.usual.gap * MS, SHORTEST) : (view.to - view.from) / 2;
    const middle = (begin + end) / 2;
    showInterval(middle - around, middle + around);
  }
  changed('choice');
}

function chooseStep(s) {
  view.step = s;
  view.token = -1;
  for (let i = view.first; i < view.end; i++) if (T.step[i] === S.id[s]) { view.token = i; break; }
  changed('choice');
}

function chooseName(name) {
  view.name = view.name === name ? -1 : name;
  changed('choice');
}

// The next or previous of the longest waits, in order of time.
function nextSlow(direction) {
  const places = D.slowest.map(([output, index]) => tokenPlace(output, index)).filter(i => i >= 0);
  places.sort((a, b) => arrived(a) - arrived(b));
  const here = view.token < 0 ? (direction > 0 ? -Infinity : Infinity) : arrived(view.token);
  const next = direction > 0 ? places.find(i => arrived(i) > here) : places.reverse().find(i => arrived(i) < here);
  if (next !== undefined) chooseToken(next, true);
}

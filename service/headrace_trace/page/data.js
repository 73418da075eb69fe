// The trace, read from the block that page.py wrote; times are ns since the call's arrival.
const D = JSON.parse(document.getElementById('data').textContent);
const MS = 1e6;
const KIND_WORDS = {
  prefill: 'prefill of others', own_prefill: 'own prefill', preemption: 'preempted', engine_restart: 'engine restart',
  arrival: 'on its way in', reader: 'reader blocked', service: 'service late',
  queue: 'queue', device: 'device', host_idle: 'device idle', host_read: 'read late', other_steps: 'other steps',
  unknown: 'not in the trace', usual: 'as usual',
};
const T = D.tokens, S = D.steps;
const stepAt = new Map(S.id.map((id, at) => [id, at]));
const OWN = D.request.name;

// When the reader could have token i: the last that is known of its way.
function arrived(i) { return T.written[i] ?? T.emitted[i] ?? T.sampled[i]; }

// Tokens of one output as places in the columns; they stand side by side.
function rangeOf(output) {
  const first = T.output.indexOf(output);
  if (first < 0) return [0, 0];
  let end = first;
  while (end < T.output.length && T.output[end] === output) end++;
  return [first, end];
}

function tokenPlace(output, index) {
  const [first, end] = rangeOf(output);
  for (let i = first; i < end; i++) if (T.index[i] === index) return i;
  return -1;
}

// The moments of token i's way, in order, with the name of the stretch that ends there; what is not
// known is left out.
function way(i) {
  const step = stepAt.get(T.step[i]);
  const at = [
    ['waited for the device', T.scheduled[i], step === undefined ? null : S.start[step]],
    ['on the device', step === undefined ? null : S.start[step], step === undefined ? null : S.end[step]],
    ['until it was read', step === undefined ? T.scheduled[i] : S.end[step], T.sampled[i]],
    ['in the service', T.sampled[i], T.emitted[i]],
    ['sent', T.emitted[i], T.written[i]],
  ];
  return at.map(([name, begin, end]) =>
    begin === null || end === null ? [name, null, null] : [name, begin, Math.max(begin, end)]);
}

// First place in a sorted column whose value is not below x, between low and high.
function lowerBound(column, x, low, high) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column(middle) < x) low = middle + 1; else high = middle;
  }
  return low;
}

function ownTokens(step) {
  let own = 0;
  for (const [name, count] of S.prefills[step]) if (name === OWN) own += count;
  return own;
}

// The requests that shared steps from first to end with this one: name, number of steps, tokens of
// prompts; those with the longest prompts first.
function neighbours(first, end) {
  const found = new Map();
  for (let s = first; s < end; s++) {
    if (!S.own[s]) continue;
    for (const name of D.sets[S.members[s]]) {
      if (name === OWN) continue;
      const row = found.get(name) ?? { name, steps: 0, tokens: 0 };
      row.steps++;
      found.set(name, row);
    }
    for (const [name, count] of S.prefills[s]) if (name !== OWN && found.has(name)) found.get(name).tokens += count;
  }
  return [...found.values()].sort((a, b) => b.tokens - a.tokens || b.steps - a.steps || a.name - b.name);
}

function ms(ns) { return msText(ns / MS); }

function msText(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return 'unknown';
  if (value >= 10000) return (value / 1000).toLocaleString('en', { maximumFractionDigits: 1 }) + ' s';
  const digits = value >= 1000 ? 0 : value >= 100 ? 1 : value >= 1 ? 2 : 3;
  return value.toLocaleString('en', { minimumFractionDigits: digits, maximumFractionDigits: digits }) + ' ms';
}

function count(value) { return value === null || value === undefined ? 'unknown' : value.toLocaleString('en'); }

function whyOf(i) {
  if (T.why[i]) return T.why[i];
  return T.kind[i] === 'usual' ? 'Nothing unusual.' : 'The trace does not tell.';
}

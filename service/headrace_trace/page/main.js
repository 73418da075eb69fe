// Buttons, keys, the pointer, and what the address asks for (#token=57).
function on(id, kind, does) { document.getElementById(id).addEventListener(kind, does); }

function start() {
  setOutput(view.output);
  document.getElementById('tools').hidden = false;
  on('in', 'click', () => zoom(0.5));
  on('out', 'click', () => zoom(2));
  on('fit', 'click', fit);
  on('slower-after', 'click', () => nextSlow(1));
  on('slower-before', 'click', () => nextSlow(-1));
  on('go', 'change', event => chooseToken(tokenPlace(view.output, Number(event.target.value)), true));
  on('theme', 'click', () => {
    const root = document.documentElement;
    const theme = root.dataset.theme;
    const dark = theme ? theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
    root.dataset.theme = dark ? 'light' : 'dark';
    readColours();
    changed('time');
  });
  for (const button of document.querySelectorAll('.wait')) {
    button.addEventListener('click', () => {
      chooseToken(tokenPlace(Number(button.dataset.output), Number(button.dataset.token)), true);
      document.getElementById('time-title').scrollIntoView({ block: 'start' });
    });
  }
  outputs();
  startLanes();
  startTable();
  fit();
  const asked = /^#token=(?:(\d+)\.)?(\d+)$/.exec(location.hash);
  if (asked) chooseToken(tokenPlace(asked[1] ? Number(asked[1]) : view.output, Number(asked[2])), true);
}

function outputs() {
  const all = [...new Set(T.output)];
  const select = document.getElementById('output');
  document.getElementById('outputs').hidden = all.length < 2;
  for (const output of all) select.append(new Option(String(output), String(output)));
  select.addEventListener('change', () => setOutput(Number(select.value)));
  listeners.push(what => { if (what === 'output') select.value = String(view.output); });
}

const KEYS = {
  ArrowRight: event => event.shiftKey ? move(0.25) : chooseToken(nextPlace(1)),
  ArrowLeft: event => event.shiftKey ? move(-0.25) : chooseToken(nextPlace(-1)),
  Home: () => chooseToken(view.first), End: () => chooseToken(view.end - 1),
  '+': () => zoom(0.5), '=': () => zoom(0.5), '-': () => zoom(2), 0: fit, n: () => nextSlow(1), p: () => nextSlow(-1),
  Enter: () => chooseToken(view.token, true),
  Escape: () => { view.token = view.step = view.name = -1; changed('choice'); },
};

function nextPlace(direction) {
  if (view.token < 0) return direction > 0 ? view.first : view.end - 1;
  return Math.min(Math.max(view.token + direction, view.first), view.end - 1);
}

function onKey(event) {
  const does = event.ctrlKey || event.metaKey || event.altKey ? undefined : KEYS[event.key];
  if (does) {
    does(event);
    event.preventDefault();
  }
}

start();

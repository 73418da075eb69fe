// All tokens as a table, a page at a time: for those who cannot see the timeline, and for copying.
const ROWS_SHOWN = 100;
const COLUMNS = [
  'token', 'came at', 'wait', 'cause', 'step', 'prefill tokens', 'decodes', 'planned', 'device from', 'device to',
  'read', 'made', 'sent',
];
const body = document.querySelector('#table tbody');
let order = [], pageAt = 0;

function sortRows() {
  order = Array.from({ length: view.end - view.first }, (_, n) => view.first + n);
  if (document.getElementById('by-wait').checked) order.sort((a, b) => (T.wait[b] ?? -1) - (T.wait[a] ?? -1));
  pageAt = 0;
}

function plainMs(value) { return value === null || value === undefined ? '' : (value / MS).toFixed(3); }

function fillTable() {
  const pages = Math.max(1, Math.ceil(order.length / ROWS_SHOWN));
  pageAt = Math.min(Math.max(pageAt, 0), pages - 1);
  document.getElementById('page-of').textContent = 'page ' + (pageAt + 1) + ' of ' + pages;
  body.replaceChildren(...order.slice(pageAt * ROWS_SHOWN, (pageAt + 1) * ROWS_SHOWN).map(tableRow));
}

function tableRow(i) {
  const row = make('tr'), s = stepAt.get(T.step[i]), of = column => s === undefined ? null : column[s];
  const head = make('th'), button = make('button', String(T.index[i]));
  button.type = 'button';
  head.scope = 'row';
  head.append(button);
  row.append(head);
  row.setAttribute('aria-selected', String(i === view.token));
  row.addEventListener('click', () => chooseToken(i, true));
  const cells = [
    plainMs(arrived(i)), T.wait[i] === null ? '' : T.wait[i].toFixed(3),
    KIND_WORDS[T.kind[i]] + (T.why[i] ? ': ' + T.why[i] : ''),
    T.step[i] ?? '', of(S.prefill_tokens) ?? '', of(S.decodes) ?? '',
    plainMs(T.scheduled[i]), plainMs(of(S.start)), plainMs(of(S.end)),
    plainMs(T.sampled[i]), plainMs(T.emitted[i]), plainMs(T.written[i]),
  ];
  cells.forEach((text, n) => row.append(make('td', String(text), n === 2 ? 'cause' : '')));
  return row;
}

function startTable() {
  document.getElementById('table-section').hidden = false;
  const head = document.querySelector('#table thead').insertRow();
  for (const name of COLUMNS) { const cell = make('th', name); cell.scope = 'col'; head.append(cell); }
  on('by-wait', 'change', () => { sortRows(); fillTable(); });
  on('page-before', 'click', () => { pageAt--; fillTable(); });
  on('page-after', 'click', () => { pageAt++; fillTable(); });
  listeners.push(what => {
    if (what === 'output') sortRows();
    if (what === 'choice' && view.token >= 0) pageAt = Math.floor(order.indexOf(view.token) / ROWS_SHOWN);
    if (what !== 'time') fillTable();
  });
  sortRows();
  fillTable();
}

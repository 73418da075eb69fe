// What is chosen, in words and figures: a token, its wait and its step, or a step alone.
const detail = document.getElementById('detail');
const SHOWN = 60;

function make(kind, text, name) {
  const element = document.createElement(kind);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  return element;
}

function table(head, lines) {
  const made = make('table'), body = made.createTBody();
  if (head.length) {
    const top = made.createTHead().insertRow();
    for (const text of head) { const cell = make('th', text); cell.scope = 'col'; top.append(cell); }
  }
  for (const line of lines) {
    const row = body.insertRow();
    for (const text of line) row.append(make('td', text));
  }
  return made;
}

function tokenDetail(i) {
  const first = i === view.first, parts = [];
  const ofOutput = T.output[view.end - 1] || T.output[0] ? ' of output ' + T.output[i] : '';
  parts.push(make('h3', 'Token ' + T.index[i] + ofOutput));
  const after = first ? ' after the call' : ' after the one before; usual ' + msText(D.usual.gap);
  parts.push(make('div', 'came at ' + ms(arrived(i)) + ', ' + msText(T.wait[i]) + after, 'hint'));
  parts.push(make('p', whyOf(i), 'why kind-' + T.kind[i]));
  const stretches = way(i).map(([name, begin, end]) =>
    begin === null ? [name, 'unknown', 'unknown'] : [name, ms(begin), ms(end - begin)]);
  parts.push(table(['its way', 'from', 'for'], stretches));
  return parts;
}

function stepDetail(s) {
  const parts = [make('h4', 'Step ' + S.id[s] + (S.own[s] ? '' : ' (not in it)'))];
  const time = S.end[s] - S.start[s], beyond = time / MS - D.usual.step;
  const excess = (beyond >= 0 ? '+' : '\u2212') + msText(Math.abs(beyond));
  const figures = [
    ['on the device', ms(time) + (D.usual.step ? ' (' + excess + ' to a step of decodes)' : '')],
    ['tokens of prompts', count(S.prefill_tokens[s]) + (ownTokens(s) ? ', ' + count(ownTokens(s)) + ' its own' : '')],
    ['decodes', count(S.decodes[s])], ['sequences', count(S.sequences[s])],
    ['requests waiting', count(S.waiting_requests[s])],
    ['free blocks', S.num_blocks[s] ? count(S.free_blocks[s]) + ' of ' + count(S.num_blocks[s]) : 'unknown'],
    ['CUDA graph', S.graph[s] === null ? 'unknown' : S.graph[s] ? 'yes' : 'no'],
  ];
  if (S.draft_tokens[s])
    figures.push(['drafts accepted', count(S.accepted_tokens[s]) + ' of ' + count(S.draft_tokens[s])]);
  if (S.late[s]) figures.push(['late work', 'something was compiled or captured']);
  parts.push(table([], figures));
  parts.push(make('h4', 'Share of the ceilings' + (S.bound[s] ? ': ' + S.bound[s] + '-bound' : '')));
  for (const [name, share] of [['bandwidth', S.bandwidth_share[s]], ['FLOP/s', S.flops_share[s]]]) {
    parts.push(make('div', name + ' ' + (share === null ? 'not measured' : Math.round(100 * share) + '%')));
    if (share !== null) parts.push(shareBar(name, share));
  }
  if (S.prefills[s].length) {
    parts.push(make('h4', 'Prompts in it'));
    const longestFirst = [...S.prefills[s]].sort((a, b) => b[1] - a[1]);
    parts.push(nameButtons(longestFirst.map(([name, tokens]) => [name, count(tokens) + ' tokens'])));
  }
  if (S.lost[s].length) parts.push(make('h4', 'Preempted for it'), nameButtons(S.lost[s].map(name => [name, ''])));
  const others = D.sets[S.members[s]].filter(name => name !== OWN);
  parts.push(make('h4', count(others.length) + ' other requests in it'), nameButtons(others.map(name => [name, ''])));
  if (S.links[s].length)
    parts.push(make('p', 'More traces of it: headrace trace ' + S.links[s].slice(0, 8).join(', '), 'hint'));
  if (view.name >= 0) parts.push(make('p', named(view.name), 'hint'));
  return parts;
}

function shareBar(name, share) {
  const bar = make('div', undefined, 'share');
  const fill = make('div', undefined, name === 'bandwidth' ? 'memory' : 'compute');
  const attributes = {
    role: 'meter', 'aria-label': name, 'aria-valuemin': '0', 'aria-valuemax': '100',
    'aria-valuenow': String(Math.round(100 * share)),
  };
  for (const [key, value] of Object.entries(attributes)) bar.setAttribute(key, value);
  fill.style.width = 100 * Math.min(1, Math.max(0, share)) + '%';
  bar.append(fill);
  return bar;
}

function named(name) {
  const trace = D.traces[name], row = everyone.find(one => one.name === name);
  const shared = row
    ? ' shared ' + count(row.steps) + ' steps, in them ' + count(row.tokens) + ' tokens of its prompt.' : '';
  return D.names[name] + shared + (trace ? ' Its trace: headrace trace ' + trace : '');
}

function nameButtons(entries) {
  const box = make('div', undefined, 'names');
  const add = list => {
    for (const [name, note] of list) {
      const button = make('button', D.names[name] + (name === OWN ? ' (this one)' : '') + (note ? ', ' + note : ''));
      button.type = 'button';
      button.setAttribute('aria-pressed', String(name === view.name));
      button.addEventListener('click', () => chooseName(name));
      box.append(button);
    }
  };
  add(entries.slice(0, SHOWN));
  if (entries.length > SHOWN) {
    const more = make('button', 'and ' + count(entries.length - SHOWN) + ' more');
    more.type = 'button';
    more.addEventListener('click', () => { more.remove(); add(entries.slice(SHOWN)); });
    box.append(more);
  }
  return box;
}

listeners.push(what => {
  if (what !== 'choice') return;
  const parts = [];
  if (view.token >= 0) parts.push(...tokenDetail(view.token));
  if (view.step >= 0) parts.push(...stepDetail(view.step));
  else if (view.token >= 0) {
    const step = T.step[view.token];
    const why = step === null ? 'Its step is not known.' : 'Step ' + step + ' is not in the trace.';
    parts.push(make('p', why, 'hint'));
  }
  if (!parts.length) parts.push(make('p', view.name >= 0 ? named(view.name) : 'Nothing is chosen.', 'hint'));
  detail.replaceChildren(...parts);
});

// The pointer on the timeline: hovering explains, clicking chooses, dragging moves, and the wheel
// with Ctrl zooms.
const tip = document.getElementById('tip');
const CLICK = 4;

function laneAt(y) { return lanes.find(lane => y >= lane.top - 3 && y < lane.top + lane.height + 5); }

// The token whose wait covers a moment, or in the lane of tokens the one whose way does.
function tokenAt(time) {
  const i = lowerBound(arrived, time, view.first, view.end);
  return i < view.end ? i : view.end - 1;
}

function tokenOnWay(time, stretch) {
  const [first, end] = visibleTokens();
  const slack = 2 * (view.to - view.from) / Math.max(width - LEFT, 1);
  for (let i = Math.max(first - 1, view.first); i < end; i++) {
    const [, begin, until] = way(i)[stretch];
    if (begin !== null && time >= begin - slack && time <= until + slack) return i;
  }
  return tokenAt(time);
}

function stepOver(time) {
  const s = lowerBound(at => S.end[at], time, 0, S.id.length);
  return s < S.id.length && S.start[s] <= time ? s : -1;
}

// What lies under a place of the canvas.
function under(px, py) {
  const lane = laneAt(py), time = timeAt(px);
  if (!lane) return {};
  if (lane.id === 'others') {
    const row = Math.max(0, Math.floor((py - lane.top) / ROW));
    return { name: rows[row]?.name, step: px < LEFT ? -1 : stepOver(time) };
  }
  if (px < LEFT) return {};
  if (lane.id === 'waits') return { token: tokenAt(time) };
  if (lane.id === 'tokens') {
    const stretch = Math.max(0, Math.floor((py - lane.top) / STRETCH));
    return { token: tokenOnWay(time, Math.min(STRETCHES.length - 1, stretch)) };
  }
  if (lane.id === 'steps' || lane.id === 'shares') return { step: stepOver(time) };
  return { phase: D.phases.find(([, begin, end]) => begin <= time && time < end) };
}

function tipText(found) {
  if (found.phase) return found.phase[0].replace('_', ' ') + ': ' + ms(found.phase[2] - found.phase[1]);
  if (found.token !== undefined && found.token >= 0) {
    const i = found.token;
    const after = i === view.first ? ' after the call' : ' after the one before';
    return 'token ' + T.index[i] + ': ' + msText(T.wait[i]) + after + '\n' + whyOf(i);
  }
  const lines = found.name === undefined ? [] : [D.names[found.name]];
  if (found.step !== undefined && found.step >= 0) lines.push(stepLine(found.step));
  return lines.join('\n');
}

function stepLine(s) {
  const bound = S.bound[s] ? ', ' + S.bound[s] + '-bound' : '';
  return 'step ' + S.id[s] + ': ' + ms(S.end[s] - S.start[s]) + ', ' + count(S.prefill_tokens[s]) +
    ' prefill tokens, ' + count(S.decodes[s]) + ' decodes' + bound;
}

function showTip(event, found) {
  const text = tipText(found);
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const stage = canvas.parentElement.getBoundingClientRect();
  const left = event.clientX - stage.left + 14, top = event.clientY - stage.top + 14;
  tip.style.left = Math.max(0, Math.min(left, stage.width - tip.offsetWidth - 8)) + 'px';
  tip.style.top = top + 'px';
}

function choose(found) {
  if (found.name !== undefined) chooseName(found.name);
  else if (found.token !== undefined && found.token >= 0) chooseToken(found.token);
  else if (found.step !== undefined && found.step >= 0) chooseStep(found.step);
}

function startPointer() {
  let pressed = null;
  const place = event => {
    const at = canvas.getBoundingClientRect();
    return [event.clientX - at.left, event.clientY - at.top];
  };
  canvas.addEventListener('pointerdown', event => {
    pressed = { x: event.clientX, from: view.from, to: view.to, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener('pointermove', event => {
    if (!pressed) return showTip(event, under(...place(event)));
    const by = event.clientX - pressed.x;
    pressed.moved ||= Math.abs(by) > CLICK;
    canvas.classList.toggle('moving', pressed.moved);
    tip.hidden = true;
    if (pressed.moved) {
      const shift = by / (width - LEFT) * (pressed.to - pressed.from);
      showInterval(pressed.from - shift, pressed.to - shift);
    }
  });
  canvas.addEventListener('pointerup', event => {
    if (pressed && !pressed.moved) choose(under(...place(event)));
    pressed = null;
    canvas.classList.remove('moving');
  });
  canvas.addEventListener('pointercancel', () => { pressed = null; });
  canvas.addEventListener('pointerleave', () => { tip.hidden = true; });
  canvas.addEventListener('dblclick', event => zoom(0.4, timeAt(place(event)[0])));
  canvas.addEventListener('wheel', event => {
    if (event.ctrlKey || event.metaKey)
      zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) / 120), timeAt(place(event)[0]));
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))
      move((event.deltaX || event.deltaY) / 1200);
    else return;
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener('keydown', onKey);
  startOverview();
}

function startOverview() {
  const go = event => {
    const at = overview.getBoundingClientRect(), [low, high] = view.whole;
    const time = low + (event.clientX - at.left - LEFT) / (at.width - LEFT) * (high - low);
    const half = (view.to - view.from) / 2;
    showInterval(time - half, time + half);
  };
  overview.addEventListener('pointerdown', event => { overview.setPointerCapture(event.pointerId); go(event); });
  overview.addEventListener('pointermove', event => { if (event.buttons) go(event); });
}

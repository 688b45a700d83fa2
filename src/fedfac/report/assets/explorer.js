// The split explorer: a strip of elements per layer, coloured by ν and by side, with a slider over rounds.
const unpack = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

class Layer {
  constructor(layer) {
    Object.assign(this, layer);
    this.bits = unpack(layer.frames.sides);
    this.codes = layer.frames.scores === null ? null : unpack(layer.frames.scores);
  }

  shared(frame, j) {
    const i = frame * this.elements + j;
    return Boolean((this.bits[i >> 3] >> (i & 7)) & 1);
  }

  score(frame, j) {
    const [low, high] = this.frames.range;
    return low + (this.codes[frame * this.elements + j] / 255) * (high - low);
  }

  at(column, round) {
    return this[column] ? this[column][this.rounds.indexOf(round)] : null;
  }

  changes(j) {
    let n = 0;
    for (let f = 1; f < this.frames.rounds.length; f++) n += this.shared(f, j) !== this.shared(f - 1, j);
    return n;
  }
}

function showExplorer() {
  const runs = facts.runs.filter((run) => run.layers.length || run.personal.length);
  if (!runs.length) return;
  $('split').hidden = false;
  const name = (run) => [run.setting, run.method, facts.runs.some((r) => r.seed !== run.seed) ? `seed ${run.seed}` : ''].filter(Boolean).join(' · ');
  const body = make('div');
  const open = (i) => explore(body, runs[i]);
  const picker = choice('run', runs.map((run, i) => [i, name(run)]), (value) => open(Number(value)));
  const start = runs.findIndex((run) => run.decisions > 1);
  picker.list.value = String(Math.max(start, 0));
  $('explorer').replaceChildren(make('div', { class: 'controls' }, picker.node), body);
  open(Math.max(start, 0));
}

let repaintSplit = () => {};
redraws.push(() => repaintSplit());

function explore(body, run) {
  const whole = run.personal.length ? make('p', { class: 'note' }, `Personal as a whole: ${run.personal.join(', ')}.`) : null;
  if (!run.layers.length) {
    repaintSplit = () => {};
    return body.replaceChildren(make('p', {}, 'This method splits no layer by element.'), whole || '');
  }
  const layers = run.layers.map((layer) => new Layer(layer)), rounds = layers[0].frames.rounds;
  const state = { frame: rounds.length - 1, sorted: false };
  const slider = make('input', { type: 'range', min: 0, max: rounds.length - 1, value: state.frame, id: 'round', 'aria-label': 'round' });
  const said = make('output', { for: 'round', id: 'round-said' });
  const order = make('input', { type: 'checkbox', id: 'by-score' });
  const parts = layers.map((layer) => ({ layer, node: make('div', { class: 'layer' }) }));
  let playing = null;
  const play = make('button', { type: 'button', id: 'play' }, 'Play');
  const stop = () => { clearInterval(playing); playing = null; play.textContent = 'Play'; };
  const move = (frame) => { state.frame = frame; slider.value = frame; paint(); };
  const paint = () => {
    const round = rounds[state.frame];
    const shares = layers.map((layer) => {
      let n = 0;
      for (let j = 0; j < layer.elements; j++) n += layer.shared(state.frame, j);
      return `${layer.name}: ${n} of ${layer.elements} shared`;
    });
    said.textContent = `${round === 0 ? 'decided once, before round 1' : `round ${round}`} · ${shares.join(' · ')}`;
    slider.setAttribute('aria-valuetext', said.textContent);
    parts.forEach((part) => paintLayer(part, state));
  };
  slider.addEventListener('input', () => { stop(); move(Number(slider.value)); });
  order.addEventListener('change', () => { state.sorted = order.checked; paint(); });
  play.addEventListener('click', () => {
    if (playing) return stop();
    play.textContent = 'Stop';
    if (state.frame === rounds.length - 1) move(0);
    playing = setInterval(() => (state.frame + 1 < rounds.length ? move(state.frame + 1) : stop()), 150);
  });
  const few = layers[0].rounds.length > rounds.length ? make('p', { class: 'note' }, `${rounds.length} of ${layers[0].rounds.length} rounds shown, evenly chosen.`) : null;
  body.replaceChildren(
    make('div', { class: 'controls' }, slider, rounds.length > 1 ? play : null, layers[0].codes ? make('label', {}, order, 'order by ν') : null),
    said, few || '', whole || '', ...parts.map((part) => part.node));
  parts.forEach(buildLayer);
  repaintSplit = paint;
  paint();
}

function buildLayer(part) {
  part.strip = make('div');
  part.read = make('output', { 'aria-live': 'polite' });
  part.history = make('div');
  part.kept = make('div');
  part.factors = make('div');
  const keys = make('p', { class: 'note' }, make('span', { class: 'key shared' }), 'shared \u00a0 ', make('span', { class: 'key personal' }), 'personal');
  if (part.layer.codes) keys.append(` \u00a0 upper row: ν from ${short(part.layer.frames.range[0])} (dark) to ${short(part.layer.frames.range[1])} (light)`);
  const more = part.layer.rounds.length > 1 ? make('div', { class: 'pair' },
    make('div', {}, make('h3', {}, 'Elements that kept their side'), part.kept),
    part.layer.factors ? make('div', {}, make('h3', {}, 'Number of factors'), part.factors) : null) : null;
  part.node.append(make('h3', {}, `Layer ${part.layer.name}`), keys, part.strip, part.read,
    part.layer.frames.rounds.length > 1 ? make('details', { open: true }, make('summary', {}, 'All rounds at once (rounds across, elements down)'), part.history) : '', more || '');
}

function paintLayer(part, state) {
  const { layer } = part, frame = state.frame, round = layer.frames.rounds[frame], d = layer.elements;
  const order = [...Array(d).keys()];
  if (state.sorted && layer.codes) order.sort((a, b) => layer.score(frame, b) - layer.score(frame, a) || a - b);
  const width = Math.max(part.strip.clientWidth, 240), cell = Math.max(Math.min(width / Math.min(d, 128), 22), 4);
  const across = Math.floor(width / cell), lines = Math.ceil(d / across), tall = layer.codes ? 26 : 14;
  let sharedNow = 0;
  for (let j = 0; j < d; j++) sharedNow += layer.shared(frame, j);
  const tau = layer.at('tau', round), factors = layer.at('factors', round), dead = layer.at('dead', round);
  const notes = [`${sharedNow} of ${d} elements shared`];
  if (tau !== null) notes.push(`τ = ${typeof tau === 'number' ? short(tau) : tau}`);
  if (factors !== null) notes.push(`${factors} factors${layer.at('converged', round) === false ? ' (estimation stopped before it converged)' : ''}`);
  if (dead) notes.push(`${dead} dead elements`);
  const [node, pen] = canvasOf(across * cell, lines * (tall + 5), `Layer ${layer.name}, round ${round}: ${notes.join(', ')}.`);
  node.dataset.frame = String(frame);
  const sides = [computed('--personal'), computed('--shared')];
  const [low, high] = layer.frames.range || [0, 1];
  order.forEach((j, i) => {
    const x = (i % across) * cell, y = Math.floor(i / across) * (tall + 5), gap = cell > 6 ? 1 : 0;
    if (layer.codes) {
      pen.fillStyle = `rgb(${heat((layer.score(frame, j) - low) / (high - low || 1)).join(',')})`;
      pen.fillRect(x, y, cell - gap, 14);
    }
    pen.fillStyle = sides[Number(layer.shared(frame, j))];
    pen.fillRect(x, y + tall - 11, cell - gap, 11);
  });
  const summary = notes.join(' · ');
  part.read.textContent = summary;
  node.addEventListener('pointerleave', () => { part.read.textContent = summary; });
  node.addEventListener('pointermove', (event) => {
    const box = node.getBoundingClientRect();
    const j = order[Math.floor((event.clientX - box.left) / cell) + across * Math.floor((event.clientY - box.top) / (tall + 5))];
    if (j === undefined) return;
    part.read.textContent = `element ${j}: ${layer.shared(frame, j) ? 'shared' : 'personal'}` +
      (layer.codes ? `, ν ≈ ${short(layer.score(frame, j))}` : '') + `; changed sides ${layer.changes(j)} times in the rounds shown`;
  });
  part.strip.replaceChildren(node);
  if (layer.rounds.length > 1) {
    if (part.history.isConnected) paintHistory(part, round);
    const line = (y) => [{ label: '', index: 0, x: layer.rounds.slice(y === layer.kept ? 1 : 0), y: y.slice(y === layer.kept ? 1 : 0) }];
    lineChart(part.kept, line(layer.kept), { height: 130, marker: round, low: 0, high: 1, label: `Share of elements of ${layer.name} that kept their side, over rounds; ${short(layer.kept[layer.kept.length - 1])} in the last one.` });
    if (layer.factors) lineChart(part.factors, line(layer.factors), { height: 130, marker: round, label: `Number of factors of ${layer.name} over rounds; ${factors} in round ${round}.` });
  }
}

function paintHistory(part, round) {
  const { layer } = part, frames = layer.frames.rounds.length, d = layer.elements;
  const image = new ImageData(frames, d), sides = [rgb(computed('--personal')), rgb(computed('--shared'))];
  for (let f = 0; f < frames; f++) {
    for (let j = 0; j < d; j++) image.data.set([...sides[Number(layer.shared(f, j))], 255], 4 * (j * frames + f));
  }
  const small = make('canvas', { width: frames, height: d });
  small.getContext('2d').putImageData(image, 0, 0);
  const width = Math.max(part.strip.clientWidth, 240), height = Math.min(Math.max(d * 2, 60), 260);
  const [node, pen] = canvasOf(width, height, `Sides of all ${d} elements of ${layer.name} in ${frames} rounds.`);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(small, 0, 0, width, height);
  const x = ((layer.frames.rounds.indexOf(round) + 0.5) / frames) * width;
  pen.fillStyle = computed('--mark');
  pen.fillRect(x - 1, 0, 2, height);
  part.history.replaceChildren(node);
}

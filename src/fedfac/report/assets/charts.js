// Line charts and box plots as SVG, drawn at the width that there is.
function ticks(low, high, most) {
  const span = high - low || 1, raw = span / most, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * span; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

// series: [{label, index, x, y, low?, high?}]; options: {label, height, marker, low, high}
function lineChart(holder, series, options) {
  const width = Math.max(holder.clientWidth, 240), height = options.height || 250;
  const left = 48, right = width - 10, top = 8, bottom = height - 26;
  const xs = series.flatMap((s) => s.x), ys = series.flatMap((s) => [...s.y, ...(s.low || []), ...(s.high || [])]);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  let y0 = options.low ?? Math.min(...ys), y1 = options.high ?? Math.max(...ys);
  if (y0 === y1) [y0, y1] = [y0 - 0.5, y1 + 0.5];
  const px = (x) => left + ((x - x0) / (x1 - x0 || 1)) * (right - left);
  const py = (y) => bottom - ((y - y0) / (y1 - y0)) * (bottom - top);
  const path = (x, y) => x.map((v, i) => `${i ? 'L' : 'M'}${px(v).toFixed(1)},${py(y[i]).toFixed(1)}`).join('');

  const node = draw('svg', { width, height, viewBox: `0 0 ${width} ${height}`, role: 'img', tabindex: 0, 'aria-label': options.label });
  const counted = ys.every(Number.isInteger) && y1 - y0 > 0.9;
  for (const y of ticks(y0, y1, 5).filter((v) => !counted || Number.isInteger(v))) {
    node.append(draw('line', { class: 'grid', x1: left, x2: right, y1: py(y), y2: py(y) }));
    node.append(draw('text', { class: 'faint', x: left - 6, y: py(y) + 4, 'text-anchor': 'end' }, String(y)));
  }
  for (const x of ticks(x0, x1, Math.max(2, width / 90)).filter(Number.isInteger)) {
    node.append(draw('text', { class: 'faint', x: px(x), y: bottom + 16, 'text-anchor': 'middle' }, String(x)));
  }
  for (const s of series) {
    if (s.low && s.low.some((v, i) => v !== s.high[i])) {
      const band = path(s.x, s.high) + path([...s.x].reverse(), [...s.low].reverse()).replace('M', 'L') + 'Z';
      node.append(draw('path', { d: band, fill: colour(s.index), opacity: 0.18 }));
    }
  }
  for (const s of series) {
    const look = { d: path(s.x, s.y), fill: 'none', stroke: colour(s.index), 'stroke-width': 1.8, 'stroke-dasharray': dash(s.index) };
    node.append(draw('path', look));
    if (s.x.length === 1) node.append(draw('circle', { cx: px(s.x[0]), cy: py(s.y[0]), r: 3.5, fill: colour(s.index) }));
  }
  if (options.marker !== undefined) {
    node.append(draw('line', { x1: px(options.marker), x2: px(options.marker), y1: top, y2: bottom, stroke: 'var(--mark)' }));
  }
  const line = draw('line', { y1: top, y2: bottom, stroke: 'var(--faint)', 'stroke-dasharray': '3 3', visibility: 'hidden' });
  node.append(line);
  const readout = make('output', { 'aria-live': 'polite' });
  const rounds = [...new Set(xs)].sort((a, b) => a - b);
  let at = rounds.length - 1;
  const read = (place) => {
    at = Math.min(Math.max(place, 0), rounds.length - 1);
    const x = rounds[at];
    fill(line, { x1: px(x), x2: px(x), visibility: 'visible' }, []);
    const said = series.filter((s) => s.x.includes(x)).map((s) => `${s.label ? `${s.label} ` : ''}${short(s.y[s.x.indexOf(x)])}`);
    readout.textContent = `round ${x}: ${said.join(' · ')}`;
  };
  const nearest = (event) => {
    const x = x0 + ((event.clientX - node.getBoundingClientRect().left - left) / (right - left)) * (x1 - x0);
    read(rounds.reduce((best, v, i) => (Math.abs(v - x) < Math.abs(rounds[best] - x) ? i : best), 0));
  };
  node.addEventListener('pointermove', nearest);
  node.addEventListener('pointerdown', nearest);
  node.addEventListener('keydown', (event) => {
    const move = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: rounds.length - 1 }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    read(move);
  });
  holder.replaceChildren(node, readout);
}

// rows: [{label, index, values}]
function boxPlot(holder, rows, label) {
  const width = Math.max(holder.clientWidth, 240), step = 30, bottom = rows.length * step + 6;
  const left = Math.min(Math.max(...rows.map((r) => r.label.length)) * 7 + 14, width * 0.4), right = width - 14;
  const all = rows.flatMap((r) => r.values), [x0, x1] = [Math.min(...all), Math.max(...all)];
  const px = (x) => left + ((x - x0) / (x1 - x0 || 1)) * (right - left);
  const said = [];
  const node = draw('svg', { width, height: bottom + 22, viewBox: `0 0 ${width} ${bottom + 22}`, role: 'img' });
  for (const x of ticks(x0, x1, width / 110)) {
    node.append(draw('line', { class: 'grid', x1: px(x), x2: px(x), y1: 4, y2: bottom }));
    node.append(draw('text', { class: 'faint', x: px(x), y: bottom + 16, 'text-anchor': 'middle' }, String(x)));
  }
  rows.forEach((row, i) => {
    const sorted = [...row.values].sort((a, b) => a - b), y = i * step + 18;
    const [q1, q2, q3] = [0.25, 0.5, 0.75].map((share) => quantile(sorted, share));
    const inside = sorted.filter((v) => v >= q1 - 1.5 * (q3 - q1) && v <= q3 + 1.5 * (q3 - q1));
    const most = Math.max(...row.label.split('').keys(), 0) + 1, room = Math.floor((left - 14) / 7);
    const name = most > room ? `${row.label.slice(0, room - 1)}…` : row.label;
    const c = colour(row.index);
    node.append(draw('text', { x: left - 8, y: y + 4, 'text-anchor': 'end' }, draw('title', {}, row.label), name));
    node.append(draw('line', { x1: px(inside[0]), x2: px(inside[inside.length - 1]), y1: y, y2: y, stroke: c }));
    node.append(draw('rect', { x: px(q1), width: Math.max(px(q3) - px(q1), 1), y: y - 8, height: 16, fill: c, opacity: 0.25, stroke: c }));
    node.append(draw('line', { x1: px(q2), x2: px(q2), y1: y - 8, y2: y + 8, stroke: c, 'stroke-width': 3 }));
    const dots = sorted.length > 400 ? sorted.filter((v) => !inside.includes(v)).slice(0, 400) : sorted;
    dots.forEach((v, k) => node.append(draw('circle', { cx: px(v), cy: y - 6 + ((k * 7) % 13), r: 1.7, fill: c, opacity: 0.6 })));
    said.push(`${row.label}: median ${short(q2)}, middle half ${short(q1)} to ${short(q3)}, lowest ${short(sorted[0])}`);
  });
  node.setAttribute('aria-label', `${label}. ${said.join('; ')}.`);
  holder.replaceChildren(node);
}

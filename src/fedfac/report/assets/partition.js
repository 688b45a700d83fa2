// Who has how many samples of which class.
function showPartition(view) {
  const keys = Object.keys(facts.partitions).filter((key) => facts.partitions[key].train.some((n) => n !== null));
  if (!keys.length) return;
  $('data').hidden = false;
  const summary = make('p', { class: 'note' }), holder = make('div'), readout = make('output', { 'aria-live': 'polite' });
  $('partition').replaceChildren(summary, holder, readout);
  drawn(() => {
    const run = view.methods().flatMap((m) => view.runs(m))[0] || facts.runs[0];
    const part = facts.partitions[run.partition];
    const sizes = part.train.map((n, i) => n + part.test[i]), sorted = [...sizes].sort((a, b) => a - b);
    let text = `${sizes.length.toLocaleString('en')} clients, ${sizes.reduce((a, b) => a + b, 0).toLocaleString('en')} samples; a client has ` +
      `${sorted[0].toLocaleString('en')} to ${sorted[sorted.length - 1].toLocaleString('en')} (median ${quantile(sorted, 0.5).toLocaleString('en')})`;
    if (part.counts) text += ` of ${mean(part.counts.map((row) => row.filter((n) => n > 0).length)).toFixed(1)} classes on average`;
    if (Object.keys(facts.partitions).length > 1) text += ` (seed ${run.seed}; other seeds and settings cut the data differently)`;
    summary.textContent = `${text}.`;
    paintPartition(holder, readout, part, sizes, text);
  });
}

function paintPartition(holder, readout, part, sizes, text) {
  const called = (k) => (part.classes ? part.classes[k] : String(k));
  const longest = part.classes ? Math.max(...part.classes.map((name) => name.length)) : 3;
  const width = Math.max(holder.clientWidth, 240), left = Math.min(longest * 7 + 13, 130), room = width - left - 8;
  const most = Math.floor(room / 3), every = Math.ceil(sizes.length / most);
  const clients = sizes.map((_, i) => i).filter((i) => i % every === 0), cell = Math.min(room / clients.length, 26);
  const classes = part.counts ? part.counts[0].length : 1;
  const row = part.counts ? Math.min(Math.max(240 / classes, 4), cell * 1.6, 24) : 120, height = classes * row + 30;
  const [node, pen] = canvasOf(width, height, `Samples by client and class. ${text}.`);
  pen.font = '12px system-ui, sans-serif';
  pen.fillStyle = computed('--faint');
  pen.textBaseline = 'middle';
  const highest = part.counts ? Math.max(...clients.map((i) => Math.max(...part.counts[i]))) : Math.max(...sizes);
  if (part.counts) {
    const step = Math.ceil(14 / row);
    for (let k = 0; k < classes; k += step) pen.fillText(called(k).slice(0, 17), 4, (k + 0.5) * row + 4);
  }
  pen.fillText(`${part.counts ? 'class ↑  ' : 'samples ↑  '}client →${every > 1 ? `  (one in ${every} shown)` : ''}`, left, height - 10);
  pen.fillStyle = computed('--shared');
  clients.forEach((client, i) => {
    const x = left + (i + 0.5) * cell;
    if (!part.counts) {
      const tall = (row * sizes[client]) / highest;
      return pen.fillRect(x - cell * 0.4, row + 4 - tall, Math.max(cell * 0.8, 1), tall);
    }
    part.counts[client].forEach((n, k) => {
      if (!n) return;
      pen.beginPath();
      pen.arc(x, (k + 0.5) * row + 4, Math.max(0.5 * Math.min(cell, row) * Math.sqrt(n / highest), 0.9), 0, 7);
      pen.fill();
    });
  });
  node.addEventListener('pointermove', (event) => {
    const box = node.getBoundingClientRect(), i = Math.floor((event.clientX - box.left - left) / cell);
    const client = clients[i];
    if (client === undefined) return;
    const own = part.counts ? part.counts[client].map((n, k) => [k, n]).filter(([, n]) => n).map(([k, n]) => `class ${called(k)}: ${n}`).join(', ') : '';
    readout.textContent = `client ${part.names[client]}: ${sizes[client]} samples${own ? ` (${own})` : ''}`;
  });
  holder.replaceChildren(node);
}

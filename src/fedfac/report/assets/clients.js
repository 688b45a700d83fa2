// Box plots of clients, and the table of clients that can be sorted and searched.
const MOST_ROWS = 1000;

function showClients(view) {
  const column = facts.runs.some((run) => run.clients.accuracy.some((v) => v !== null)) ? 'accuracy' : 'loss';
  if (!facts.runs.some((run) => run.clients[column].some((v) => v !== null))) return;
  $('clients').hidden = false;
  if (column === 'loss') $('clients-figure').textContent = 'Loss';
  drawn(() => {
    const rows = view.methods().map((label) => ({
      label, index: methodIndex.get(label),
      values: view.runs(label).flatMap((run) => run.clients[column].filter((v) => v !== null)),
    })).filter((row) => row.values.length);
    rows.sort((a, b) => quantile([...b.values].sort((x, y) => x - y), 0.5) - quantile([...a.values].sort((x, y) => x - y), 0.5));
    if (rows.length) boxPlot($('boxes'), rows, `${titleOf(column)} of clients by method`);
    else $('boxes').replaceChildren();
  });
  clientTable(view, column);
}

function clientTable(view, column) {
  const state = { key: 'client', down: false, search: '', base: facts.methods.find((m) => m.split(/[ :]/)[0] === 'fedavg') || facts.methods[0] };
  const holder = make('div'), count = make('output', { 'aria-live': 'polite' });
  const seeds = [...new Set(facts.runs.map((run) => run.seed))];
  const seed = choice('seed', seeds.map((s) => [s, String(s)]), () => paint());
  const base = choice('gain over', facts.methods.map((m) => [m, m]), (value) => { state.base = value; paint(); });
  base.list.value = state.base;
  const search = make('input', { type: 'search', placeholder: 'find a client', 'aria-label': 'find a client' });
  search.addEventListener('input', () => { state.search = search.value.toLowerCase(); paint(); });

  const paint = () => {
    const runs = view.methods().flatMap((m) => view.runs(m).filter((run) => String(run.seed) === seed.list.value)).slice(0, 40);
    if (!runs.length) return holder.replaceChildren();
    const { columns, rows } = clientRows(runs, column, state.base, view);
    const found = rows.filter((row) => row.client.toLowerCase().includes(state.search));
    const text = (v) => (typeof v === 'string' ? v : '');
    found.sort((a, b) => {
      const [x, y] = [a[state.key] ?? null, b[state.key] ?? null];
      if (x === null || y === null) return (x === null) - (y === null) || a.number - b.number;
      const order = typeof x === 'string' ? text(x).localeCompare(text(y), undefined, { numeric: true }) : x - y;
      return (state.down ? -order : order) || a.number - b.number;
    });
    const head = columns.map(({ key, title, hint }) => make('th', { scope: 'col', title: hint, 'aria-sort': state.key === key ? (state.down ? 'descending' : 'ascending') : 'none' },
      make('button', { type: 'button', 'data-key': key, 'aria-label': hint, onclick: () => {
        state.down = state.key === key ? !state.down : key !== 'client';
        state.key = key;
        paint();
        [...holder.querySelectorAll('th button')].find((b) => b.dataset.key === key).focus();
      } }, title)));
    const body = found.slice(0, MOST_ROWS).map((row) => make('tr', {}, ...columns.map(({ key, gain, whole }) => {
      const value = row[key];
      if (key === 'client') return make('th', { scope: 'row' }, value);
      if (value === null || value === undefined) return make('td', {}, '–');
      if (whole) return make('td', {}, value.toLocaleString('en'));
      return make('td', gain ? { class: value > 0 ? 'up' : value < 0 ? 'down' : '' } : {}, gain && value > 0 ? `+${short(value)}` : short(value));
    })));
    holder.replaceChildren(make('div', { class: 'scroll' }, make('table', {}, make('thead', {}, make('tr', {}, ...head)), make('tbody', {}, ...body))));
    count.textContent = `${Math.min(found.length, MOST_ROWS)} of ${rows.length} clients` + (found.length > MOST_ROWS ? ', the first in this order' : '');
  };
  $('client-table').replaceChildren(make('h3', {}, 'Client by client'),
    make('div', { class: 'controls' }, seeds.length > 1 ? seed.node : null, facts.methods.length > 1 ? base.node : null, search), holder, count);
  drawn(paint);
}

function clientRows(runs, column, base, view) {
  const part = facts.partitions[runs[0].partition];
  const sum = (i) => (part.train[i] === null ? null : part.train[i] + part.test[i]);
  const reference = view.runs(base).find((run) => run.seed === runs[0].seed && run.partition === runs[0].partition);
  const columns = [{ key: 'client', title: 'client' }, { key: 'size', title: 'samples', whole: true }];
  if (part.counts) columns.push({ key: 'classes', title: 'classes', whole: true });
  for (const run of runs) {
    columns.push({ key: `v ${run.method}`, title: run.method });
    if (reference && run.method !== base) columns.push({ key: `g ${run.method}`, title: 'gain', hint: `gain of ${run.method} over ${base}`, gain: true });
  }
  const rows = part.names.map((client, i) => {
    const row = { number: i, client, size: sum(i), classes: part.counts ? part.counts[i].filter((n) => n > 0).length : null };
    for (const run of runs) {
      const value = row[`v ${run.method}`] = run.clients[column][i];
      const other = reference ? reference.clients[column][i] : null;
      const better = column === 'loss' ? -1 : 1; // a gain is a higher accuracy or a lower loss
      row[`g ${run.method}`] = value === null || other === null ? null : better * (value - other);
    }
    return row;
  });
  return { columns, rows };
}

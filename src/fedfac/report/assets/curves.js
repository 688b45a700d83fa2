// Accuracy and loss over rounds, by method, with seeds as bands.
function showCurves(view) {
  const names = [...new Set(facts.runs.flatMap((run) => Object.keys(run.curves)))];
  if (!names.length) return;
  $('curves').hidden = false;
  const first = names.includes('accuracy') ? 'accuracy' : names[0];
  const second = ['loss', 'train_loss', ...names].find((name) => names.includes(name) && name !== first) || first;
  for (const [place, start] of [['curve-one', first], ['curve-two', second]]) {
    let shown = start;
    const holder = make('div'), table = make('div', { class: 'scroll' });
    const paint = () => {
      const series = curvesOf(shown, view);
      const last = series.map((s) => `${s.label} ${short(s.y[s.y.length - 1])}`).join(', ');
      if (!series.length) return holder.replaceChildren(make('p', { class: 'note' }, 'Nothing of this was recorded.'));
      lineChart(holder, series, { label: `${titleOf(shown)} over rounds. At the end: ${last}.` });
      table.replaceChildren(curveTable(series));
    };
    const picker = choice('', names.map((name) => [name, titleOf(name)]), (value) => { shown = value; paint(); });
    picker.list.value = start;
    picker.list.setAttribute('aria-label', 'Figure to show over rounds');
    $(place).append(picker.node, holder, make('details', {}, make('summary', {}, 'The same as a table'), table));
    drawn(paint);
  }
}

function curvesOf(name, view) {
  const series = [];
  for (const method of view.methods()) {
    const runs = view.runs(method).filter((run) => run.curves[name]).map((run) => new Map(run.curves[name][0].map((x, i) => [x, run.curves[name][1][i]])));
    if (!runs.length) continue;
    const x = [...runs[0].keys()].filter((round) => runs.every((run) => run.has(round)));
    const values = x.map((round) => runs.map((run) => run.get(round)));
    series.push({
      label: method, index: methodIndex.get(method), x, y: values.map(mean),
      low: values.map((v) => Math.min(...v)), high: values.map((v) => Math.max(...v)),
    });
  }
  return series.filter((s) => s.x.length);
}

function curveTable(series) {
  const rounds = [...new Set(series.flatMap((s) => s.x))].sort((a, b) => a - b);
  const kept = rounds.filter((_, i) => i % Math.ceil(rounds.length / 50) === 0 || i === rounds.length - 1);
  const head = make('tr', {}, ...['round', ...series.map((s) => s.label)].map((t) => make('th', { scope: 'col' }, t)));
  const rows = kept.map((round) => make('tr', {}, make('th', { scope: 'row' }, String(round)),
    ...series.map((s) => make('td', {}, s.x.includes(round) ? short(s.y[s.x.indexOf(round)]) : '–'))));
  return make('table', {}, make('thead', {}, head), make('tbody', {}, ...rows));
}

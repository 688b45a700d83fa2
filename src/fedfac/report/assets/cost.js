// Seconds by step and bytes by direction, a row per method: means over its runs.
function showCost(view) {
  $('cost').hidden = false;
  drawn(() => {
    const steps = [...new Set(facts.runs.flatMap((run) => Object.keys(run.seconds)))];
    const head = ['method', ...steps.map((s) => `${s}, s`), 'a round, s',
      'values shared', 'up', 'of it for the split', 'down', 'whole run'];
    const rows = view.methods().map((method) => {
      const runs = view.runs(method);
      if (!runs.length) return null;
      const seconds = steps.map((step) => mean(runs.map((run) => run.seconds[step] || 0)));
      const values = Math.round(mean(runs.map((run) => run.bytes.values))).toLocaleString('en');
      const cells = [...seconds.map(short), short(seconds.reduce((a, b) => a + b, 0)), values,
        ...['up', 'for_split', 'down', 'total'].map((key) => bytes(mean(runs.map((run) => run.bytes[key]))))];
      return make('tr', {}, make('th', { scope: 'row' }, method), ...cells.map((text) => make('td', {}, text)));
    });
    $('cost-table').replaceChildren(make('div', { class: 'scroll' }, make('table', {},
      make('caption', {}, 'Seconds a round by step; by client and round, values shared, bytes up, bytes down; bytes of the whole run'),
      make('thead', {}, make('tr', {}, ...head.map((text) => make('th', { scope: 'col' }, text)))), make('tbody', {}, ...rows))));
  });
}

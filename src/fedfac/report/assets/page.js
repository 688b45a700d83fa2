// What is shown (setting, methods), the theme, and the start.
const view = {
  setting: facts.settings[0],
  hidden: new Set(),
  methods() { return facts.methods.filter((m) => !this.hidden.has(m) && facts.runs.some((run) => run.method === m && run.setting === this.setting)); },
  runs(method) { return facts.runs.filter((run) => run.method === method && run.setting === this.setting); },
};

function showFilters() {
  const parts = [];
  if (facts.settings.length > 1) {
    parts.push(choice('setting', facts.settings.map((s) => [s, s || '(default)']), (value) => { view.setting = value; redrawAll(); }).node);
  }
  const boxes = facts.methods.map((method, i) => {
    const box = make('input', { type: 'checkbox', checked: true });
    box.addEventListener('change', () => { view.hidden[box.checked ? 'delete' : 'add'](method); redrawAll(); });
    const mark = draw('svg', { class: 'swatch', viewBox: '0 0 24 12', 'aria-hidden': 'true' },
      draw('line', { x1: 0, x2: 24, y1: 6, y2: 6, stroke: colour(i), 'stroke-width': 3, 'stroke-dasharray': dash(i) }));
    return make('label', {}, box, mark, method);
  });
  parts.push(make('fieldset', {}, make('legend', {}, 'methods'), ...boxes));
  $('filters').replaceChildren(...parts);
  $('filters').hidden = false;
}

function showRuns() {
  const head = ['method', 'setting', 'seed', 'rounds', 'options', 'clients left out', 'folder'];
  const rows = facts.runs.map((run) => make('tr', {}, make('th', { scope: 'row' }, run.method),
    ...[run.setting || '–', String(run.seed), `${run.done} of ${run.rounds}${run.skipped ? `, ${run.skipped} skipped` : ''}`, run.options.filter(([key]) => key !== 'name').map(([k, v]) => `${k}=${v}`).join(', ') || '–',
      String(run.left_out), run.folder].map((text) => make('td', {}, text))));
  $('runs').replaceChildren(make('table', {}, make('thead', {}, make('tr', {}, ...head.map((t) => make('th', { scope: 'col' }, t)))), make('tbody', {}, ...rows)));
}

function setTheme(theme) {
  if (theme === 'auto') document.documentElement.removeAttribute('data-theme');
  else document.documentElement.dataset.theme = theme;
  $('theme').textContent = `theme: ${theme}`;
  try { localStorage.setItem('fedfac-theme', theme); } catch { /* a file may not be allowed to remember */ }
}

function startTheme() {
  let theme = 'auto';
  try { theme = localStorage.getItem('fedfac-theme') || 'auto'; } catch { /* see above */ }
  $('theme').hidden = false;
  setTheme(theme);
  $('theme').addEventListener('click', () => {
    theme = { auto: 'dark', dark: 'light', light: 'auto' }[theme];
    setTheme(theme);
    redrawAll();
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redrawAll);
}

startTheme();
showRuns();
showFilters();
showCurves(view);
showClients(view);
showExplorer();
showPartition(view);
showCost(view);

let width = window.innerWidth, waiting = null;
addEventListener('resize', () => {
  if (window.innerWidth === width) return;
  width = window.innerWidth;
  clearTimeout(waiting);
  waiting = setTimeout(redrawAll, 120);
});
document.documentElement.dataset.ready = 'true';

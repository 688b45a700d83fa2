// Elements, numbers and colours. Text from runs goes through textContent and attributes only, never through markup.
const $ = (id) => document.getElementById(id);
const facts = JSON.parse($('facts').textContent);

function make(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function draw(name, attributes = {}, ...children) {
  return fill(document.createElementNS('http://www.w3.org/2000/svg', name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith('on')) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, '');
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function choice(label, options, onchange) {
  const list = make('select', {}, ...options.map(([value, text]) => make('option', { value }, text)));
  list.addEventListener('change', () => onchange(list.value));
  return { list, node: make('label', {}, label, list) };
}

const TITLES = {
  accuracy: 'accuracy over all test samples', mean: 'mean accuracy of clients', std: 'std of clients’ accuracy',
  median: 'median client', worst_decile: 'worst tenth of clients', jain: 'Jain’s index', loss: 'test loss',
  train_loss: 'training loss', mse: 'mean squared error', mae: 'mean absolute error', r2: 'R²',
};
const titleOf = (name) => TITLES[name] || name;

function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return '–';
  if (value !== 0 && (Math.abs(value) < 0.001 || Math.abs(value) >= 1e5)) return value.toExponential(2);
  return Math.abs(value) >= 100 ? value.toFixed(1) : value.toFixed(3);
}

function bytes(value) {
  for (const [unit, size] of [['GB', 1e9], ['MB', 1e6], ['kB', 1e3]]) {
    if (value >= size) return `${(value / size).toFixed(value >= 100 * size ? 0 : 1)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

function quantile(sorted, share) {
  const place = (sorted.length - 1) * share, low = Math.floor(place), high = Math.ceil(place);
  return sorted[low] + (sorted[high] - sorted[low]) * (place - low);
}

const colour = (i) => `var(--c${i % 8})`;
const dashes = ['', '7 3', '2 3', '9 3 2 3'];
const dash = (i) => dashes[Math.floor(i / 8) % dashes.length];
const methodIndex = new Map(facts.methods.map((name, i) => [name, i]));
const computed = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function rgb(text) {
  const hex = text.replace('#', '');
  return [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

// Dark to light through blue, green and yellow: even steps of lightness, told apart by colour-blind readers too.
const STOPS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
function heat(share) {
  const place = Math.min(Math.max(share, 0), 1) * (STOPS.length - 1), low = Math.min(Math.floor(place), STOPS.length - 2);
  return STOPS[low].map((c, i) => Math.round(c + (STOPS[low + 1][i] - c) * (place - low)));
}

// Everything that is drawn is drawn again when the theme or the width changes.
const redraws = [];
function drawn(paint) {
  redraws.push(paint);
  paint();
}
const redrawAll = () => redraws.forEach((paint) => paint());

function canvasOf(width, height, label) {
  const scale = window.devicePixelRatio || 1;
  const node = make('canvas', { width: Math.round(width * scale), height: Math.round(height * scale), role: 'img', 'aria-label': label });
  node.style.width = `${width}px`;
  node.style.height = `${height}px`;
  const pen = node.getContext('2d');
  pen.scale(scale, scale);
  return [node, pen];
}

"use strict";
// The player. Everything is looked up in the data that the export wrote (html.py); a recording's text reaches the page
// through textContent alone, so that none of it is ever markup.
{
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("recording").textContent);
const { steps, canvases, states, words, names, newline } = data;
const SPEEDS = [0.25, 0.5, 1, 2, 4, 8];
const VIEWS = ["text", "grid", "both"];
const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
const now = { at: data.start, view: data.view, draft: data.draft, speed: 1, timer: null, picked: null, looked: null };

// ---- the data, unpacked

// Numbers in base 36, joined by commas: an empty one is that of `before`, and nothing at all is all of `before`.
function unpack(text, before) {
  return text === "" ? before : text.split(",").map((each, i) => (each === "" ? before[i] : parseInt(each, 36)));
}

for (const canvas of canvases) {
  canvas.steps = steps.filter((step) => canvases[step.of] === canvas);
  canvas.first = steps.indexOf(canvas.steps[0]);
  canvas.fed = unpack(canvas.fed);
  canvas.held = canvas.held.split(",").map((each) => (each === "" ? [] : unpack(each.replaceAll("+", ","))));
  let before = {};
  for (const step of canvas.steps) {
    step.canvas = unpack(step.canvas, before.canvas);
    step.guess = unpack(step.guess, before.guess);
    step.argmax = unpack(step.argmax, step.guess);
    step.entropy = unpack(step.entropy, before.entropy);
    before = step;
  }
}

const step = () => steps[now.at];
const canvas = () => canvases[step().of];
const state = (one, i) => states[one.states[i]];
const nats = (thousandths) => (thousandths / 1000).toFixed(3);
const visible = (text) => text.replaceAll("\n", newline).replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));
const named = (word) => names[word] ?? visible(words[word]);

// ---- elements

function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.textContent = text;
  return element;
}

function draw(tag, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

const sides = [$("text"), $("grid")]; // both have a child a position
const inView = () => sides.find((side) => side.offsetParent);

function fill() {
  const length = step().states.length;
  if ($("text").children.length === length) return;
  sides.forEach((side, kind) => {
    side.replaceChildren();
    for (let i = 0; i < length; i++) {
      const place = make("span", ["token", "cell"][kind]);
      place.setAttribute("role", "option");
      place.dataset.place = i;
      place.tabIndex = i ? -1 : 0;
      side.append(place);
    }
  });
  $("grid").style.setProperty("--columns", length <= 256 ? 16 : 2 ** Math.ceil(Math.log2(length) / 2));
}

// ---- one step

function show(at) {
  const other = steps[Math.max(0, Math.min(at, steps.length - 1))].of !== step().of;
  now.at = Math.max(0, Math.min(at, steps.length - 1));
  if (other) now.picked = now.looked = null;
  fill();
  drawEarlier();
  for (let i = 0; i < step().states.length; i++) drawPlace(i);
  drawFacts();
  drawPanel();
  drawPlot();
  $("scrub").value = now.at;
  $("scrub").setAttribute("aria-valuetext", sentence());
  $("canvas").value = step().of;
  $("canvas-back").disabled = $("step-back").disabled = now.at === 0;
  $("canvas-on").disabled = step().of === canvases.length - 1;
  $("step-on").disabled = now.at === steps.length - 1;
  if (other) reveal();
  follow();
  if (now.timer === null) $("status").textContent = sentence();
}

// The canvas, at the top of its stage; earlier text is above.
function reveal() {
  const first = inView().firstElementChild;
  $("stage").scrollTop = first.offsetTop - $("legend").offsetHeight - 16;
}

function sentence() {
  const { step: k, steps: most, accepted, states: all } = step();
  return `Canvas ${canvas().number}, step ${k} of ${most}, ${accepted} of ${all.length} accepted`;
}

function drawEarlier() {
  if ($("earlier").dataset.of === String(step().of)) return;
  $("earlier").dataset.of = step().of;
  const before = data.committed.slice(0, canvas().number - 1).flat();
  $("earlier").replaceChildren(...before.map(([kind, text]) => make("span", kind, text)));
}

function drawPlace(i) {
  const one = step();
  const { key, mark, name, breaks, fits } = state(one, i);
  const word = one[now.draft][i];
  const [token, cell] = sides.map((side) => side.children[i]);
  for (const place of [token, cell]) {
    place.dataset.state = key;
    place.dataset.shade = one.shades[i];
    place.setAttribute("aria-label", `${named(word)}, ${name}, position ${i + 1}, entropy ${nats(one.entropy[i])}`);
    place.setAttribute("aria-selected", now.picked === i);
  }
  cell.textContent = mark;
  const text = words[word].replaceAll("\n", breaks ? `${newline}\n` : newline);
  token.classList.toggle("fitted", fits); // what is random takes the room of the best guess: nothing behind it moves
  token.classList.toggle("break", breaks && /^\n+$/.test(words[word]));
  if (fits) {
    const room = words[one.guess[i]].replaceAll("\n", newline);
    token.replaceChildren(make("span", "room", room), make("span", "drawn", text));
    token.firstChild.setAttribute("aria-hidden", "true");
  } else {
    token.textContent = text;
  }
}

function drawFacts() {
  const one = step();
  const facts = [
    ["canvas", `${canvas().number} of ${data.total}`],
    ["step", `${one.step} of ${one.steps}${one.done ? " · done" : ""}`],
    ["accepted", `${one.accepted} of ${one.states.length}`],
    ["mean entropy", `${one.mean.toFixed(3)} nats`],
    ["temperature", one.temperature.toFixed(2)],
    ["thaws", one.thaws], ["replacements", one.replacements], ["corrections", one.corrections],
    ...(one.saved ? [["steps saved", one.saved]] : []),
    ["time", `${one.time.toFixed(2)} s`],
    ...(one.rate === null ? [] : [["tokens/s", one.rate]]),
  ];
  $("facts").replaceChildren(...facts.map(([name, value]) => {
    const fact = make("div");
    fact.append(make("dt", "", name), make("dd", "", value));
    return fact;
  }));
}

// ---- the history of a position

function drawPanel() {
  const i = now.looked ?? now.picked;
  $("history").hidden = i === null;
  $("nobody").hidden = i !== null;
  $("let-go").hidden = now.picked === null;
  $("panel").classList.toggle("open", now.picked !== null);
  if (i === null) return;
  $("position").textContent = `Position ${i + 1}`;
  const mine = canvas().steps;
  $("changes").replaceChildren(...mine.flatMap((one, k) => {
    if (!state(one, i).changes) return [];
    const item = make("li", "", `${state(one, i).name} at step ${one.step}: `);
    item.append(make("span", "word", named((k ? mine[k - 1].canvas : canvas().fed)[i])));
    item.append(" → ", make("span", "word", named(one.canvas[i])));
    return [item];
  }));
  if (!$("changes").children.length) $("changes").append(make("li", "", "never accepted"));
  const held = canvas().held[i];
  $("held").hidden = !held.length;
  $("held").replaceChildren("held while accepted: ");
  for (const word of held) $("held").append(make("span", "word", named(word)), " ");
  $("moments").replaceChildren(...mine.map((one) => moment(one, i)));
}

// The row of this step, in view.
function follow() {
  const row = $("moments").querySelector("[aria-current]");
  if (!row) return;
  const { scrollTop, clientHeight } = $("panel");
  if (row.offsetTop < scrollTop || row.offsetTop + row.offsetHeight > scrollTop + clientHeight) {
    $("panel").scrollTop = row.offsetTop - clientHeight / 2;
  }
}

function moment(one, i) {
  const row = make("tr");
  if (one === step()) row.setAttribute("aria-current", "step");
  const { key, mark, name } = state(one, i);
  const sample = make("span", "", name);
  sample.dataset.state = key;
  const cells = ["number", "", "", "", "number"].map((each) => make("td", each));
  cells[0].textContent = one.step;
  cells[1].append(make("span", "mark", mark.trim() ? `${mark} ` : "  "), sample);
  cells[2].append(make("span", "word", named(one.canvas[i])));
  cells[3].append(make("span", "word", named(one.guess[i])));
  cells[4].textContent = nats(one.entropy[i]);
  row.append(...cells);
  row.addEventListener("click", () => { pause(); show(steps.indexOf(one)); });
  return row;
}

function look(i) {
  if (now.looked === i) return;
  now.looked = i;
  drawPanel();
  drawPlot();
}

function pick(i) {
  const before = now.picked;
  now.picked = i;
  for (const each of [before, i]) if (each !== null) drawPlace(each);
  now.looked = null;
  drawPanel();
  drawPlot();
  if (i !== null) inView().children[i].scrollIntoView({ block: "nearest" }); // the panel takes room on a phone
}

// ---- the curves

const thumb = 16; // px of the slider's thumb: its middle, and the curves, begin and end half of it inside
let area = null; // of the plot, in px, as last measured

function x(at) {
  return thumb / 2 + (at / Math.max(1, steps.length - 1)) * (area.width - thumb);
}

function line(points) {
  return points.map(([px, py], k) => `${k ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`).join("");
}

function drawPlot() {
  area ??= $("plot").getBoundingClientRect();
  const top = 14;
  const bottom = area.height - 2;
  const i = now.looked ?? now.picked;
  const own = i === null ? [] : canvas().steps.map((one) => one.entropy[i] / 1000);
  const most = Math.max(0.1, ...own, ...steps.map((one) => one.mean));
  const y = (part) => bottom - Math.max(0, Math.min(1, part)) * (bottom - top);
  const parts = [];
  canvases.forEach((each, number) => {
    const [left, right] = [x(each.first), x(each.first + each.steps.length - 1)];
    if (number % 2) parts.push(draw("rect", { class: "band", x: left, y: 0, width: right - left, height: bottom }));
    if (number) parts.push(draw("path", { class: "edge", d: `M${left} 0V${bottom}` }));
    const room = x(each.first + each.steps.length) - left; // px, up to the next one
    parts.push(draw("text", { x: left + 4, y: 9 }, room > 60 ? `canvas ${each.number}` : room > 22 ? each.number : ""));
    const accepted = each.steps.map((one, k) => [x(each.first + k), y(one.accepted / one.states.length)]);
    const means = each.steps.map((one, k) => [x(each.first + k), y(one.mean / most)]);
    parts.push(draw("path", { class: "accepted", d: `${line([[left, bottom], ...accepted, [right, bottom]])}Z` }));
    parts.push(draw("path", { class: "entropy", d: line(means) }));
  });
  parts.push(draw("path", { class: "own", d: line(own.map((each, k) => [x(canvas().first + k), y(each / most)])) }));
  parts.push(draw("path", { class: "here", d: `M${x(now.at)} 0V${bottom}` }));
  parts.push(draw("circle", { cx: x(now.at), cy: y(step().mean / most), r: 4 }));
  $("plot").replaceChildren(...parts);
  $("curves").lastElementChild.hidden = i === null;
}

function scrub(event) {
  const part = (event.clientX - $("plot").getBoundingClientRect().left - thumb / 2) / (area.width - thumb);
  pause();
  show(Math.round(part * (steps.length - 1)));
}

// ---- time

function play() {
  if (now.at === steps.length - 1) show(0);
  now.timer = setTimeout(tick, (1000 * data.seconds) / now.speed);
  $("play").textContent = "Pause";
}

function tick() {
  show(now.at + 1);
  if (now.at === steps.length - 1) pause();
  else now.timer = setTimeout(tick, (1000 * data.seconds) / now.speed);
}

function pause() {
  clearTimeout(now.timer);
  now.timer = null;
  $("play").textContent = "Play";
  $("status").textContent = sentence();
}

// ---- what the reader asks for

function go(at) {
  pause();
  show(at);
}

function toCanvas(to) {
  if (canvases[to]) go(canvases[to].first);
}

// Back goes to this canvas's first step before it goes to the canvas before.
function canvasBack() {
  toCanvas(Math.max(0, now.at > canvas().first ? step().of : step().of - 1));
}

function setSpeed(to) {
  now.speed = SPEEDS[Math.max(0, Math.min(to, SPEEDS.length - 1))];
  $("speed").value = now.speed;
}

function setView(to) {
  now.view = document.body.dataset.view = $("view").value = to;
  reveal();
}

function setDraft(to) {
  now.draft = $("draft").value = to;
  show(now.at);
}

function setTheme(to) {
  document.documentElement.dataset.theme = to;
  $("theme").textContent = to === "dark" ? "Light" : "Dark";
}

const otherTheme = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
const after = (list, each) => list[(list.indexOf(each) + 1) % list.length];

const KEYS = {
  " ": () => (now.timer === null ? play() : pause()),
  ArrowLeft: () => go(now.at - 1),
  ArrowRight: () => go(now.at + 1),
  ",": () => go(now.at - 1),
  ".": () => go(now.at + 1),
  Home: () => go(0),
  End: () => go(steps.length - 1),
  "[": canvasBack,
  "]": () => toCanvas(step().of + 1),
  "-": () => setSpeed(SPEEDS.indexOf(now.speed) - 1),
  "+": () => setSpeed(SPEEDS.indexOf(now.speed) + 1),
  v: () => setView(after(VIEWS, now.view)),
  d: () => setDraft(after(["canvas", "argmax"], now.draft)),
  t: otherTheme,
  "?": () => $("help").showModal(),
  Escape: () => pick(null),
};

function key(event) {
  if (event.ctrlKey || event.altKey || event.metaKey || $("help").open) return;
  const { target, key: pressed } = event;
  if (target.dataset.place !== undefined && walk(target, pressed)) return event.preventDefault();
  if (target.tagName === "SELECT" && pressed !== "Escape") return; // its own keys
  if (target.tagName === "BUTTON" && pressed === " ") return;
  if (!Object.hasOwn(KEYS, pressed)) return;
  event.preventDefault();
  KEYS[pressed]();
}

// Arrow keys among the positions; whether this was one of its keys.
function walk(place, pressed) {
  const places = [...place.parentElement.children];
  const i = places.indexOf(place);
  if (pressed === "Enter") pick(now.picked === i ? null : i);
  else if (pressed === "ArrowLeft") focus(places[i - 1]);
  else if (pressed === "ArrowRight") focus(places[i + 1]);
  else if (pressed === "Home") focus(places[0]);
  else if (pressed === "End") focus(places.at(-1));
  else if (pressed === "ArrowUp") focus(nearest(places.slice(0, i).reverse(), place));
  else if (pressed === "ArrowDown") focus(nearest(places.slice(i + 1), place));
  else return false;
  return true;
}

// Of the places on the line next to `place`, in their order away from it, the one that is nearest above or below it.
function nearest(places, place) {
  const { left, bottom, top } = place.getBoundingClientRect();
  let best;
  let row;
  for (const each of places) {
    const box = each.getBoundingClientRect();
    if (box.top < bottom - 2 && box.bottom > top + 2) continue; // the same line
    row ??= box;
    if (box.top >= row.bottom || box.bottom <= row.top) break; // the line behind the next one
    if (best === undefined || Math.abs(box.left - left) < best.away) best = { each, away: Math.abs(box.left - left) };
  }
  return best?.each;
}

function focus(place) {
  if (!place) return;
  for (const each of place.parentElement.querySelectorAll('[tabindex="0"]')) each.tabIndex = -1;
  place.tabIndex = 0;
  place.focus();
}

const placeOf = (event) => event.target.closest("[data-place]");

for (const side of sides) {
  side.addEventListener("pointerover", (event) => {
    if (event.pointerType === "mouse" && placeOf(event)) look(Number(placeOf(event).dataset.place));
  });
  side.addEventListener("pointerleave", () => look(null));
  side.addEventListener("focusin", (event) => look(Number(placeOf(event).dataset.place)));
  side.addEventListener("focusout", (event) => {
    if (!$("panel").contains(event.relatedTarget)) look(null); // it would vanish under the focus
  });
  side.addEventListener("click", (event) => {
    if (!placeOf(event)) return;
    const i = Number(placeOf(event).dataset.place);
    focus(side.children[i]);
    pick(now.picked === i ? null : i);
  });
}

$("panel").addEventListener("focusout", (event) => {
  if (!$("panel").contains(event.relatedTarget)) look(null);
});

// ---- the page

function begin() {
  document.title = `${data.model}, every step`;
  $("model").textContent = $("model").title = data.model; // a long one is cut
  $("about").textContent = data.about;
  $("summary").textContent = `whole run: ${data.summary}`;
  $("notice").hidden = data.notice === null;
  $("notice").textContent = data.notice ?? "";
  $("legend").replaceChildren(...data.legend.map((letter) => {
    const { key, name, mark } = states[letter];
    const item = make("li");
    const sample = make("span", "sample", name);
    sample.dataset.state = key;
    item.append(make("span", "mark", mark.trim() ? `${mark} ` : ""), sample);
    return item;
  }), ...Object.entries(data.signs).map(([sign, name]) => make("li", "sign quiet", `${sign} ${name}`)));
  for (const speed of SPEEDS) $("speed").append(new Option(`${speed}×`, speed));
  canvases.forEach((each, i) => $("canvas").append(new Option(each.number, i)));
  $("scrub").max = steps.length - 1;

  $("play").addEventListener("click", KEYS[" "]);
  $("step-back").addEventListener("click", KEYS[","]);
  $("step-on").addEventListener("click", KEYS["."]);
  $("canvas-back").addEventListener("click", canvasBack);
  $("canvas-on").addEventListener("click", KEYS["]"]);
  $("let-go").addEventListener("click", () => {
    const held = now.picked;
    pick(null);
    focus(inView().children[held]); // the button is gone
  });
  $("theme").addEventListener("click", otherTheme);
  $("help-open").addEventListener("click", KEYS["?"]);
  $("scrub").addEventListener("input", () => go(Number($("scrub").value)));
  $("speed").addEventListener("change", () => setSpeed(SPEEDS.indexOf(Number($("speed").value))));
  $("canvas").addEventListener("change", () => toCanvas(Number($("canvas").value)));
  $("view").addEventListener("change", () => setView($("view").value));
  $("draft").addEventListener("change", () => setDraft($("draft").value));
  $("plot").addEventListener("pointerdown", (event) => { $("plot").setPointerCapture(event.pointerId); scrub(event); });
  $("plot").addEventListener("pointermove", (event) => { if (event.buttons) scrub(event); });
  document.addEventListener("keydown", key);
  new ResizeObserver(() => { area = null; drawPlot(); }).observe($("plot"));

  const light = matchMedia("(prefers-color-scheme: light)");
  light.addEventListener("change", () => setTheme(light.matches ? "light" : "dark"));
  setTheme(light.matches ? "light" : "dark");
  setSpeed(SPEEDS.indexOf(1));
  fill();
  setView(now.view);
  $("draft").value = now.draft;
  show(now.at);
  if (data.moves && !still) play();
}

begin();
}

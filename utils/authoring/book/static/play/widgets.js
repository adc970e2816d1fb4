// The widgets, one function each, and the parts that they are made of. A widget gets its element
// and the vocabulary, {texts, eos}, and calls play.run for what the model does.
"use strict";

// --- Parts ---------------------------------------------------------------------------------------

/** Make an element: make("p", {class: "hint"}, "text", otherElement). */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

let lastName = 0;

/** Add a slider with a label and its value in words; `change` is called as it moves. */
function addSlider(root, label, { min, max, step, value, ticks = [], format = String }, change) {
  const id = `play-${++lastName}`;
  const input = make("input", { type: "range", id, min, max, step, value });
  const output = make("output", { for: id });
  const marks = ticks.map(([at, text]) => {
    const mark = make("span", {}, text);
    mark.style.setProperty("--at", (at - min) / (max - min));
    return mark;
  });
  const tell = () => {
    output.value = format(input.valueAsNumber);
    input.setAttribute("aria-valuetext", output.value);
  };
  input.addEventListener("input", () => { tell(); change(); });
  tell();
  const row = make("div", { class: "play-slider" }, make("label", { for: id }, label), output, input);
  if (marks.length) row.append(make("div", { class: "play-ticks", "aria-hidden": "true" }, ...marks));
  root.append(row);
  return input;
}

/** Add a box for a whole number of two digits. */
function addNumber(root, label, value, change) {
  const limits = { type: "number", inputmode: "numeric", min: 10, max: 99, step: 1 };
  const input = make("input", { ...limits, value, "aria-label": label });
  input.addEventListener("input", change);
  root.append(input);
  return input;
}

function addButton(root, text, press) {
  const button = make("button", { type: "button" }, text);
  button.addEventListener("click", press);
  root.append(button);
  return button;
}

/** Add named figures, and return a function that sets them by name. */
function addFigures(root, names) {
  const cells = {};
  const list = make("dl", { class: "play-figures" });
  for (const [key, name] of Object.entries(names)) {
    cells[key] = make("dd", { "data-figure": key }, "–");
    list.append(make("div", {}, make("dt", {}, name), cells[key]));
  }
  root.append(list);
  return (values) => {
    for (const [key, value] of Object.entries(values)) cells[key].textContent = value;
  };
}

/** Add a line that only a screen reader has, which speaks it when it changes. */
function addSummary(root) {
  const line = make("p", { class: "play-summary", "aria-live": "polite" });
  root.append(line);
  return line;
}

/** Show what a token is: spaces and line breaks are seen. */
function nameToken(text) {
  return text.replaceAll("\n", "⏎").replaceAll(" ", "␣") || "end";
}

/** Add bars of probabilities; the returned function gets [[token, share, share of the base]]. */
function addBars(root, label) {
  const list = make("ul", { class: "play-bars", "aria-label": label });
  root.append(list);
  return (rows) => list.replaceChildren(...rows.map(([name, share, baseShare]) => {
    const percent = (value) => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)}%`;
    const bar = make("span", { class: "play-bar", "aria-hidden": "true" });
    bar.style.setProperty("--share", share);
    if (baseShare !== undefined) {
      bar.append(make("i"));
      bar.style.setProperty("--base", baseShare);
    }
    const row = make("li", {}, make("code", {}, name), bar, make("span", {}, percent(share)));
    if (baseShare !== undefined) row.title = `${percent(baseShare)} by the base model`;
    return row;
  }));
}

function softmax(logits) {
  const highest = logits.reduce((x, y) => Math.max(x, y));
  const probs = logits.map((logit) => Math.exp(logit - highest));
  const total = probs.reduce((x, y) => x + y);
  return probs.map((p) => p / total);
}

// --- Additions -----------------------------------------------------------------------------------

const isRight = (text, a, b) => text.endsWith(`A: ${a + b}`); // as reward_fn_addition
const isWorked = (text) => ["ones ", "tens ", "sum "].every((step) => text.includes(step));
const mean = (values) => values.reduce((x, y) => x + y, 0) / values.length;
const SAMPLES = 12;

/**
 * Add what shows a policy on an addition: two numbers, the first token's bars, figures and answers.
 * Returns a function that samples anew with a job's {policy, steer}; numbers are read on the way.
 */
function addAdditions(root, { texts }, getJob) {
  let seed = 0;
  const sum = make("div", { class: "play-sum" }, "Q: ");
  const a = addNumber(sum, "First number, from 10 to 99", 27, update);
  sum.append(" + ");
  const b = addNumber(sum, "Second number, from 10 to 99", 48, update);
  addButton(sum, "Sample again", () => { seed += 1; update(); });
  const warning = make("p", { class: "play-warning", role: "alert" });
  const figures = addFigures(root, {
    right: "right", worked: "worked", tokens: "mean length", kl: "KL per token",
  });
  root.append(make("p", { class: "play-label" }, "The first token: ",
    make("small", {}, "bar: this model, line: the base")));
  const drawBars = addBars(root, "Probabilities of the first token");
  root.append(make("p", { class: "play-label" }, `${SAMPLES} answers, sampled:`));
  const answers = Array.from({ length: SAMPLES }, () => make("li", {}, "…"));
  root.append(make("ol", { class: "play-answers" }, ...answers));
  const summary = addSummary(root);
  root.prepend(sum, warning);

  async function update() {
    const valid = [a, b].map((input) => {
      input.setAttribute("aria-invalid", String(!input.checkValidity() || !input.value));
      return input.getAttribute("aria-invalid") === "false";
    }).every(Boolean);
    warning.textContent = valid ? "" : "The model only knows whole numbers from 10 to 99.";
    if (!valid) return;
    const [x, y] = [a.valueAsNumber, b.valueAsNumber];
    const job = { job: "sample", prompt: `Q: ${x}+${y}\n`, count: SAMPLES, seed, ...getJob() };
    const samples = [];
    const isDone = await play.run(root, job, (part) => {
      if (part.logits) {
        const [p, q] = [softmax(part.logits), softmax(part.baseLogits)];
        const order = [...p.keys()].sort((i, j) => p[j] + q[j] - p[i] - q[i]);
        const shown = order.filter((i) => p[i] + q[i] > 0.01).slice(0, 4);
        drawBars(shown.map((i) => [nameToken(texts[i]), p[i], q[i]]));
        return;
      }
      samples.push(part);
      const [line, right] = [answers[part.row], isRight(part.text, x, y)];
      line.className = right ? "play-right" : "play-wrong";
      const mark = make("b", { role: "img", "aria-label": right ? "right:" : "wrong:" });
      mark.textContent = right ? "✓" : "✗";
      const lines = part.text.trim().split("\n").map((text) => make("span", {}, text));
      line.replaceChildren(mark, ...lines.flatMap((span, i) => (i ? [" ⏎ ", span] : [span])));
      figures(count(samples, x, y));
    });
    if (!isDone) return;
    const { right, worked, tokens, kl } = count(samples, x, y);
    summary.textContent = `${right} answers right, ${worked} worked, ${tokens}, KL ${kl}.`;
  }

  function count(samples, x, y) {
    const share = (test) => `${samples.filter(({ text }) => test(text)).length} of ${samples.length}`;
    const lengths = samples.map(({ sampled }) => sampled.length);
    const kls = samples.flatMap(({ sampled }) => sampled.map(({ kl }) => kl));
    return {
      right: share((text) => isRight(text, x, y)), worked: share(isWorked),
      tokens: `${mean(lengths).toFixed(0)} tokens`, kl: mean(kls).toFixed(3),
    };
  }

  return update;
}

// --- The widgets, by the name in data-play -------------------------------------------------------

const WIDGETS = {
  /** How much reinforcement learning would you like? */
  front(root, vocabulary) {
    const update = addAdditions(root, vocabulary, () => ({
      policy: { adapter: "ch3_grpo-25", strength: slider.valueAsNumber },
    }));
    const controls = make("div");
    root.querySelector(".play-warning").after(controls);
    const ticks = [[0, "0: base model"], [1, "1: after GRPO"], [1.5, "beyond"]];
    const range = { min: 0, max: 1.5, step: 0.05, value: 0, ticks, format: (x) => x.toFixed(2) };
    const slider = addSlider(controls, "Strength of the training", range, () => update());
    return update();
  },
};

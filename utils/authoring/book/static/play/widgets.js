// The widgets, one function each, and the parts that they are made of. A widget gets its element
// and the vocabulary, {texts, words}, and calls play.run for what the model does (worker.js).
//
// To add one: write its function into WIDGETS, and `<!-- play: NAME: QUESTION -->` on a line of its
// own into chapters/source/CHAPTER.md. Its adapters come from chapters/experiments/adapters.py.
"use strict";

const { softmax, truncate } = makeEngine();

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

/** Add a slider over phases; the returned function says which adapter the chosen one is. */
function addPhases(root, phases, update) {
  const slider = addSlider(root, "Phases of training", {
    min: 0, max: phases.length - 1, step: 1, value: 0, format: (i) => `${phases[i]} of ${phases.at(-1)}`,
  }, update);
  return (family) => {
    const phase = phases[slider.valueAsNumber];
    return { adapter: phase ? `${family}-${phase}` : null };
  };
}

/** Add a box for a whole number of two digits. */
function addNumber(root, label, value, change) {
  const limits = { type: "number", inputmode: "numeric", min: 10, max: 99, step: 1 };
  const input = make("input", { ...limits, value, "aria-label": label });
  input.addEventListener("input", change);
  root.append(input);
  return input;
}

/** Add a list of choices; the value of the select is the chosen one's key. */
function addChoice(root, label, choices, change) {
  const options = Object.entries(choices).map(([value, text]) => make("option", { value }, text));
  const select = make("select", {}, ...options);
  select.addEventListener("input", change);
  root.append(make("label", { class: "play-choice" }, `${label} `, select));
  return select;
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
function addBars(root, title, legend) {
  const list = make("ul", { class: "play-bars", "aria-label": title });
  root.append(make("p", { class: "play-label" }, `${title} `, make("small", {}, legend)), list);
  return (rows) => list.replaceChildren(...rows.map(([name, share, baseShare]) => {
    const isNearAnEnd = (value) => value > 0 && (value < 0.1 || value > 0.99);
    const percent = (value) => `${(100 * value).toFixed(isNearAnEnd(value) ? 1 : 0)}%`;
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

// --- Samples -------------------------------------------------------------------------------------

const mean = (values) => values.reduce((x, y) => x + y, 0) / values.length;

/** Return how many samples pass a test, in words. */
const share = (samples, test) => `${samples.filter(({ text }) => test(text)).length} of ${samples.length}`;

/**
 * Add figures, what `addFirst` draws of the logits after the prompt, and a list of samples. Returns a
 * function that runs a job and shows each sample as it comes: `measure` makes the figures of those
 * so far, `judge` the {kind, mark, meaning} of one. It resolves to the samples and their lines.
 */
function addSamples(root, { names, count, title, drawFirst = () => () => {} }) {
  const labels = { ...names, tokens: "mean length", kl: "KL per token" };
  const setFigures = addFigures(root, labels);
  const draw = drawFirst(root);
  root.append(make("p", { class: "play-label" }, title));
  const lines = Array.from({ length: count }, () => make("li", {}, "…"));
  root.append(make("ol", { class: "play-answers" }, ...lines));
  const summary = addSummary(root);

  function measureAll(samples, measure) {
    const kls = samples.flatMap(({ sampled }) => sampled.map(({ kl }) => kl));
    const tokens = `${mean(samples.map(({ sampled }) => sampled.length)).toFixed(0)} tokens`;
    return { ...measure(samples), tokens, kl: mean(kls).toFixed(3) };
  }

  return async (job, measure, judge) => {
    const samples = [];
    const isDone = await play.run(root, { job: "sample", count, ...job }, (part) => {
      if (part.logits) return draw(part);
      samples.push(part);
      const { kind, mark, meaning } = judge(part.text);
      const sign = make("b", { role: "img", "aria-label": `${meaning}: ` }, mark);
      const rows = part.text.trim().split("\n").map((row) => make("span", {}, row));
      const line = make("li", { class: `play-${kind}` }, sign);
      line.append(...rows.flatMap((row, i) => (i ? [" ⏎ ", row] : [row])));
      lines[part.row].replaceWith(line);
      lines[part.row] = line;
      setFigures(measureAll(samples, measure));
    });
    if (!isDone) return null;
    const figures = Object.entries(measureAll(samples, measure));
    summary.textContent = figures.map(([key, value]) => `${labels[key]}: ${value}`).join(", ");
    return { samples, lines };
  };
}

// --- Additions -----------------------------------------------------------------------------------

const isRight = (text, a, b) => text.endsWith(`A: ${a + b}`); // as reward_fn_addition
const isWorked = (text) => ["ones ", "tens ", "sum "].every((step) => text.includes(step));

/**
 * Add what shows a policy on an addition: two numbers, what `addControls(root, update)` adds, the
 * first token's bars, figures and answers. `getJob` says the policy; `finish` gets the samples, the
 * lines of the list and whether each is right.
 */
function addAdditions(root, { texts }, { addControls, count = 12, title, finish = () => {} }) {
  let seed = 0;
  const sum = make("div", { class: "play-sum" }, "Q: ");
  const a = addNumber(sum, "First number, from 10 to 99", 34, update);
  sum.append(" + ");
  const b = addNumber(sum, "Second number, from 10 to 99", 51, update);
  addButton(sum, "Resample", () => { seed += 1; update(); });
  const warning = make("p", { class: "play-warning", role: "alert" });
  root.append(sum, warning);
  const getJob = addControls(root, update);
  const sample = addSamples(root, {
    names: { right: "right", worked: "show their work" }, count, title: title ?? `${count} answers, sampled:`,
    drawFirst: (parent) => addFirst(parent, texts),
  });

  async function update() {
    const isKnown = [a, b].map((input) => {
      const known = input.checkValidity() && input.value !== "";
      input.setAttribute("aria-invalid", String(!known));
      return known;
    }).every(Boolean);
    warning.textContent = isKnown ? "" : "The model only knows whole numbers from 10 to 99.";
    if (!isKnown) return;
    const [x, y] = [a.valueAsNumber, b.valueAsNumber];
    const right = (text) => isRight(text, x, y);
    const done = await sample(
      { prompt: `Q: ${x}+${y}\n`, seed, ...getJob() },
      (samples) => ({ right: share(samples, right), worked: share(samples, isWorked) }),
      (text) => (right(text)
        ? { kind: "right", mark: "✓", meaning: "right" }
        : { kind: "wrong", mark: "✗", meaning: "wrong" }),
    );
    if (done) finish(done.lines, done.samples.map(({ text }) => Number(right(text))));
  }

  return update();
}

/** Add bars of the likeliest first tokens, which are drawn from a job's first part. */
function addFirst(root, texts) {
  const draw = addBars(root, "How an answer begins (A: the number at once; ones: its steps first):", "bar: this model, mark: the base model");
  return ({ logits, baseLogits }) => {
    const [p, q] = [softmax(logits), softmax(baseLogits)];
    const order = [...q.keys()].sort((i, j) => q[j] - q[i]); // so that no bar changes its place
    const shown = order.filter((i) => p[i] + q[i] > 0.01).slice(0, 4);
    draw(shown.map((i) => [nameToken(texts[i]), p[i], q[i]]));
  };
}

// --- The widgets, by the name in data-play -------------------------------------------------------

const two = (x) => x.toFixed(2);
const GRPO_PHASES = [0, 1, 2, 3, 4, 6, 8, 10, 14, 18, 25];

const WIDGETS = {
  /** The base model with more and more of what GRPO added to its weights. */
  front(root, vocabulary) {
    const ticks = [[0, "0: base model"], [1, "1: trained"], [1.5, "1.5"]];
    const range = { min: 0, max: 1.5, step: 0.05, value: 0, ticks, format: two };
    return addAdditions(root, vocabulary, {
      addControls(parent, update) {
        const slider = addSlider(parent, "How strongly the training counts", range, update);
        return () => ({ policy: { adapter: "ch3_grpo-25", strength: slider.valueAsNumber } });
      },
    });
  },

  /** Temperature, top-k and top-p on the next token's probabilities. */
  async "ch0-sampling"(root, { texts }) {
    const prompts = {
      "The plot was": "The plot was", "Q: 37+48\n": "Q: 37+48⏎", "Q: 37+48\nA: ": "Q: 37+48⏎A: ",
      "Q: 37+48\nones 7+8=": "Q: 37+48⏎ones 7+8=",
    };
    const prompt = addChoice(root, "After", prompts, read);
    const heat = { min: 0, max: 2, step: 0.05, value: 1, format: two };
    const temperature = addSlider(root, "Temperature", heat, draw);
    const k = { min: 1, max: 30, step: 1, value: 30, format: (x) => (x < 30 ? x : "all") };
    const topK = addSlider(root, "Top-k", k, draw);
    const topP = addSlider(root, "Top-p", { ...heat, min: 0.05, max: 1 }, draw);
    const figures = addFigures(root, { kept: "tokens kept", mass: "their probability" });
    const bars = addBars(root, "The next token:", "bar: drawn with, mark: the model at temperature 1");
    const summary = addSummary(root);
    let logits;

    function draw() {
      if (!logits) return; // a slider was moved before they came
      const settings = {
        temperature: temperature.valueAsNumber, topP: topP.valueAsNumber,
        topK: topK.valueAsNumber < 30 ? topK.valueAsNumber : Infinity,
      };
      const [p, q] = [truncate(logits, settings), softmax(logits)];
      const kept = [...p.keys()].filter((i) => p[i] > 0);
      const mass = kept.reduce((sum, i) => sum + q[i], 0);
      const order = [...q.keys()].sort((i, j) => q[j] - q[i]).slice(0, 12);
      bars(order.map((i) => [nameToken(texts[i]), p[i], q[i]]));
      figures({ kept: `${kept.length} of ${p.length}`, mass: `${(100 * mass).toFixed(1)}%` });
      summary.textContent = `${kept.length} tokens kept`;
    }

    async function read() {
      const job = { job: "sample", prompt: prompt.value };
      if (await play.run(root, job, (part) => { logits = part.logits; })) draw();
    }

    return read();
  },

  /** The adapter of chapter 1's opening: how strongly it is added, and how much of its rank. */
  "ch1-adapter"(root, { words }) {
    const strength = addSlider(root, "Strength", {
      min: -1, max: 2, step: 0.1, value: 1, format: (x) => x.toFixed(1),
      ticks: [[-1, "subtracted"], [0, "0: off"], [1, "1: as trained"], [2, "twice"]],
    }, update);
    const rank = addSlider(root, "Rank", {
      min: 1, max: 4, step: 1, value: 4, format: (x) => `${x} of 4`,
    }, update);
    const sample = addSamples(root, {
      names: { friendly: "friendly", unfriendly: "unfriendly" }, count: 8,
      title: "8 reviews that begin with “This movie is”:",
    });
    const mood = (text) => Math.sign(calcSentiment(text, words));
    const signs = {
      "1": { kind: "right", mark: "+", meaning: "friendly" },
      "0": { kind: "neither", mark: "·", meaning: "neither" },
      "-1": { kind: "wrong", mark: "−", meaning: "unfriendly" },
    };

    function update() {
      const policy = { adapter: "ch1_sft-friendly", strength: strength.valueAsNumber };
      return sample(
        { prompt: "This movie is", policy: { ...policy, rank: rank.valueAsNumber }, length: 30 },
        (samples) => ({
          friendly: share(samples, (text) => mood(text) > 0),
          unfriendly: share(samples, (text) => mood(text) < 0),
        }),
        (text) => signs[mood(text)],
      );
    }

    return update();
  },

  /** A group of eight, after so many phases of training, each with its advantage. */
  "ch3-phases"(root, vocabulary) {
    return addAdditions(root, vocabulary, {
      count: 8,
      title: "A group of eight; every token of an answer has the answer’s advantage A:",
      addControls(parent, update) {
        const getPolicy = addPhases(parent, GRPO_PHASES, update);
        return () => ({ policy: getPolicy("ch3_grpo") });
      },
      finish(lines, rewards) {
        const centre = mean(rewards);
        const spread = Math.sqrt(rewards.reduce((sum, r) => sum + (r - centre) ** 2, 0) / 7);
        rewards.forEach((reward, i) => {
          const advantage = (reward - centre) / (spread + 1e-4);
          lines[i].style.setProperty("--advantage", Math.abs(advantage) / 2.5);
          lines[i].append(make("small", {}, ` A = ${two(advantage).replace("-", "−")}`));
        });
      },
    });
  },

  /** Each of the policy's 24 adapters, on or off. */
  "ch8-sites"(root, vocabulary) {
    const kinds = ["attn.q", "attn.k", "attn.v", "attn.o", "mlp.in", "mlp.out"];
    return addAdditions(root, vocabulary, {
      addControls(parent, update) {
        const boxes = new Map();
        const setAll = (test) => {
          boxes.forEach((box, site) => { box.checked = test(site); });
          update();
        };
        const rows = kinds.map((kind) => make("tr", {}, make("th", { scope: "row" }, kind),
          ...[0, 1, 2, 3].map((block) => {
            const box = make("input", { type: "checkbox", "aria-label": `${kind} in block ${block}` });
            box.checked = true;
            box.addEventListener("input", update);
            boxes.set(`blocks.${block}.${kind}`, box);
            return make("td", {}, box);
          })));
        const heads = [0, 1, 2, 3].map((block) => make("th", { scope: "col" }, `block ${block}`));
        const table = make("table", { class: "play-sites" }, make("tr", {}, make("td"), ...heads), ...rows);
        const buttons = make("div", { class: "play-buttons" });
        addButton(buttons, "All on", () => setAll(() => true));
        addButton(buttons, "All off", () => setAll(() => false));
        addButton(buttons, "Only block 3’s mlp.out", () => setAll((site) => site === "blocks.3.mlp.out"));
        addButton(buttons, "All but block 3", () => setAll((site) => !site.startsWith("blocks.3")));
        parent.append(table, buttons);
        return () => {
          const sites = [...boxes].filter(([, box]) => box.checked).map(([site]) => site);
          return { policy: { adapter: "ch3_grpo-25", sites } };
        };
      },
    });
  },

  /** The base, with the policy's direction added after a block at the last token of the prompt. */
  "ch8-direction"(root, vocabulary) {
    const pairs = Array.from({ length: 24 }, (_, i) => [10 + ((i * 37) % 90), 10 + ((i * 53) % 90)]);
    const prompts = pairs.map(([a, b]) => `Q: ${a}+${b}\n`);
    return addAdditions(root, vocabulary, {
      addControls(parent, update) {
        const blocks = { 0: "block 0", 1: "block 1", 2: "block 2", 3: "block 3" };
        const block = addChoice(parent, "Added after", blocks, update);
        block.value = "3";
        const dose = addSlider(parent, "Dose", {
          min: -1, max: 4, step: 0.25, value: 0, format: two, ticks: [[-1, "−1"], [0, "0: base"], [1, "1"], [4, "4"]],
        }, update);
        const adapter = "ch3_grpo-25";
        return () => ({
          steer: { adapter, prompts, layer: Number(block.value), scale: dose.valueAsNumber },
        });
      },
    });
  },
};

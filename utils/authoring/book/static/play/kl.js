// Chapter 4's widget: estimates of a KL between two distributions that are drawn by hand.
"use strict";

const { makeRandom, draw: drawIndex } = makeEngine();

// Each by the log-ratio l of policy and reference, and the ratio of policy and sampler.
const KL_ESTIMATES = {
  k1: (l) => l,
  k2: (l) => l ** 2 / 2,
  k3: (l) => Math.expm1(-l) + l,
  k4: (l, ratio) => ratio * l,
};

/**
 * Return an estimate's value at each token, and its exact bias and standard deviation, in nats,
 * where the tokens are drawn with the probabilities s: bias = mean - KL(p ‖ q).
 */
function calcKlStats(kind, p, q, s) {
  const sum = (weights, values) => values.reduce((total, value, v) => total + weights[v] * value, 0);
  const logratios = p.map((share, v) => Math.log(share / q[v]));
  const values = logratios.map((l, v) => KL_ESTIMATES[kind](l, p[v] / s[v]));
  const kl = sum(p, logratios);
  const mean = sum(s, values);
  const std = Math.sqrt(sum(s, values.map((value) => (value - mean) ** 2)));
  return { values, kl, bias: mean - kl, std };
}

WIDGETS["ch4-estimators"] = (root) => {
  const TOKENS = ["A", "B", "C", "D", "E"];
  const STARTS = {
    "Near the reference": [[25, 22, 20, 18, 15], [20, 20, 20, 20, 20]],
    "Far from it": [[40, 20, 5, 1, 1], [5, 10, 20, 40, 20]],
  };
  const TICKS = [-4, -1, 0, 1, 4, 9, 25]; // of the strips, in nats
  const COUNT = 1000;
  const root2 = (value) => Math.sign(value) * Math.sqrt(Math.abs(value));
  const [left, right] = [root2(TICKS[0]), root2(TICKS.at(-1))];
  const place = (value) => Math.min(Math.max((root2(value) - left) / (right - left), 0), 1);

  function signed(value) {
    const digits = Math.abs(value) < 5e-4 ? value.toPrecision(1) : value.toFixed(3);
    return Math.abs(value) < 1e-9 ? "0" : digits.replace("-", "−");
  }

  let timer, seed = 0;

  const head = ["", "policy", "", "reference", ""].map((text) => make("span", {}, text));
  const grid = make("div", { class: "play-weights" }, ...head);
  const sliders = [[], []]; // of the policy, and of the reference
  const shares = [[], []];
  for (const [v, token] of TOKENS.entries()) {
    grid.append(make("code", {}, token));
    ["policy", "reference"].forEach((whose, i) => {
      const limits = { type: "range", min: 1, max: 40, step: 1, "aria-label": `${token}, ${whose}` };
      sliders[i].push(make("input", limits));
      shares[i].push(make("output"));
      sliders[i][v].addEventListener("input", update);
      grid.append(sliders[i][v], shares[i][v]);
    });
  }
  const buttons = make("div", { class: "play-buttons" });
  Object.entries(STARTS).forEach(([name, weights]) => addButton(buttons, name, () => start(weights)));
  addButton(buttons, "Draw again", () => { seed += 1; update(); });
  const box = make("input", { type: "checkbox" });
  box.addEventListener("input", update);
  const older = "The tokens come from an older policy, halfway to the reference";
  root.append(grid, buttons, make("label", { class: "play-choice" }, box, ` ${older}`));
  const setFigures = addFigures(root, { count: "tokens drawn", kl: "exact KL, nats" });
  root.append(make("p", { class: "play-label" }, "What one token says: ",
    make("small", {}, "dot: a token’s estimate, the larger the likelier; line: the exact KL; "
      + "triangle: the mean so far; in nats, on a square-root scale")));
  const strips = Object.keys(KL_ESTIMATES).map((kind) => {
    const line = make("div", { class: "play-estimate", "data-estimate": kind }, make("strong", {}, kind));
    const row = make("div", { class: "play-strip", "aria-hidden": "true" });
    const set = addFigures(line, { mean: "mean so far", bias: "bias", std: "spread" });
    root.append(line, row);
    return { kind, row, set };
  });
  const summary = addSummary(root);

  function start(weights) {
    weights.forEach((row, i) => row.forEach((weight, v) => { sliders[i][v].value = weight; }));
    update();
  }

  function update() {
    const [p, q] = sliders.map((row) => {
      const total = row.reduce((sum, slider) => sum + slider.valueAsNumber, 0);
      return row.map((slider) => slider.valueAsNumber / total);
    });
    [p, q].forEach((row, i) => row.forEach((share, v) => {
      shares[i][v].value = `${(100 * share).toFixed(0)}%`;
      sliders[i][v].setAttribute("aria-valuetext", shares[i][v].value);
    }));
    const s = box.checked ? p.map((share, v) => (share + q[v]) / 2) : p;
    for (const strip of strips) {
      strip.stats = calcKlStats(strip.kind, p, q, s);
      strip.total = 0;
      const { values, kl, bias, std } = strip.stats;
      strip.mean = make("b", {}, "▲");
      const put = (value, mark) => {
        mark.style.setProperty("--at", place(value));
        return mark;
      };
      const dots = values.map((value, v) => put(value, make("span", {}, TOKENS[v])));
      dots.forEach((dot, v) => dot.style.setProperty("--size", `${0.5 + 1.5 * Math.sqrt(s[v])}rem`));
      const ticks = TICKS.map((tick) => put(tick, make("small", {}, signed(tick).replace(".000", ""))));
      strip.row.replaceChildren(...ticks, put(kl, make("i")), ...dots, strip.mean);
      strip.set({ bias: signed(bias), std: std.toFixed(3) });
    }
    drawAll(s);
  }

  /** Draw tokens, ten at a time, and show the mean of each estimate as they come. */
  function drawAll(s) {
    const random = makeRandom(seed);
    const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
    let drawn = 0;
    clearInterval(timer);
    root.setAttribute("aria-busy", "true");
    const step = () => {
      for (const end = isStill ? COUNT : drawn + 10; drawn < end; drawn++) {
        const token = drawIndex(s, random());
        for (const strip of strips) strip.total += strip.stats.values[token];
      }
      setFigures({ kl: strips[0].stats.kl.toFixed(3), count: `${drawn} of ${COUNT}` });
      for (const strip of strips) {
        strip.set({ mean: signed(strip.total / drawn) });
        strip.mean.style.setProperty("--at", place(strip.total / drawn));
      }
      if (drawn < COUNT) return;
      clearInterval(timer);
      root.removeAttribute("aria-busy");
      const said = strips.map(({ kind, stats: { bias, std } }) => `${kind}: bias ${signed(bias)}, spread ${std.toFixed(3)}`);
      summary.textContent = `exact KL ${strips[0].stats.kl.toFixed(3)}; ${said.join("; ")}`;
    };
    timer = setInterval(step, 30);
    step();
  }

  start(STARTS["Near the reference"]);
};

// Brings the model to a page. Each element with data-play="name" becomes the widget of that name
// in widgets.js, kl.js or policies.js once it is seen. What that needs is loaded then, by script
// tags: a page that is opened as a file may load nothing else, nor start a worker, except from a
// text of its own.
"use strict";

const play = (() => {
  const FOLDER = new URL("play/", document.currentScript.src);
  const scripts = new Map(); // promises, by name
  const received = {}; // weights, by name
  const waiting = new Map(); // what answers to a job, by its id
  const turns = new WeakMap(); // the latest job of each widget
  const owners = new WeakMap(); // numbers of widgets, of which a page may have two of a name
  let worker, lastId = 0, lastOwner = 0;

  function loadScript(name) {
    if (!scripts.has(name)) {
      scripts.set(name, new Promise((resolve, reject) => {
        const script = document.createElement("script");
        script.src = new URL(`${name}.js`, FOLDER);
        script.onload = resolve;
        script.onerror = () => reject(new Error(`${name}.js could not be loaded`));
        document.head.append(script);
      }));
    }
    return scripts.get(name);
  }

  /** Called by the scripts of weights. */
  function receive(name, data) {
    received[name] = data;
  }

  function post(message, onPart = () => {}) {
    const id = ++lastId;
    return new Promise((resolve, reject) => {
      waiting.set(id, { resolve, reject, onPart });
      worker.postMessage({ id, ...message });
    });
  }

  function answer({ data: { id, part, result, error } }) {
    const { resolve, reject, onPart } = waiting.get(id);
    if (part) return onPart(part);
    waiting.delete(id);
    if (error) reject(new Error(error));
    else resolve(result);
  }

  let started = null;
  /** Start the worker with the base model. Resolves to the vocabulary: texts of tokens, and words. */
  function start() {
    started ??= Promise.all(["gpt", "worker", "base"].map(loadScript)).then(async () => {
      const program = new Blob([`(${work})((${makeEngine})())`], { type: "text/javascript" });
      worker = new Worker(URL.createObjectURL(program));
      worker.onmessage = answer;
      worker.onerror = () => waiting.forEach(({ reject }) => reject(new Error("no worker may run")));
      const texts = await post({ job: "loadBase", ...received.base });
      return { texts, words: received.base.words };
    });
    return started;
  }

  const loaded = new Map();
  function loadAdapter(adapter) {
    if (!loaded.has(adapter)) {
      loaded.set(adapter, loadScript(adapter).then(() =>
        post({ job: "loadAdapter", adapter, weights: received[adapter].weights })));
    }
    return loaded.get(adapter);
  }

  /**
   * Run a job of worker.js; `onPart` gets what it gives on the way. A newer job of the same widget
   * ends it: then nothing more comes, and the promise resolves to false. The element is busy until
   * then, so that a screen reader waits.
   */
  async function run(element, job, onPart = () => {}) {
    if (!owners.has(element)) owners.set(element, ++lastOwner);
    const owner = owners.get(element);
    const turn = {};
    turns.set(element, turn);
    const isNewest = () => turns.get(element) === turn;
    element.setAttribute("aria-busy", "true");
    try {
      await start();
      const adapters = [job.policy?.adapter, job.steer?.adapter, job.judge].filter(Boolean);
      await Promise.all(adapters.map(loadAdapter));
      if (!isNewest()) return false;
      const result = await post({ owner, ...job }, (part) => isNewest() && onPart(part));
      return isNewest() && (result ?? true);
    } finally {
      if (isNewest()) element.removeAttribute("aria-busy");
    }
  }

  async function show(element) {
    try {
      for (const name of ["gpt", "widgets", "kl", "policies"]) await loadScript(name);
      const widget = WIDGETS[element.dataset.play];
      const vocabulary = widget.length > 1 ? await start() : null; // chapter 4's needs no model
      element.replaceChildren(...element.querySelectorAll(".play-question"));
      await widget(element, vocabulary);
    } catch (error) {
      element.append(`This could not be started: ${error.message}.`);
      throw error;
    }
  }

  const observer = new IntersectionObserver((entries) => {
    for (const { target } of entries.filter((entry) => entry.isIntersecting)) {
      observer.unobserve(target);
      show(target);
    }
  }, { rootMargin: "200px" });
  document.addEventListener("DOMContentLoaded", () => {
    document.querySelectorAll("[data-play]").forEach((element) => observer.observe(element));
  });

  return { receive, run };
})();

// Brings the model to a page. Each element with data-play="name" becomes the widget of that name
// in widgets.js, kl.js or policies.js once it is seen. What that needs is loaded then, by script
// tags: a page that is opened as a file may load nothing else, nor start a worker, except from a
// text of its own.
"use strict";

const play = (() => {
  const FOLDER = new URL("play/", document.currentScript.src);
  const promises = new Map(); // of what has been loaded or started, by name
  const received = {}; // weights, by name
  const waiting = new Map(); // what answers to a job, by its id
  const turns = new WeakMap(); // the latest job of each widget
  const owners = new WeakMap(); // numbers of widgets, of which a page may have two of a name
  let worker, lastId = 0, lastOwner = 0;

  /** Do what has this name once; what failed is done again when it's asked for again. */
  function once(name, load) {
    if (!promises.has(name)) {
      const promise = load();
      promise.catch(() => promises.delete(name));
      promises.set(name, promise);
    }
    return promises.get(name);
  }

  function loadScript(name) {
    const file = `${name}.js`;
    return once(file, () => new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = new URL(file, FOLDER);
      script.onload = resolve;
      script.onerror = () => reject(new Error(`${file} couldn’t be loaded`));
      document.head.append(script);
    }));
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

  /** Start the worker with the base model. Resolves to the vocabulary: texts of tokens, and words. */
  const start = () => once("worker", async () => {
    await Promise.all(["gpt", "worker", "base"].map(loadScript));
    const program = new Blob([`(${work})((${makeEngine})())`], { type: "text/javascript" });
    worker = new Worker(URL.createObjectURL(program));
    worker.onmessage = answer;
    worker.onerror = () => waiting.forEach(({ reject }) => reject(new Error("no worker may run")));
    const texts = await post({ job: "loadBase", ...received.base });
    return { texts, words: received.base.words };
  });

  const loadAdapter = (adapter) => once(adapter, async () => {
    await loadScript(adapter);
    await post({ job: "loadAdapter", adapter, weights: received[adapter].weights });
  });

  /** Load something for a widget. Where that fails, say so, and try again at the press of a button. */
  async function insist(element, load, isWanted = () => true) {
    for (;;) {
      try {
        return await load();
      } catch (error) {
        if (!isWanted()) return null;
        console.error(error);
        await askToTryAgain(element, error.message);
      }
    }
  }

  function askToTryAgain(element, message) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Try again";
    const note = document.createElement("p");
    note.className = "play-warning play-failure";
    note.setAttribute("role", "alert");
    note.append(`This didn’t work: ${message}. `, button);
    element.insertBefore(note, element.querySelector(":scope > .play-figures"));
    element.removeAttribute("aria-busy");
    return new Promise((resolve) => button.addEventListener("click", () => {
      note.remove();
      element.setAttribute("aria-busy", "true");
      resolve();
    }));
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
    element.querySelector(".play-failure")?.remove();
    element.setAttribute("aria-busy", "true");
    await insist(element, async () => {
      await start();
      const adapters = [job.policy?.adapter, job.steer?.adapter, job.judge].filter(Boolean);
      await Promise.all(adapters.map(loadAdapter));
    }, isNewest);
    if (!isNewest()) return false;
    try {
      const result = await post({ owner, ...job }, (part) => isNewest() && onPart(part));
      return isNewest() && (result ?? true);
    } finally {
      if (isNewest()) element.removeAttribute("aria-busy");
    }
  }

  async function show(element) {
    const name = element.dataset.play;
    const vocabulary = await insist(element, async () => {
      for (const script of ["gpt", "widgets", "kl", "policies"]) await loadScript(script);
      return WIDGETS[name].length > 1 ? start() : null; // chapter 4's needs no model
    });
    element.replaceChildren(...element.querySelectorAll(".play-question"));
    await WIDGETS[name](element, vocabulary);
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

/** Work for which the service is asked: how far it is, cancelling it, and starting again where the service was away. */

import { isAway } from "./call.js";
import { ServiceError, send } from "./client.js";
import { make } from "./make.js";

const AWAY = "The service does not answer. Files and fields are kept, and this starts again as soon as it does.";

/** @param {number} ms @param {AbortSignal} [signal] @returns {Promise<void>} */
export const pause = (ms, signal) =>
  new Promise((done, fail) => {
    const timer = setTimeout(done, ms);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      fail(signal.reason);
    });
  });

/** A button that starts work, one that cancels it, a bar, and what is being done. */
export class Job {
  /**
   * @param {string} name of the button @param {(signal: AbortSignal) => Promise<void>} work
   */
  constructor(name, work) {
    this.work = work;
    /** @type {AbortController | null} */
    this.running = null;
    this.start = /** @type {HTMLButtonElement} */ (make("button", { type: "button", class: "first" }, name));
    this.stop = /** @type {HTMLButtonElement} */ (make("button", { type: "button" }, "Cancel"));
    this.bar = /** @type {HTMLProgressElement} */ (
      make("progress", { max: "1", value: "0", "aria-label": `${name}: share done` })
    );
    this.said = make("p", { class: "said", role: "status" });
    this.clock = make("span", { class: "dim clock" });
    this.detail = make("span", { class: "dim" });
    this.stop.disabled = true;
    this.start.addEventListener("click", () => this.run());
    this.stop.addEventListener("click", () => this.cancel());
    this.parts = [make("div", { class: "job" }, this.start, this.stop, this.bar, this.clock, this.detail), this.said];
  }

  /** @param {string} text @param {"" | "good" | "bad" | "warn"} [kind] */
  say(text, kind = "") {
    this.said.className = `said ${kind}`;
    if (this.said.textContent !== text) this.said.textContent = text;
  }

  /** @param {number} share @param {string} detail */
  progress(share, detail) {
    this.bar.value = share;
    this.detail.textContent = `${Math.floor(100 * share)} %${detail ? `, ${detail}` : ""}`;
  }

  cancel() {
    this.running?.abort();
  }

  /** Cancel what runs, and say nothing about it. */
  reset() {
    this.cancel();
    this.finished(this.running);
    this.say("");
    this.bar.value = 0;
    this.clock.textContent = this.detail.textContent = "";
  }

  /** @param {AbortController | null} controller of the work that has ended, or need not be waited for */
  finished(controller) {
    if (this.running !== controller) return;
    this.running = null;
    this.start.disabled = false;
    if (document.activeElement === this.stop) this.start.focus();
    this.stop.disabled = true;
  }

  /** Do the work, again if the service was away. */
  async run() {
    this.cancel();
    const controller = new AbortController();
    const { signal } = controller;
    this.running = controller;
    // The button that had the focus must not lose it.
    this.stop.disabled = false;
    if (document.activeElement === this.start) this.stop.focus();
    this.start.disabled = true;
    let started = performance.now();
    const tick = setInterval(() => {
      this.clock.textContent = `${((performance.now() - started) / 1000).toFixed(1)} s`;
    }, 100);
    this.bar.value = 0;
    this.detail.textContent = "";
    try {
      for (;;) {
        try {
          await this.work(signal);
          this.clock.textContent = `${((performance.now() - started) / 1000).toFixed(2)} s`;
          return;
        } catch (error) {
          if (!isAway(error)) throw error;
          this.say(AWAY, "warn");
          await back(signal);
          started = performance.now();
        }
      }
    } catch (error) {
      if (this.running !== controller) return;
      if (error instanceof DOMException && error.name === "AbortError") this.say("Cancelled.", "warn");
      else if (error instanceof ServiceError) this.say(error.message, "bad");
      else throw error;
    } finally {
      clearInterval(tick);
      this.finished(controller);
    }
  }
}

/** Wait until the service is ready. @param {AbortSignal} signal */
async function back(signal) {
  for (;;) {
    await pause(1000, signal);
    try {
      if ((await send("/readyz", { signal, accepted: [503] })).ok) return;
    } catch (error) {
      if (!isAway(error)) throw error;
    }
  }
}

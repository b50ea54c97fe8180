/** Sliders for what of a layer is drawn: its image, channels and planes. A slider stays the same element while it is moved. */

import { make } from "./make.js";

/** @typedef {{text: string, size: number, value: number, apply: (value: number) => void}} View */

export class Views {
  /** @param {HTMLElement} place */
  constructor(place) {
    this.place = place;
    /** @type {Map<string, {label: HTMLElement, input: HTMLInputElement, told: HTMLElement, apply: View["apply"]}>} */
    this.sliders = new Map();
  }

  /** @param {View[]} views */
  show(views) {
    const shown = views.map(({ text, size, value, apply }) => {
      const slider = this.sliders.get(text) ?? this.slider(text);
      slider.apply = apply;
      slider.input.max = String(size - 1);
      slider.input.value = slider.told.textContent = String(value);
      return slider.label;
    });
    // What is moved to another place loses the focus.
    if (shown.some((label, index) => label !== this.place.children[index]) || shown.length < this.place.children.length)
      this.place.replaceChildren(...shown);
  }

  /** @param {string} text */
  slider(text) {
    const input = /** @type {HTMLInputElement} */ (make("input", { type: "range", min: "0" }));
    const told = make("output", {});
    const slider = { label: make("label", {}, text, input, told), input, told, apply: (/** @type {number} */ _) => {} };
    input.addEventListener("input", () => slider.apply(Number(input.value)));
    this.sliders.set(text, slider);
    return slider;
  }
}

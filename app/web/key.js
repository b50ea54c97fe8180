import { lock, useKey } from "./client.js";

/** `<api-key>`: a field for the API key, shown when the service requires one. */
class ApiKey extends HTMLElement {
  connectedCallback() {
    this.hidden = true;
    const form = document.createElement("form");
    const label = document.createElement("label");
    const field = document.createElement("input");
    field.type = "password";
    field.autocomplete = "off";
    label.append("This service requires an API key: ", field);
    form.append(label);
    form.addEventListener("submit", (event) => event.preventDefault());
    this.replaceChildren(form);
    field.addEventListener("change", () => useKey(field.value));
    lock.addEventListener("locked", () => {
      this.hidden = false;
    });
  }
}

customElements.define("api-key", ApiKey);

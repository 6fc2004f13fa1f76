// Makes elements. Text always goes in as text nodes: nothing in this page parses a string as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes (functions become listeners, false and null are left out) and children. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, String(value));
  }
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** One of the icons that index.html defines. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#icon-${name}`);
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

/** A small button with an icon, named for those who cannot see it. */
export function iconButton(name, label, onClick) {
  return make("button", { type: "button", class: "icon-button", title: label, "aria-label": label, click: onClick },
    icon(name));
}

/** Say something to screen readers without moving the focus. */
export function announce(text) {
  byId("announcer").textContent = text;
}

/** Show a short notice for some seconds. */
export function notify(text) {
  const notice = byId("notice");
  notice.textContent = text;
  notice.hidden = false;
  clearTimeout(notify.timer);
  notify.timer = setTimeout(() => { notice.hidden = true; }, 6000);
}

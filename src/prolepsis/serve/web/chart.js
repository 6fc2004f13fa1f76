// A line over the last two minutes.

import { make } from "./dom.js";

const SAMPLES = 120;

export class Chart {
  /** `format` says a value in words; `ceiling` is the least height of the scale. */
  constructor(label, format, ceiling) {
    this.label = label;
    this.format = format;
    this.ceiling = ceiling;
    this.values = [];
    this.number = make("b");
    this.canvas = make("canvas", { role: "img" });
    this.element = make("div", { class: "chart" }, make("span", {}, label), this.canvas, this.number);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  add(value) {
    this.values.push(Number.isFinite(value) ? value : 0);
    if (this.values.length > SAMPLES) this.values.shift();
    const words = this.format(this.values.at(-1));
    this.number.textContent = words;
    this.canvas.setAttribute("aria-label", `${this.label}: ${words}, at most ${this.format(Math.max(...this.values))}`);
    this.draw();
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width || !this.values.length) return;
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    context.strokeStyle = context.fillStyle = getComputedStyle(this.canvas).color;
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    const top = Math.max(this.ceiling, ...this.values) * 1.08;
    const x = (index) => width - (this.values.length - 1 - index) * (width / (SAMPLES - 1));
    const y = (value) => height - 1 - (value / top) * (height - 3);
    context.beginPath();
    this.values.forEach((value, index) => context.lineTo(x(index), y(value)));
    context.stroke();
    context.lineTo(x(this.values.length - 1), height);
    context.lineTo(x(0), height);
    context.globalAlpha = 0.14;
    context.fill();
  }
}

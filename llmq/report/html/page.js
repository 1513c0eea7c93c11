"use strict";
// Draws the charts of a report as SVG from the JSON in the page. Texts of a log become text nodes, never HTML.
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const PAD = {left: 56, right: 14, top: 10, bottom: 22};
  const view = {x: "step", smooth: 0.25, hidden: new Set(), log: new Map(), zoom: null, find: ""};
  const tip = document.getElementById("tip");
  let data, charts = [];

  // ---- numbers ----
  const last = (sorted, x) => {  // the place of the last one that is at most x, or -1
    let low = -1, high = sorted.length;
    while (high - low > 1) { const middle = (low + high) >> 1; if (sorted[middle] <= x) low = middle; else high = middle; }
    return low;
  };
  const nearest = (sorted, x) => {
    const i = Math.max(last(sorted, x), 0);
    return i + 1 < sorted.length && sorted[i + 1] - x < x - sorted[i] ? i + 1 : i;
  };
  function placed(run, steps) {  // steps in the unit of the axis
    if (view.x === "step") return steps;
    const from = data.axes[run].step, to = data.axes[run][view.x === "time" ? "seconds" : "tokens"];
    if (from.length === 0) return steps.map(() => 0);
    return steps.map(step => {
      const i = Math.min(Math.max(last(from, step), 0), Math.max(from.length - 2, 0)), j = Math.min(i + 1, from.length - 1);
      const share = from[j] > from[i] ? Math.min(Math.max((step - from[i]) / (from[j] - from[i]), 0), 1) : 0;
      return (to[i] ?? 0) + share * ((to[j] ?? 0) - (to[i] ?? 0));
    });
  }
  function smoothed(values, share) {  // three passes of a centred box; what is missing stays so, uncounted
    const reach = Math.floor(share * share * values.length / 8);
    if (reach < 1) return values;
    let total = values.map(v => v ?? 0), count = values.map(v => v === null ? 0 : 1);
    const box = numbers => {
      const sums = [0];
      for (const v of numbers) sums.push(sums[sums.length - 1] + v);
      return numbers.map((_, i) => sums[Math.min(i + reach + 1, numbers.length)] - sums[Math.max(i - reach, 0)]);
    };
    for (let pass = 0; pass < 3; pass++) { total = box(total); count = box(count); }
    return values.map((v, i) => v === null || !(count[i] > 0) ? null : total[i] / count[i]);
  }
  function shown(v, unit) {
    if (v === null || v === undefined || !isFinite(v)) return "not finite";
    const size = Math.abs(v);
    const text = size >= 1e15 || (size < 1e-3 && v !== 0) ? v.toExponential(2).replace("e+", "e")
      : size >= 1000 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(5));
    return unit === "%" ? text + "%" : text;
  }
  function brief(v, step) {  // a number at an axis whose numbers are `step` apart
    if (v === 0) return "0";
    const size = Math.abs(v), near = Math.abs(step) || size;
    for (const [unit, of] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
      if (size >= 10 * of && size < 1e15) return String(+(v / of).toFixed(Math.max(0, Math.ceil(-Math.log10(near / of) - 1e-9)))) + unit;
    }
    if (size >= 1e15 || size < 1e-3) {
      const digits = Math.floor(Math.log10(size)) - Math.floor(Math.log10(near) + 1e-9);
      return v.toExponential(Math.min(Math.max(digits, 0), 4)).replace("e+", "e");
    }
    return v.toFixed(Math.min(Math.max(0, Math.ceil(-Math.log10(near) - 1e-9)), 6));
  }
  function clock(s) {
    if (s < 120) return `${+s.toPrecision(3)} s`;
    const two = n => String(Math.floor(n)).padStart(2, "0");
    if (s < 7200) return s % 60 < 0.5 ? `${Math.floor(s / 60)} min` : `${Math.floor(s / 60)}:${two(s % 60)} min`;
    return `${Math.floor(s / 3600)}:${two(s % 3600 / 60)} h`;
  }
  const along = (x, step) => view.x === "time" ? clock(x) : brief(x, step);
  function ticks(low, high, most, nice) {
    const rough = (high - low) / most;
    if (!(rough > 0) || !isFinite(rough)) return [low];
    let step = nice.find(n => n >= rough);
    if (step === undefined || nice[0] > rough) {
      const power = 10 ** Math.floor(Math.log10(rough));
      step = [1, 2, 5, 10].map(n => n * power).find(n => n >= rough * 0.999) ?? 10 * power;
    }
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step && found.length < 40; i++) found.push(i * step);
    return found.length ? found : [low];
  }
  const SECONDS = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400];
  function logTicks(low, high) {
    const decades = Math.log10(high / low), found = [];
    for (let p = Math.floor(Math.log10(low)); p <= Math.log10(high) && found.length < 400; p++) {
      for (const n of decades < 1.2 ? [1, 2, 3, 5, 7] : decades < 3 ? [1, 3] : [1]) {
        const v = n * 10 ** p;
        if (v >= low * 0.999 && v <= high * 1.001) found.push(v);
      }
    }
    const every = Math.ceil(found.length / 7);
    return found.length ? found.filter((_, i) => i % every === 0) : [low];
  }
  const quantile = (sorted, q) => sorted[Math.min(Math.floor(q * sorted.length), sorted.length - 1)];

  // ---- one chart ----
  function element(parent, name, about) {
    const one = document.createElementNS(NS, name);
    for (const key in about) one.setAttribute(key, about[key]);
    return parent.appendChild(one);
  }
  class Chart {
    constructor(figure, about) {
      Object.assign(this, {figure, about, plot: figure.querySelector(".plot"), id: about.id});
      const caption = figure.querySelector("figcaption"), kinds = new Set(about.series.map(one => one.kind));
      if (kinds.has("evaluation") && kinds.has("training")) {
        for (const kind of kinds) this.key(caption, kind);
      }
      this.button = document.createElement("button");
      Object.assign(this.button, {type: "button", textContent: "log", title: "logarithmic axis"});
      this.button.onclick = () => { view.log.set(this.id, !this.isLog()); this.draw(); };
      caption.append(this.button);
      this.plot.onpointermove = event => this.move(event);
      this.plot.onpointerleave = () => { tip.hidden = true; cross(null); };
      this.plot.onpointerdown = event => this.press(event);
      this.plot.onpointerup = event => this.release(event);
      this.plot.ondblclick = () => zoom(null);
    }
    key(caption, kind) {
      const key = document.createElement("span"), mark = document.createElementNS(NS, "svg");
      key.className = "key";
      for (const [name, value] of [["width", 22], ["height", 8]]) mark.setAttribute(name, value);
      mark.style.overflow = "visible";
      element(mark, "path", {d: "M0 4H22", class: `line ${kind} ${this.colour({run: 0, kind})}`, fill: "none", "stroke-width": 2, "stroke-dasharray": kind === "evaluation" ? "5 3" : ""});
      key.append(mark, kind);
      caption.append(key);
    }
    isLog() { return view.log.get(this.id) ?? this.about.log; }
    colour(one) { return "c" + (data.axes.length === 1 && one.kind === "evaluation" ? 1 : one.run % 9); }
    lines() {  // of the runs that are shown, with their places on both axes
      return this.about.series.filter(one => !view.hidden.has(one.run)).map(one => {
        const smooth = this.about.smooth && one.kind !== "evaluation" ? smoothed(one.v, view.smooth) : one.v;
        return {...one, x: placed(one.run, one.s), y: smooth, raw: smooth !== one.v ? one.v : null, colour: this.colour(one)};
      });
    }
    scale(lines, width, height) {
      const xs = lines.flatMap(one => one.x.length ? [one.x[0], one.x[one.x.length - 1]] : []);
      let [x0, x1] = view.zoom ?? [Math.min(...xs, view.x === "step" && !xs.length ? 0 : Infinity), Math.max(...xs, -Infinity)];
      if (!view.zoom && x0 > 0 && x0 < x1 / 20) x0 = 0;
      if (!(x1 > x0)) { x0 = isFinite(x0) ? x0 - 0.5 : 0; x1 = x0 + 1; }
      const inside = (one, values) => values.filter((v, i) => v !== null && one.x[i] >= x0 && one.x[i] <= x1);
      const firm = lines.flatMap(one => inside(one, one.y));
      const loose = lines.flatMap(one => [one.raw, one.lo, one.hi].filter(Boolean).flatMap(values => inside(one, values))).sort((a, b) => a - b);
      const isLog = this.isLog() && firm.some(v => v > 0);
      const all = (loose.length ? [...firm, quantile(loose, 0.01), quantile(loose, 0.99)] : firm).filter(v => !isLog || v > 0);
      let y0 = all.reduce((a, b) => Math.min(a, b), Infinity), y1 = all.reduce((a, b) => Math.max(a, b), -Infinity);
      if (!all.length) { y0 = 0; y1 = 1; }
      const most = firm.length > 20 ? quantile([...firm].sort((a, b) => a - b), 0.97) : y1;
      if (!isLog && y1 - y0 > 2.5 * (most - y0)) y1 = most + 0.5 * (most - y0);  // a steep start is cut off, not the rest flattened
      const zero = !isLog && this.id !== "loss" && y0 >= 0 && y0 < 0.35 * y1;
      if (isLog) { const room = (y1 / y0) ** 0.06 || 1; y0 /= Math.max(room, 1.02); y1 *= Math.max(room, 1.02); }
      else {
        const room = 0.06 * (y1 - y0) || 0.05 * Math.abs(y1) || 1;
        y0 = zero ? 0 : y0 - room; y1 += room;
      }
      const on = isLog ? v => Math.log(Math.max(v, 1e-300)) : v => v;
      const a = on(y0), b = on(y1);
      return {
        x0, x1, y0, y1, isLog,
        x: v => PAD.left + (v - x0) / (x1 - x0) * (width - PAD.left - PAD.right),
        y: v => height - PAD.bottom - (on(v) - a) / (b - a) * (height - PAD.top - PAD.bottom),
        back: pixel => x0 + (pixel - PAD.left) / (width - PAD.left - PAD.right) * (x1 - x0),
      };
    }
    draw() {
      const width = Math.max(this.plot.clientWidth, 120), height = Math.max(this.plot.clientHeight, 80);
      const lines = this.lines(), scale = this.scale(lines, width, height);
      this.button.setAttribute("aria-pressed", scale.isLog);
      const svg = document.createElementNS(NS, "svg"), clip = `clip-${charts.indexOf(this)}`;
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.setAttribute("role", "img");
      svg.setAttribute("aria-label", `${this.about.title}: ${lines.map(one => `${data.labels[one.run]} ${one.kind} ends at ${shown(one.v.findLast(v => v !== null), this.about.unit)}`).join("; ")}`);
      element(element(svg, "clipPath", {id: clip}), "rect", {x: PAD.left, y: PAD.top - 4, width: width - PAD.left - PAD.right + 4, height: height - PAD.top - PAD.bottom + 5});
      this.grid(svg, scale, width, height);
      const inner = element(svg, "g", {"clip-path": `url(#${clip})`});
      for (const one of lines) this.line(inner, one, scale);
      this.marks(inner, scale, height);
      this.cross = element(svg, "line", {class: "cross", y1: PAD.top, y2: height - PAD.bottom});
      this.band = element(svg, "rect", {class: "zoom", y: PAD.top, height: height - PAD.top - PAD.bottom, width: 0});
      Object.assign(this, {lines_: lines, scale_: scale});
      this.plot.replaceChildren(svg);
    }
    grid(svg, scale, width, height) {
      const bottom = height - PAD.bottom;
      const ys = scale.isLog ? logTicks(scale.y0, scale.y1) : ticks(scale.y0, scale.y1, Math.max(height / 45, 3), []);
      for (const v of ys) {
        const y = scale.y(v);
        element(svg, "line", {class: "grid", x1: PAD.left, x2: width - PAD.right, y1: y, y2: y});
        element(svg, "text", {x: PAD.left - 7, y: y + 3.5, "text-anchor": "end"}).textContent = brief(v, scale.isLog ? v : ys.length > 1 ? ys[1] - ys[0] : v / 100);
      }
      const xs = ticks(scale.x0, scale.x1, Math.max(width / 85, 2), view.x === "time" ? SECONDS : []).filter(v => view.x !== "step" || Number.isInteger(v));
      element(svg, "line", {class: "edge", x1: PAD.left, x2: width - PAD.right, y1: bottom, y2: bottom});
      for (const v of xs) {
        const x = scale.x(v), anchor = x > width - 30 ? "end" : "middle";
        element(svg, "text", {class: "along", x, y: height - 6, "text-anchor": anchor}).textContent = along(v, xs[1] - xs[0]);
      }
    }
    path(xs, ys, scale) {
      let path = "", pen = false;
      ys.forEach((v, i) => {
        if (v === null || (scale.isLog && v <= 0)) { pen = false; return; }
        path += `${pen ? "L" : "M"}${scale.x(xs[i]).toFixed(1)} ${scale.y(v).toFixed(1)}`;
        pen = true;
      });
      return path;
    }
    line(group, one, scale) {
      if (one.lo) {  // the span of each part, there and back
        const known = one.lo.map((v, i) => i).filter(i => one.lo[i] !== null && !(scale.isLog && one.lo[i] <= 0));
        const side = (values, order) => order.map(i => `${scale.x(one.x[i]).toFixed(1)} ${scale.y(values[i]).toFixed(1)}`).join("L");
        if (known.length > 1) element(group, "path", {class: `band ${one.colour}`, d: `M${side(one.hi, known)}L${side(one.lo, [...known].reverse())}Z`});
      }
      if (one.raw) element(group, "path", {class: `line raw ${one.colour}`, d: this.path(one.x, one.raw, scale)});
      element(group, "path", {class: `line ${one.kind} ${one.colour}`, d: this.path(one.x, one.y, scale)});
      const alone = (v, i) => v !== null && (i === 0 || one.y[i - 1] === null) && (i === one.y.length - 1 || one.y[i + 1] === null);
      const dots = one.y.length <= 80 && (one.kind === "evaluation" || one.y.length <= 24);
      one.y.forEach((v, i) => {
        if (v !== null && !(scale.isLog && v <= 0) && (dots || alone(v, i))) element(group, "circle", {class: one.colour, r: 2.4, cx: scale.x(one.x[i]), cy: scale.y(v)});
      });
    }
    marks(group, scale, height) {
      data.axes.forEach((axis, run) => {
        if (view.hidden.has(run)) return;
        for (const x of placed(run, axis.resumed)) element(group, "line", {class: "resume", x1: scale.x(x), x2: scale.x(x), y1: PAD.top, y2: height - PAD.bottom});
        if (this.id !== "loss" && this.id !== "norm") return;
        const foot = height - PAD.bottom - 6;
        for (const x of placed(run, axis.lost)) element(group, "path", {class: `lost c${run % 9}`, d: `M${scale.x(x) - 3} ${foot - 3}l6 6m-6 0l6 -6`});
      });
    }
    // ---- pointer ----
    at(event) {
      const box = this.plot.getBoundingClientRect();
      return Math.min(Math.max(event.clientX - box.left, PAD.left), box.width - PAD.right);
    }
    press(event) {
      if (event.pointerType !== "mouse" || event.button !== 0) return;
      this.from = this.at(event);
      this.plot.setPointerCapture(event.pointerId);
    }
    release(event) {
      const from = this.from, to = this.at(event);
      this.from = undefined;
      this.band?.setAttribute("width", 0);
      if (from !== undefined && Math.abs(to - from) > 8) zoom([from, to].sort((a, b) => a - b).map(this.scale_.back));
    }
    move(event) {
      if (!this.scale_) return;
      const pixel = this.at(event), x = this.scale_.back(pixel);
      if (this.from !== undefined) {
        this.band.setAttribute("x", Math.min(this.from, pixel));
        this.band.setAttribute("width", Math.abs(pixel - this.from));
      }
      cross(x);
      const rows = [];
      for (const one of this.lines_) {
        if (!one.x.length) continue;
        const i = nearest(one.x, x), name = [data.axes.length > 1 || !one.kind ? data.labels[one.run] : "", one.kind].filter(Boolean).join(" ");
        const span = one.lo && one.lo[i] !== null && one.lo[i] !== one.hi[i] ? ` (${shown(one.lo[i])} to ${shown(one.hi[i])})` : "";
        rows.push([one.colour, name, shown(one.v[i], this.about.unit) + span, one.s[i]]);
      }
      if (!rows.length) { tip.hidden = true; return; }
      const head = document.createElement("p"), steps = new Set(rows.map(row => row[3]));
      head.textContent = (steps.size === 1 ? `step ${rows[0][3].toLocaleString("en")}` : `near step ${rows[0][3].toLocaleString("en")}`) + (view.x === "step" ? "" : `, ${view.x} ${along(x, 0)}`);
      tip.replaceChildren(head, ...rows.map(([colour, name, value]) => {
        const row = document.createElement("div"), mark = document.createElement("i"), text = document.createElement("bdi"), number = document.createElement("b");
        mark.className = `swatch ${colour}`;
        text.textContent = name;
        number.textContent = value;
        row.append(mark, text, number);
        return row;
      }));
      tip.hidden = false;
      const side = event.clientX > innerWidth / 2 ? event.pageX - tip.offsetWidth - 14 : event.pageX + 14;
      tip.style.left = `${Math.max(side, 4)}px`;
      tip.style.top = `${event.pageY + 14}px`;
    }
  }

  // ---- all charts ----
  function cross(x) {
    for (const {cross: line, scale_: scale} of charts) {
      if (!line) continue;
      const there = x !== null && x >= scale.x0 && x <= scale.x1;
      line.style.visibility = there ? "visible" : "hidden";
      if (there) for (const end of ["x1", "x2"]) line.setAttribute(end, scale.x(x));
    }
  }
  function zoom(range) { view.zoom = range; drawAll(); }
  function drawAll() {
    document.querySelector("button[name=whole]").hidden = !view.zoom;
    for (const chart of charts) {
      chart.figure.hidden = !chart.about.title.toLowerCase().includes(view.find);
      if (!chart.figure.hidden) chart.draw();
    }
  }
  function tools() {
    const form = document.getElementById("tools");
    const put = (name, value) => { for (const one of form.elements) if (one.name === name) value(one); };
    put("x", one => { one.checked = one.value === view.x; });
    put("smooth", one => { one.value = 100 * view.smooth; });
    put("run", one => { one.checked = !view.hidden.has(+one.value); });
    put("find", one => { one.value = view.find; });
    put("whole", one => { one.onclick = () => zoom(null); });
    form.onsubmit = event => event.preventDefault();
    form.oninput = event => {
      const {name, value, checked} = event.target;
      if (name === "x") { view.x = value; view.zoom = null; }
      if (name === "smooth") view.smooth = value / 100;
      if (name === "find") view.find = value.trim().toLowerCase();
      if (name === "run") view.hidden[checked ? "delete" : "add"](+value);
      drawAll();
    };
  }
  function start() {
    data = JSON.parse(document.getElementById("data").textContent);
    const byId = new Map(data.charts.map(one => [one.id, one]));
    charts = [...document.querySelectorAll("figure.chart")].map(figure => new Chart(figure, byId.get(figure.dataset.chart)));
    tools();
    drawAll();
    document.documentElement.dataset.drawn = charts.length;
  }
  document.documentElement.classList.add("js");
  start();
  let width = innerWidth, opened = [];
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });
  addEventListener("beforeprint", () => { opened = [...document.querySelectorAll("details:not([open]):not(#defaults)")]; for (const one of opened) one.open = true; });
  addEventListener("afterprint", () => { for (const one of opened) one.open = false; });

  // ---- a report that is served while training goes on ----
  const every = +document.documentElement.dataset.watch;
  let tag = "";
  async function refresh() {
    try {
      const answer = document.hidden ? null : await fetch(location.pathname, {headers: tag ? {"If-None-Match": tag} : {}});
      if (answer && answer.status === 200) {
        tag = answer.headers.get("ETag") ?? "";
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
        const open = [...document.querySelectorAll("details[open]")].map(one => one.id);
        for (const one of fresh.querySelectorAll("details")) one.open = one.id !== "" && open.includes(one.id);
        document.querySelector("main").replaceWith(document.adoptNode(fresh));
        tip.hidden = true;
        start();
      }
      document.documentElement.dataset.lost = "";
    } catch { document.documentElement.dataset.lost = "yes"; }
    setTimeout(refresh, every);
  }
  if (every) setTimeout(refresh, every);
})();

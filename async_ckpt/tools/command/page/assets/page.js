// Draws the pictures of the page by uPlot, and makes the tables behind them.
// Texts of a run become text nodes only, so nothing in a name or a record is markup.
"use strict";
(() => {
  const MARKS = {
    dot: (c, x, y, r) => c.arc(x, y, r * 0.6, 0, 7),
    ring: (c, x, y, r) => c.arc(x, y, r * 1.3, 0, 7),
    cross: (c, x, y, r) => { c.moveTo(x - r, y - r); c.lineTo(x + r, y + r); c.moveTo(x - r, y + r); c.lineTo(x + r, y - r); },
    triangle: (c, x, y, r) => { c.moveTo(x, y - r); c.lineTo(x + r, y + r); c.lineTo(x - r, y + r); c.closePath(); },
    diamond: (c, x, y, r) => { c.moveTo(x, y - r); c.lineTo(x + r, y); c.lineTo(x, y + r); c.lineTo(x - r, y); c.closePath(); },
  };
  const FULL = new Set(["dot", "triangle", "diamond"]);
  const GLYPHS = { line: "—", dashes: "┄", area: "■", hollow: "□", span: "▬", dot: "●", ring: "○", cross: "✕", triangle: "▲", diamond: "◆" };
  const RANGES = [20, 100, 1000];
  const FIRST_ROWS = 100;
  // The distances of ticks between steps, which are whole numbers.
  const WHOLE = Array.from({ length: 16 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
  const charts = [];

  // --- values as texts ---------------------------------------------------------------------------------------------

  const grouped = new Intl.NumberFormat("en");
  const sized = (bytes) => {
    for (const [unit, factor, digits] of [["GB", 1e9, 2], ["MB", 1e6, 1], ["kB", 1e3, 1]])
      if (Math.abs(bytes) >= 0.99995 * factor) return `${(bytes / factor).toFixed(digits)} ${unit}`;
    return `${Math.round(bytes)} bytes`;
  };
  const inSeconds = (seconds) => {
    if (seconds >= 1) return `${seconds.toFixed(2)} s`;
    return seconds >= 1e-4 ? `${(seconds * 1e3).toFixed(1)} ms` : `${Math.round(seconds * 1e6)} µs`;
  };
  const few = (value) => `${+value.toPrecision(5)}`;
  const TEXTS = {
    text: (value) => value,
    number: few,
    count: (value) => grouped.format(value),
    step: (value) => grouped.format(value),
    time: (value) => `${new Date(value).toISOString().slice(0, 19).replace("T", " ")} UTC`,
    seconds: inSeconds,
    bytes: sized,
    rate: (value) => `${sized(value)}/s`,
  };
  const short = (value, factor, unit) => `${+(value / factor).toPrecision(3)} ${unit}`;
  const shortBytes = (bytes) => {
    for (const [unit, factor] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
      if (Math.abs(bytes) >= factor) return short(bytes, factor, unit);
    return bytes ? `${bytes} B` : "0";
  };
  // The same for the ticks of an axis, which have little room.
  const TICKS = {
    number: few,
    step: (value) => grouped.format(value),
    seconds: (value) => (value >= 1 ? short(value, 1, "s") : value >= 1e-3 ? short(value, 1e-3, "ms") : value ? short(value, 1e-6, "µs") : "0"),
    bytes: shortBytes,
    rate: (value) => (value ? `${shortBytes(value)}/s` : "0"),
  };
  const DAY = 86_400_000;
  const times = (splits, distance) => {
    const texts = splits.map((time) => new Date(time).toISOString()), days = texts.map((text) => text.slice(0, 10));
    if (distance >= DAY) return days;
    const digits = distance < 60_000 ? 19 : 16;
    return texts.map((text, at) => text.slice(11, digits) + (days[at] === days[at - 1] ? "" : `\n${days[at]}`));
  };
  const shown = (column, row) => {
    const value = column.values[row];
    return value === null || value === undefined ? "" : TEXTS[column.unit](value);
  };

  // --- elements ----------------------------------------------------------------------------------------------------

  const element = (name, text, attributes = {}) => {
    const made = document.createElement(name);
    if (text) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const colourOf = (series) => series.colour || `series${series.number % 8}`;
  const font = (size) => `${size}px system-ui, sans-serif`;

  // --- rows: what a picture draws, and its table shows -------------------------------------------------------------

  // The column that a series is of, and thereby the unit of its picture.
  const columnOf = (picture, series, runs) => runs[picture.run ?? series.run].columns[series.column];

  // The rows of a picture of one run, in the order of x: where they are in the columns, x, and each line's values. By
  // steps, they are the saves, and the last one of a step that was saved again.
  const rowsOfRun = (picture, run) => {
    const x = run.columns[picture.x]?.values ?? [];
    const rows = picture.x === "time" ? [...x.keys()] : [...new Map(run.saves.map((row) => [x[row], row])).values()];
    const lines = picture.series.map((series) => {
      if (series.level !== undefined) return x.map(() => series.level);
      const values = run.columns[series.column].values;
      if (!series.rows) return values;
      const only = new Array(x.length).fill(null);
      for (const row of series.rows) only[row] = values[row];
      return only;
    });
    const measured = lines.filter((_, at) => picture.series[at].level === undefined);
    const has = (row) => x[row] != null && measured.some((values) => values[row] != null);
    const order = rows.filter(has).sort((a, b) => x[a] - x[b]);
    const inOrder = lines.map((values) => order.map((row) => values[row] ?? null));
    return { order, data: [order.map((row) => x[row]), ...inOrder] };
  };

  // The same for lines of several runs, on the steps of all.
  const rowsOfRuns = (picture, runs) => {
    const tables = picture.series.map((series) => rowsOfRun({ ...picture, series: [series] }, runs[series.run]).data);
    return { data: uPlot.join(tables) };
  };

  const stacked = ([x, ...lines]) => {
    const sums = x.map(() => 0);
    return [x, ...lines.map((values) => values.map((value, at) => (sums[at] += value || 0)))];
  };

  // The columns of a table as pairs of a title and a function from the number of a row to its text.
  const columnsOf = (picture, rows, runs) => {
    if (rows.order) {
      const { columns } = runs[picture.run];
      return picture.table.filter((name) => columns[name]).map((name) => {
        const column = columns[name];
        return { title: column.title, unit: column.unit, text: (at) => shown(column, rows.order[at]) };
      });
    }
    const { unit } = columnOf(picture, picture.series[0], runs);
    const values = picture.series.map((series, line) => ({
      title: series.label,
      unit,
      text: (at) => (rows.data[line + 1][at] == null ? "" : TEXTS[unit](rows.data[line + 1][at])),
    }));
    return [{ title: "step", unit: "step", text: (at) => TEXTS.step(rows.data[0][at]) }, ...values];
  };

  // --- tables ------------------------------------------------------------------------------------------------------

  const addTable = (details, title, columns, count) => {
    const table = element("table");
    const body = element("tbody");
    const align = ({ unit }) => (unit === "text" ? { class: "long" } : unit === "time" ? {} : { class: "figure" });
    const head = element("tr");
    for (const column of columns) head.append(element("th", column.title, { scope: "col", ...align(column) }));
    table.append(element("thead"), body);
    table.tHead.append(head);
    const add = (from, to) => {
      for (let at = from; at > to; at--) {
        const row = element("tr");
        for (const column of columns) row.append(element("td", column.text(at), align(column)));
        body.append(row);
      }
    };
    const rest = Math.max(0, count - FIRST_ROWS);
    add(count - 1, rest - 1);
    const scroll = element("div", "", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Table: ${title}` });
    scroll.append(table);
    details.append(scroll);
    if (!rest) return;
    const more = element("button", `Show all ${grouped.format(count)} rows`, { type: "button" });
    more.addEventListener("click", () => { add(rest - 1, -1); more.remove(); scroll.focus(); });
    details.append(more);
  };

  // --- pictures ----------------------------------------------------------------------------------------------------

  const drawMarks = (plot, series, values) => {
    const { ctx } = plot, [x] = plot.data, { min, max } = plot.scales.x;
    const radius = 4.5 * uPlot.pxRatio, isFull = FULL.has(series.look);
    let before = [-1, -1];
    ctx.beginPath();
    for (let at = 0; at < x.length; at++) {
      if (values[at] == null || x[at] < min || x[at] > max) continue;
      const left = plot.valToPos(x[at], "x", true), top = plot.valToPos(values[at], "y", true);
      if (Math.abs(left - before[0]) + Math.abs(top - before[1]) < 0.5) continue; // it is behind the one before
      before = [left, top];
      ctx.moveTo(left + (series.look === "ring" ? radius * 1.3 : 0), top);
      MARKS[series.look](ctx, left, top, radius);
    }
    ctx.lineWidth = 2 * uPlot.pxRatio;
    ctx.strokeStyle = ctx.fillStyle = colour(colourOf(series));
    if (isFull) ctx.fill();
    else ctx.stroke();
  };

  // The parts of a save, as times: staging and writing overlap, so each has a line of its own.
  const partOf = (label, columns, row) => {
    const spent = (name) => 1e3 * (columns[name]?.values[row] ?? 0);
    const end = columns.time.values[row], begin = end - spent("total_seconds"), durable = end - spent("commit_seconds");
    return {
      call: [begin, begin + spent("call_seconds")],
      stage: [begin, begin + spent("stage_seconds")],
      write: [begin, durable],
      commit: [durable, end],
    }[label];
  };
  const PARTS = ["call", "stage", "write", "commit"];

  const drawSpans = (plot, series, values, rows, columns) => {
    const { ctx } = plot, offset = (PARTS.indexOf(series.label) - 1.5) * 4 * uPlot.pxRatio;
    const last = rows.order.length, { min, max } = plot.scales.x;
    ctx.fillStyle = colour(colourOf(series));
    for (let at = 0; at < last; at++) {
      if (values[at] == null) continue;
      const [begin, end] = partOf(series.label, columns, rows.order[at]);
      if (end < min || begin > max) continue;
      const left = plot.valToPos(begin, "x", true), right = plot.valToPos(end, "x", true);
      if (right - left < 2) continue;
      ctx.fillRect(left, plot.valToPos(values[at], "y", true) + offset, right - left, 3 * uPlot.pxRatio);
    }
  };

  const drawLanes = (plot, picture) => {
    const { ctx } = plot, height = 12 * uPlot.pxRatio;
    ctx.strokeStyle = ctx.fillStyle = colour("write");
    ctx.lineWidth = uPlot.pxRatio;
    picture.lanes.forEach((lane, number) => {
      const top = plot.valToPos(-number, "y", true) - height / 2;
      for (const [first, last, lender] of lane.spans) {
        const left = plot.valToPos(first, "x", true) - 2 * uPlot.pxRatio;
        const width = plot.valToPos(last, "x", true) + 2 * uPlot.pxRatio - left;
        if (lender == null) ctx.fillRect(left, top, width, height);
        else ctx.strokeRect(left, top, width, height);
      }
    });
  };

  const drawOver = (picture, rows, runs) => (plot) => {
    const { left, top, width, height } = plot.bbox;
    const edge = 8 * uPlot.pxRatio;
    plot.ctx.save();
    plot.ctx.beginPath();
    plot.ctx.rect(left - edge, top - edge, width + 2 * edge, height + 2 * edge);
    plot.ctx.clip();
    if (picture.lanes) drawLanes(plot, picture);
    else
      picture.series.forEach((series, line) => {
        const values = rows.data[line + 1];
        if (series.look === "span") drawSpans(plot, series, values, rows, runs[picture.run].columns);
        else if (series.look in MARKS) drawMarks(plot, series, values);
      });
    plot.ctx.restore();
  };

  // The area of values that belong to saves: a block for each, as wide as there is room between its neighbours. Of
  // several in one pixel, the highest is seen.
  const drawBlocks = (plot, line, from, to) => {
    const fill = new Path2D(), [x] = plot.data, values = plot.data[line], bottom = plot.valToPos(0, "y", true);
    const place = (at) => plot.valToPos(x[at], "x", true), alone = 24 * uPlot.pxRatio;
    let here = place(from), before = from > 0 ? here - place(from - 1) : undefined, right, highest = bottom;
    for (let at = from; at <= to; at++) {
      const next = at + 1 < x.length ? place(at + 1) : undefined, after = next && next - here;
      const left = right ?? Math.round(here - (before ?? after ?? alone) / 2);
      if (at === from) fill.moveTo(left, bottom);
      right = Math.round(here + (after ?? before ?? alone) / 2);
      highest = Math.min(highest, plot.valToPos(values[at] ?? 0, "y", true));
      if (right > left) {
        fill.lineTo(left, highest);
        fill.lineTo(right, highest);
        highest = bottom;
      }
      [here, before] = [next, after];
    }
    fill.lineTo(right, bottom);
    fill.closePath();
    return { fill };
  };
  const drawSteps = uPlot.paths.stepped({ align: 1 });

  const lineOf = (series, picture, isOpaque) => {
    const stroke = () => colour(colourOf(series));
    const made = { stroke, width: 1.5, points: series.level === undefined ? { size: 5, fill: stroke } : { show: false } };
    if (series.look === "area") {
      const paths = picture.x === "time" ? drawSteps : drawBlocks;
      Object.assign(made, { fill: () => `${stroke()}${isOpaque ? "" : "40"}`, paths, points: { show: false } });
    }
    if (series.look === "dashes") made.dash = [5, 4];
    if (series.look in MARKS || series.look === "span") Object.assign(made, { paths: () => null, points: { show: false } });
    // Runs are also told apart by their dashes where the colours begin again.
    if (series.number >= 8) made.dash = [2 + Math.floor(series.number / 8) * 3, 3];
    return made;
  };

  const optionsOf = (picture, unit, rows, runs, width) => {
    const isNarrow = width < 500, isTime = picture.x === "time";
    const areas = picture.series.filter(({ look }) => look === "area").length;
    const axis = { stroke: () => colour("quiet"), font: font(12), grid: { stroke: () => colour("rule"), width: 1 }, ticks: { show: false } };
    const dated = { values: (_, splits, __, ___, distance) => times(splits, distance), size: 46 };
    const stepped = { values: (_, splits) => splits.map(TICKS.step), incrs: WHOLE, size: 30 };
    const around = (min, max, least) => (min === max ? [min - least, max + least] : [min, max]);
    const names = (picture.lanes || []).map(({ name }) => (name.length > 14 ? `${name.slice(0, 13)}…` : name));
    const y = picture.lanes
      ? { ...axis, size: 100, splits: () => names.map((_, at) => -at), values: () => names, grid: { show: false } }
      : { ...axis, size: 72, values: (_, splits) => splits.map(TICKS[unit]), space: 40, ...(unit === "step" ? { incrs: WHOLE } : {}) };
    const fromZero = unit !== "step" && unit !== "number";
    const range = (_, min, max) => {
      if (picture.lanes) return [0.5 - names.length, 0.5];
      if (min == null) return [0, 1];
      return fromZero ? [0, max * 1.08 || 1] : uPlot.rangeNum(min, max, 0.08, true);
    };
    const lines = picture.series.map((series) => lineOf(series, picture, picture.stacked || areas > 1));
    if (picture.lanes) lines.forEach((line) => Object.assign(line, { paths: () => null, points: { show: false } }));
    return {
      width,
      height: picture.lanes ? 46 + 26 * names.length : picture.name === "timeline" ? 300 : isNarrow ? 190 : 230,
      padding: [10, 22, 0, 0],
      legend: { show: false },
      ms: 1,
      tzDate: (time) => uPlot.tzDate(new Date(time), "Etc/UTC"),
      cursor: { y: false, drag: { setScale: false }, points: { size: 8 } },
      scales: { x: { time: isTime, range: (_, min, max) => (min == null ? [0, 1] : around(min, max, isTime ? 60_000 : 1)) }, y: { range } },
      axes: [{ ...axis, ...(isTime ? dated : stepped), space: isNarrow ? 80 : 100 }, y],
      series: [{}, ...(picture.stacked ? lines.reverse() : lines)],
      hooks: { draw: [drawOver(picture, rows, runs)] },
    };
  };

  const addKey = (figure, picture) => {
    const key = element("ul", "", { class: "key", "aria-label": "Key" });
    for (const series of picture.series) {
      const item = element("li");
      const glyph = element("i", GLYPHS[series.look], { "aria-hidden": "true" });
      glyph.style.color = `var(--${colourOf(series)})`;
      item.append(glyph, series.label);
      key.append(item);
    }
    figure.querySelector(".chart").before(key);
  };

  const addPicture = (figure, picture, runs) => {
    const rows = picture.run === undefined ? rowsOfRuns(picture, runs) : rowsOfRun(picture, runs[picture.run]);
    const [x] = rows.data, columns = columnsOf(picture, rows, runs);
    const { unit } = columnOf(picture, picture.series[0], runs);
    const place = figure.querySelector(".chart"), title = figure.querySelector("figcaption :first-child").textContent;
    addKey(figure, picture);
    const readout = element("p", "", { class: "readout" });
    place.after(readout);
    const data = picture.stacked ? stacked(rows.data) : rows.data;
    if (picture.stacked) data.splice(1, data.length, ...data.slice(1).reverse());
    const plot = new uPlot(optionsOf(picture, unit, rows, runs, place.clientWidth), data, place);
    const chart = { plot, picture, rows, at: x.length - 1 };
    charts.push(chart);

    const tell = (at) => {
      chart.at = at;
      const said = columns.map((column) => [column.title, column.text(at)]).filter(([, text]) => text);
      readout.replaceChildren(...said.map(([name, text]) => {
        const part = element("span");
        part.append(element("b", name), text);
        return part;
      }));
      place.setAttribute("aria-valuenow", at);
      place.setAttribute("aria-valuetext", said.map((one) => one.join(" ")).join(", "));
    };
    const attributes = { tabindex: 0, role: "slider", "aria-label": `${title}, save by save`, "aria-valuemin": 0, "aria-valuemax": x.length - 1 };
    for (const [key, value] of Object.entries(attributes)) place.setAttribute(key, value);
    tell(x.length - 1);
    plot.hooks.setCursor = [() => { if (plot.cursor.idx != null && plot.cursor.left >= 0) tell(plot.cursor.idx); }];
    plot.hooks.setSelect = [() => {
      const { left, width } = plot.select;
      if (width > 3) zoom(chart, plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
      plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    }];
    plot.over.addEventListener("dblclick", () => showAll(picture.run));
    place.addEventListener("keydown", (event) => onKey(event, chart, tell));
    new ResizeObserver(() => {
      if (place.clientWidth) plot.setSize({ width: place.clientWidth, height: plot.height });
    }).observe(place);
    figure.querySelector("details").addEventListener("toggle", ({ target }) => {
      if (target.open && target.childElementCount === 1) addTable(target, title, columns, x.length);
    });
  };

  // --- what is looked at -------------------------------------------------------------------------------------------

  const setRange = ({ plot, rows }, from, to) => {
    const [x] = rows.data;
    if (to > from) plot.setScale("x", { min: from, max: to });
    else if (from === undefined) plot.setScale("x", { min: x[0], max: x[x.length - 1] });
  };

  // Show in all pictures of a run the rows that one of them was zoomed to.
  const zoom = (chart, from, to) => {
    setRange(chart, from, to);
    const { picture, rows } = chart, [x] = rows.data;
    const others = charts.filter((other) => other !== chart && other.picture.run === picture.run);
    if (picture.run === undefined) return others.forEach((other) => setRange(other, from, to));
    const inside = new Set(rows.order.filter((_, at) => x[at] >= from && x[at] <= to));
    return others.forEach((other) => showRows(other, inside));
  };
  const showRows = (chart, chosen) => {
    const x = chart.rows.data[0].filter((_, at) => chosen.has(chart.rows.order[at]));
    if (x.length > 1) setRange(chart, x[0], x[x.length - 1]);
  };
  const showAll = (run) => charts.filter(({ picture }) => picture.run === run).forEach((chart) => setRange(chart));

  const onKey = (event, chart, tell) => {
    const { plot, rows } = chart, [x] = rows.data, last = x.length - 1, { min, max } = plot.scales.x;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -last, End: last };
    const middle = x[chart.at], half = (max - min) / 2;
    if (event.key in moves) {
      const at = Math.min(last, Math.max(0, chart.at + moves[event.key]));
      if (x[at] < min || x[at] > max) plot.setScale("x", { min: x[at] - half, max: x[at] + half });
      plot.setCursor({ left: plot.valToPos(x[at], "x"), top: 0 }, false);
      tell(at);
    } else if (event.key === "+" || event.key === "=") zoom(chart, middle - half / 2, middle + half / 2);
    else if (event.key === "-") zoom(chart, middle - half * 2, middle + half * 2);
    else if (event.key === "Escape") showAll(chart.picture.run);
    else return;
    event.preventDefault();
  };

  const addRanges = (place, runs) => {
    const number = Number(place.dataset.run), { saves } = runs[number];
    const choices = RANGES.filter((count) => count < saves.length);
    if (!choices.length) return;
    const group = element("fieldset");
    group.append(element("legend", "Saves shown"));
    for (const count of [...choices, undefined]) {
      const input = element("input", "", { type: "radio", name: `range${number}` });
      input.checked = count === undefined;
      input.addEventListener("change", () => {
        if (count === undefined) return showAll(number);
        const rows = new Set(saves.slice(-count));
        return charts.filter(({ picture }) => picture.run === number).forEach((chart) => showRows(chart, rows));
      });
      const label = element("label");
      label.append(input, count === undefined ? " all" : ` last ${grouped.format(count)}`);
      group.append(label);
    }
    place.append(group);
  };

  // --- the page ----------------------------------------------------------------------------------------------------

  const LONGEST_TASK_MS = 200;

  const unpacked = async () => {
    const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (one) => one.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const content = await new Response(stream).json();
    for (const { columns } of content.runs)
      for (const column of Object.values(columns)) {
        let sum = 0;
        column.values ??= column.differences.map((one) => (one === null ? null : (sum += one)));
      }
    return content;
  };

  const draw = async () => {
    const { runs, pictures } = await unpacked();
    for (const place of document.querySelectorAll(".range")) addRanges(place, runs);
    let begun = performance.now();
    for (const [number, picture] of pictures.entries()) {
      addPicture(document.getElementById(`picture${number}`), picture, runs);
      if (performance.now() - begun < LONGEST_TASK_MS) continue;
      await new Promise((resolve) => setTimeout(resolve)); // the page answers between pictures of many saves
      begun = performance.now();
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach(({ plot }) => plot.redraw()));
    document.documentElement.dataset.drawn = Math.round(performance.now());
  };

  // The page has loaded, and is printed or photographed, once the pictures are there: a frame that is still being written
  // holds its load event, which waits for no promise.
  const held = element("iframe", "", { hidden: "" });
  document.body.append(held);
  held.contentDocument.open();

  draw().catch((error) => {
    const text = `The pictures cannot be drawn: ${error.message || error}. A browser of 2023 or later can draw them.`;
    document.querySelector("main").prepend(element("p", text, { class: "error", role: "alert" }));
  }).finally(() => { held.contentDocument.close(); held.remove(); });
})();

"use strict";
// Makes the page that is there already sort, filter and explain itself. Text from the records is
// only ever set as text; no markup is made from it.
(() => {
  const one = (selector, root = document) => root.querySelector(selector);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (name, content, attributes = {}) => {
    const node = document.createElement(name);
    if (content !== undefined) node.append(content);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };
  const isolated = (text) => make("bdi", text);
  const compare = new Intl.Collator("en", { numeric: true, sensitivity: "base" }).compare;
  const CHUNK = 100;
  const wanted = { text: "", model: "", scheme: "", task: "", flips: false };

  // Last in either direction: what has no finite number, and empty text.
  const order = (one, other, sign) => {
    const numbers = typeof one === "number" || typeof other === "number";
    const empty = (value) => value === null || value === "";
    if (empty(one) || empty(other)) return empty(one) - empty(other);
    if (numbers) return sign * (one - other);
    return sign * compare(one, other);
  };

  // A table whose rows are sorted and filtered; `rows` know their keys and make their elements.
  class Sheet {
    constructor(table, rows, chunk) {
      this.table = table;
      this.body = table.tBodies[0];
      this.rows = rows;
      this.shown = rows;
      this.chunk = chunk;
      this.limit = chunk;
      this.sorted = null;
      this.sign = 1;
      this.headers = all("th[data-sort]", table.tHead);
      this.headers.forEach((header, at) => this.makeSortable(header, at));
      this.more = make("button", "Show more rows", { type: "button", class: "more" });
      this.more.hidden = true;
      this.more.addEventListener("click", () => {
        this.limit += this.chunk * 5;
        this.draw();
      });
      table.parentElement.after(this.more);
    }
    makeSortable(header, at) {
      const button = make("button", undefined, { type: "button", class: "sort" });
      const notes = one("sup", header);
      button.append(...[...header.childNodes].filter((node) => node !== notes));
      header.prepend(button);
      button.addEventListener("click", () => this.sort(at));
    }
    sort(at) {
      this.sign = this.sorted === at ? -this.sign : 1;
      this.sorted = at;
      this.headers.forEach((header, place) => {
        if (place !== at) header.removeAttribute("aria-sort");
        else header.setAttribute("aria-sort", this.sign > 0 ? "ascending" : "descending");
      });
      this.rows = this.rows
        .map((row) => [row.key(at), row])
        .sort((left, right) => order(left[0], right[0], this.sign) || left[1].at - right[1].at)
        .map((pair) => pair[1]);
      this.table.classList.add("resorted");
      all(".again, tr.start", this.body).forEach((node) => node.classList.remove("again", "start"));
      this.filter();
    }
    filter() {
      this.shown = this.rows.filter((row) => row.fits(wanted));
      this.limit = this.chunk;
      this.draw();
      return this.shown.length;
    }
    draw() {
      const rows = this.shown.slice(0, this.limit);
      this.body.replaceChildren(...rows.map((row) => row.element()));
      const left = this.shown.length - rows.length;
      this.more.hidden = left <= 0;
      if (left > 0) this.more.textContent = `Show more rows (${left} left)`;
    }
  }

  const place = (item, keys = ["model", "scheme", "task"]) =>
    keys.every((key) => !wanted[key] || item[key] === undefined || item[key] === wanted[key]);

  class GridRow {
    constructor(row, at) {
      this.row = row;
      this.at = at;
      this.cells = [...row.cells];
      this.text = row.textContent.toLowerCase();
    }
    key(at) {
      const cell = this.cells[at];
      if (cell.tagName === "TH") return cell.textContent;
      return cell.dataset.v === undefined || !Number.isFinite(+cell.dataset.v) ? null : +cell.dataset.v;
    }
    fits(filter) {
      return place(this.row.dataset, ["model", "scheme"]) && this.text.includes(filter.text);
    }
    element() {
      return this.row;
    }
  }

  const data = JSON.parse(one("#records-data").textContent);
  const said = (at) => data.pool[at];

  class RecordRow {
    constructor(values, at, row) {
      [this.texts, this.numbers, this.filters, this.settings, this.metrics, this.warned, this.links] = values;
      this.at = at;
      this.row = row;
      if (row) this.addButton();
    }
    key(at) {
      if (!data.columns[at][1]) return said(this.texts[at]);
      const numbers = data.columns.slice(0, at).filter((column) => column[1]).length;
      return this.numbers[numbers];
    }
    fits(filter) {
      const [model, scheme, task] = this.filters.map(said);
      if (!place({ model, scheme, task })) return false;
      if (!filter.text) return true;
      this.text ??= this.texts.map(said).join(" ").toLowerCase();
      return this.text.includes(filter.text);
    }
    element() {
      if (!this.row) {
        this.row = make("tr");
        this.texts.forEach((text, at) => {
          const [title, isNumber] = data.columns[at];
          const cell = make("td", undefined, isNumber ? { class: "num" } : {});
          if (title === "Status") cell.append(make("span", said(text), { class: `status ${said(text)}` }));
          else cell.append(isNumber ? said(text) : isolated(said(text)));
          if (title === "Note") cell.className = "long";
          this.row.append(cell);
        });
        this.addButton();
      }
      if (!this.open) return this.row;
      const both = document.createDocumentFragment();
      both.append(this.row, this.inside);
      return both;
    }
    addButton() {
      const button = make("button", "Details", { type: "button", "aria-expanded": "false" });
      button.addEventListener("click", () => {
        this.open = !this.open;
        button.setAttribute("aria-expanded", String(this.open));
        if (this.open) this.row.after((this.inside ??= this.explain()));
        else this.inside.remove();
      });
      this.row.prepend(make("td", button, { class: "details-column" }));
    }
    explain() {
      const columns = make("div", undefined, { class: "columns" });
      const part = (title, node) => {
        const box = make("div", make("h4", title));
        box.append(node);
        columns.append(box);
      };
      const facts = make("dl", undefined, { class: "facts" });
      for (const [name, value] of this.settings) {
        const pair = make("div", make("dt", said(name)));
        pair.append(make("dd", isolated(said(value))));
        facts.append(pair);
      }
      part("Settings", facts);
      if (this.metrics.length) {
        const table = make("table");
        const head = table.createTHead().insertRow();
        ["Metric", "Value", "±", "n", "Protocol"].forEach((title, at) =>
          head.append(make("th", title, { scope: "col", class: at > 0 && at < 4 ? "num" : "" })));
        const body = table.createTBody();
        for (const metric of this.metrics) {
          const row = body.insertRow();
          metric.forEach((text, at) =>
            row.append(make("td", isolated(said(text)), at > 0 && at < 4 ? { class: "num" } : {})));
        }
        part("Numbers", make("div", table, { class: "scroll" }));
      }
      if (this.warned.length) {
        const list = make("ul", undefined, { class: "plain" });
        this.warned.forEach((text) => list.append(make("li", isolated(said(text)))));
        part("Warnings", list);
      }
      if (this.links.length) {
        const list = make("ul", undefined, { class: "plain" });
        for (const [label, anchor] of this.links) {
          list.append(make("li", make("a", said(label), { href: `#${said(anchor)}` })));
        }
        part("More", list);
      }
      const cell = make("td", columns, { colspan: data.columns.length + 1 });
      return make("tr", cell, { class: "inside" });
    }
  }

  const grids = all("table.grid").map((table) =>
    new Sheet(table, [...table.tBodies[0].rows].map((row, at) => new GridRow(row, at)), 200));
  const list = one("table.records");
  one("thead tr", list).prepend(make("td", undefined, { class: "details-column" }));
  const rows = [...list.tBodies[0].rows];
  const records = new Sheet(list, data.rows.map((values, at) => new RecordRow(values, at, rows[at])), CHUNK);
  grids.forEach((sheet) => sheet.filter());
  records.draw();

  // --- filters ---

  const questions = all(".question").map((node) => ({ node, text: node.textContent.toLowerCase() }));
  const parts = all(".card, .card [data-task], .card [data-scheme], figure[data-task], details[data-model], figure[data-scheme]")
    .filter((node) => !node.closest(".question"));
  const columns = all("table.grid [data-task]");
  const marks = all("svg [data-scheme], svg [data-model], .key [data-scheme]");
  const controls = one(".controls");

  const apply = () => {
    wanted.text = one("#find").value.trim().toLowerCase();
    for (const key of ["model", "scheme", "task"]) wanted[key] = one(`#${key}`).value;
    wanted.flips = one("#flips").checked;
    grids.forEach((sheet) => sheet.filter());
    const count = records.filter();
    parts.forEach((node) => { node.hidden = !place(node.dataset); });
    columns.forEach((node) => { node.hidden = !place(node.dataset, ["task"]); });
    marks.forEach((node) => node.classList.toggle("off", !place(node.dataset, ["model", "scheme"])));
    questions.forEach(({ node, text }) => {
      node.hidden = !place(node.dataset) || !text.includes(wanted.text)
        || (wanted.flips && node.dataset.flips === undefined);
    });
    all(".question .answer").forEach((node) => {
      node.hidden = Boolean(wanted.scheme) && node.dataset.scheme !== wanted.scheme
        && node !== node.parentElement.firstElementChild;
    });
    one("#count").textContent = `${count} of ${data.rows.length} records`;
  };
  let waiting = 0;
  controls.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(apply, 80);
  });
  one("#reset").addEventListener("click", () => {
    one("#find").value = "";
    for (const key of ["model", "scheme", "task"]) one(`#${key}`).value = "";
    one("#flips").checked = false;
    apply();
  });
  if (!questions.length) one("#flips").parentElement.hidden = true;
  one("#count").textContent = `${data.rows.length} records`;
  controls.hidden = false;

  // --- figures: values on hover and focus ---

  const tip = one("#tip");
  const valueOf = (mark) => {
    const title = one("title", mark);
    if (title) {
      mark.setAttribute("aria-label", title.textContent);
      mark.setAttribute("role", "img");
      title.remove();
    }
    return mark.getAttribute("aria-label");
  };
  const show = (mark) => {
    tip.textContent = valueOf(mark);
    tip.hidden = false;
    const box = mark.getBoundingClientRect();
    const left = Math.min(Math.max(8, box.x + box.width / 2 - tip.offsetWidth / 2), innerWidth - tip.offsetWidth - 8);
    const above = box.y - tip.offsetHeight - 8;
    tip.style.left = `${left}px`;
    tip.style.top = `${above < 4 ? box.bottom + 8 : above}px`;
  };
  const hide = () => { tip.hidden = true; };
  for (const chart of all("svg.chart")) {
    one("[data-p]", chart)?.setAttribute("tabindex", "0");
    chart.addEventListener("mouseover", (event) => {
      const mark = event.target.closest("[data-p]");
      if (mark) show(mark);
      else hide();
    });
    chart.addEventListener("mouseleave", hide);
    chart.addEventListener("focusin", (event) => show(event.target));
    chart.addEventListener("focusout", hide);
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
      if (event.key === "Escape") hide();
      if (step === undefined) return;
      event.preventDefault();
      const points = all("[data-p]", chart);
      const here = points.indexOf(event.target);
      const next = points[Math.min(points.length - 1, Math.max(0, here + step))];
      event.target.removeAttribute("tabindex");
      next.setAttribute("tabindex", "0");
      next.focus();
    });
  }
  addEventListener("scroll", hide, { passive: true });

  // --- links into folded parts, and printing ---

  const unfold = () => {
    const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    if (!target) return;
    for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", unfold);
  unfold();
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = all("details:not([open])");
    folded.forEach((node) => { node.open = true; });
    grids.forEach((sheet) => { sheet.limit = Infinity; sheet.draw(); });
    records.limit = Infinity;
    records.draw();
  });
  addEventListener("afterprint", () => {
    folded.forEach((node) => { node.open = false; });
    records.limit = CHUNK;
    records.draw();
  });
})();

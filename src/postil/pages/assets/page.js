// What a page does beyond being read. Everything here is an addition: without it the page is complete.
"use strict";
(() => {
  const body = document.body;
  const say = body.dataset;
  const rows = [...document.querySelectorAll(".row")];
  const make = (name, properties = {}) => Object.assign(document.createElement(name), properties);

  // --- theme -------------------------------------------------------------------------------------------
  const [themeWord, ...themeNames] = say.themeWords.split("|");
  const themes = ["auto", "light", "dark"];
  const themeButton = make("button", { type: "button" });
  const currentTheme = () => document.documentElement.dataset.theme || "auto";
  const labelTheme = () => {
    themeButton.textContent = `${themeWord}${themeNames[themes.indexOf(currentTheme())]}`;
  };
  const nextTheme = () => {
    const theme = themes[(themes.indexOf(currentTheme()) + 1) % 3];
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem("postil-theme", theme);
    } catch {
      // The choice then lasts as long as the page.
    }
    labelTheme();
  };
  themeButton.addEventListener("click", nextTheme);
  labelTheme();
  document.querySelector(".bar").append(themeButton);

  // --- where the reader is -----------------------------------------------------------------------------
  // The row under the header; languages and keys start from it.
  let chosen = null;
  const rowInSight = () =>
    rows.find((row) => row.getBoundingClientRect().bottom > 72 && row.id) || rows.findLast((row) => row.id);
  const place = () => {
    const target = document.querySelector(":target");
    const box = target && target.getBoundingClientRect();
    if (box && box.bottom > 48 && box.top < innerHeight) return location.hash;
    const row = scrollY < 40 ? null : rowInSight();
    return row ? `#${encodeURIComponent(row.id)}` : "";
  };
  for (const link of document.querySelectorAll(".languages a")) {
    const plain = link.getAttribute("href");
    const keep = () => link.setAttribute("href", plain + place());
    for (const event of ["pointerdown", "focus", "click"]) link.addEventListener(event, keep);
  }
  const go = (step) => {
    const from = chosen && document.activeElement === chosen ? rows.indexOf(chosen) : rows.indexOf(rowInSight()) - (step > 0 ? 1 : 0);
    const row = rows[Math.max(0, Math.min(rows.length - 1, from + step))];
    if (!row) return;
    row.tabIndex = -1;
    row.focus({ preventScroll: true });
    row.scrollIntoView({ block: "start" });
    choose(row);
  };

  // --- copying -----------------------------------------------------------------------------------------
  // One button, which goes to the row or formula in use. Numbers are not text, so they never come along.
  const copyButton = make("button", { type: "button", className: "copy", textContent: say.copy });
  const codeOf = (row) => [...row.querySelectorAll(".code pre")].map((pre) => pre.textContent).join("\n");
  const texOf = (formula) => formula.querySelector("math").getAttribute("alttext");
  let copies = () => "";
  const write = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Pages from a disk may not use the clipboard directly.
      const area = make("textarea", { value: text });
      body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
  };
  const copy = async () => {
    const text = copies();
    if (!text) return;
    await write(text);
    copyButton.textContent = say.copied;
    setTimeout(() => (copyButton.textContent = say.copy), 1200);
  };
  copyButton.addEventListener("click", copy);
  const choose = (row) => {
    chosen = row;
    copies = () => codeOf(row);
    row.querySelector(".code").prepend(copyButton);
  };
  for (const row of rows) {
    const code = row.querySelector(".code");
    code.addEventListener("pointerenter", () => choose(row));
    row.addEventListener("focusin", (event) => {
      if (event.target === copyButton || event.target.closest(".formula")) return;
      if (copyButton.parentNode !== code) choose(row);
    });
  }
  for (const formula of document.querySelectorAll(".formula:has(math)")) {
    const offer = () => {
      copies = () => texOf(formula);
      if (copyButton.parentNode !== formula) formula.append(copyButton);
    };
    formula.style.position = "relative";
    formula.addEventListener("pointerenter", offer);
    formula.addEventListener("focusin", (event) => event.target !== copyButton && offer());
  }
  // A selection that holds formulas is copied with their TeX.
  document.addEventListener("copy", (event) => {
    const selection = getSelection();
    if (!selection.rangeCount || selection.isCollapsed) return;
    const part = selection.getRangeAt(0).cloneContents();
    const formulas = part.querySelectorAll("math[alttext]");
    if (!formulas.length) return;
    for (const math of formulas) {
      const around = math.getAttribute("display") === "block" ? "$$" : "$";
      math.replaceWith(`${around}${math.getAttribute("alttext")}${around}`);
    }
    const shadow = make("div");
    shadow.style.whiteSpace = "pre-wrap";
    shadow.append(part);
    event.clipboardData.setData("text/plain", shadow.textContent);
    event.preventDefault();
  });

  // --- symbols and names -------------------------------------------------------------------------------
  // Hovering is done by the style sheet. For the keyboard one symbol of each formula and of each row's code can
  // be reached by Tab, and the arrow keys go from there to its neighbours.
  const isTerm = (element) => /(?:^| )t\d+(?: |$)/.test(element.getAttribute("class") || "");
  for (const group of document.querySelectorAll("math, .code")) {
    const symbols = [...group.querySelectorAll("[class]")].filter(isTerm);
    symbols.forEach((symbol, i) => {
      symbol.setAttribute("tabindex", i ? -1 : 0);
      symbol.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (!step) return;
        event.preventDefault();
        symbols[(i + step + symbols.length) % symbols.length].focus();
      });
    });
  }

  // --- what is equal lights up -------------------------------------------------------------------------
  // A click on a name lights every same name on the page; a second click takes the whole dotted name, a third the
  // call. In formulas the first click takes the symbol, the next what it is part of.
  const clearSame = () => {
    for (const element of document.querySelectorAll("math .same")) element.classList.remove("same");
    if (self.CSS && CSS.highlights) CSS.highlights.delete("same");
  };
  const wordAt = (text, at) => {
    for (const match of text.matchAll(/[\p{ID_Start}_][\p{ID_Continue}]*/gu)) {
      if (match.index <= at && at <= match.index + match[0].length) return [match.index, match.index + match[0].length];
    }
    return null;
  };
  const grow = (text, [start, end], times) => {
    if (times > 0) {
      const before = /(?:[\p{ID_Start}_][\p{ID_Continue}]*\.)*$/u.exec(text.slice(0, start));
      const after = /^(?:\.[\p{ID_Start}_][\p{ID_Continue}]*)*/u.exec(text.slice(end));
      start -= before[0].length;
      end += after[0].length;
    }
    if (times > 1 && "([".includes(text[end] || " ")) {
      let depth = 0;
      for (let i = end; i < text.length; i++) {
        depth += "([{".includes(text[i]) - ")]}".includes(text[i]);
        if (!depth) return [start, i + 1];
      }
    }
    return [start, end];
  };
  const rangeIn = (pre, start, end) => {
    const range = document.createRange();
    const walker = document.createTreeWalker(pre, NodeFilter.SHOW_TEXT);
    let at = 0;
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      if (at <= start && start <= at + node.length) range.setStart(node, start - at);
      if (at < end && end <= at + node.length) {
        range.setEnd(node, end - at);
        break;
      }
      at += node.length;
    }
    return range;
  };
  const lightText = (needle) => {
    if (!self.CSS || !CSS.highlights) return;
    const ranges = [];
    const escaped = needle.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
    const pattern = new RegExp(`(?<![\\p{ID_Continue}.])${escaped}(?![\\p{ID_Continue}])`, "gu");
    const loose = new RegExp(`(?<!\\p{ID_Continue})${escaped}(?![\\p{ID_Continue}])`, "gu");
    for (const pre of document.querySelectorAll(".row pre")) {
      for (const match of pre.textContent.matchAll(/\W/.test(needle) ? pattern : loose)) {
        ranges.push(rangeIn(pre, match.index, match.index + match[0].length));
      }
    }
    CSS.highlights.set("same", new Highlight(...ranges));
  };
  let last = { key: null, times: 0 };
  const again = (key) => (last = { key, times: last.key === key ? last.times + 1 : 0 }).times;
  const caretOffset = (event, pre) => {
    const caret = document.caretPositionFromPoint
      ? document.caretPositionFromPoint(event.clientX, event.clientY)
      : document.caretRangeFromPoint && document.caretRangeFromPoint(event.clientX, event.clientY);
    if (!caret) return -1;
    const range = document.createRange();
    range.setStart(pre, 0);
    range.setEnd(caret.offsetNode || caret.startContainer, caret.offset ?? caret.startOffset);
    return range.toString().length;
  };
  document.addEventListener("click", (event) => {
    if (event.target.closest("a, button, input, summary") || !getSelection().isCollapsed) return;
    clearSame();
    const math = event.target.closest("math");
    if (math) {
      let element = event.target;
      for (let n = again(element.outerHTML); n > 0 && element.parentElement !== math; n--) element = element.parentElement;
      const shape = (e) => e.tagName + (e.children.length ? [...e.children].map(shape).join() : e.textContent);
      const wanted = shape(element);
      for (const other of document.querySelectorAll("math *")) if (shape(other) === wanted) other.classList.add("same");
      return;
    }
    const pre = event.target.closest(".row pre");
    const offset = pre ? caretOffset(event, pre) : -1;
    const word = offset >= 0 && wordAt(pre.textContent, offset);
    if (!word) return void (last = { key: null, times: 0 });
    const name = pre.textContent.slice(...word);
    const found = grow(pre.textContent, word, again(`${rows.indexOf(pre.closest(".row"))}:${word[0]}:${name}`));
    lightText(pre.textContent.slice(...found));
  });

  // --- scrolling boxes can be reached by the keyboard --------------------------------------------------
  const reach = () => {
    for (const box of document.querySelectorAll("pre, .formula, .table, .contents")) {
      if (box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight + 1) box.tabIndex = 0;
      else if (box.tabIndex === 0) box.removeAttribute("tabindex");
    }
  };
  addEventListener("load", reach);
  addEventListener("resize", reach);

  // --- contents follow the reader ----------------------------------------------------------------------
  const entries = new Map([...document.querySelectorAll(".contents a")].map((a) => [decodeURIComponent(a.hash.slice(1)), a]));
  let waiting = false;
  const follow = () => {
    waiting = false;
    let now = null;
    for (const [id, link] of entries) {
      const target = document.getElementById(id);
      if (target && target.getBoundingClientRect().top < 90) now = link;
    }
    for (const link of entries.values()) if (link !== now) link.removeAttribute("aria-current");
    if (now) now.setAttribute("aria-current", "location");
  };
  addEventListener("scroll", () => {
    if (!waiting) requestAnimationFrame(follow);
    waiting = true;
  }, { passive: true });

  // --- search ------------------------------------------------------------------------------------------
  const input = document.getElementById("page-search");
  const box = input.parentElement;
  const language = document.documentElement.lang;
  const load = (name) =>
    new Promise((resolve, reject) => {
      const script = make("script", { src: `${say.site}_assets/${name}`, onload: resolve, onerror: reject });
      document.head.append(script);
    });
  // Chinese and Japanese are written without spaces: every two neighbouring characters are a word.
  const wordsOf = (text) => {
    const words = [];
    for (const [run] of text.toLowerCase().matchAll(/[\p{L}\p{N}_]+/gu)) {
      for (const [piece] of run.matchAll(/[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}ー]+|[^\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}ー]+/gu)) {
        const characters = [...piece];
        if (!/[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}]/u.test(piece) || characters.length === 1) words.push(piece);
        else for (let i = 0; i + 1 < characters.length; i++) words.push(characters[i] + characters[i + 1]);
      }
    }
    return words;
  };
  let ready = null;
  const prepare = () =>
    (ready ||= Promise.all([load("minisearch.js"), load(`index.${language}.js`)]).then(() => {
      const [titles, documents] = self.postilIndex;
      const engine = new self.MiniSearch({
        fields: ["heading", "title", "text"],
        tokenize: wordsOf,
        processTerm: (term) => term,
        searchOptions: { boost: { heading: 4, title: 2 }, prefix: (term) => !/[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}]/u.test(term), fuzzy: (term) => (term.length > 4 && /^\w+$/.test(term) ? 0.15 : false), combineWith: "AND" },
      });
      engine.addAll(documents.map(([page, , heading, text], id) => ({ id, heading: `${heading} ${heading.replace(/[._]/g, " ")}`, title: titles[page][1], text })));
      return (query) =>
        engine.search(query).slice(0, 20).map(({ id }) => {
          const [page, anchor, heading, text] = documents[id];
          return { url: titles[page][0], title: titles[page][1], anchor, heading, text };
        });
    }));
  const list = make("div", { className: "results" });
  const excerpt = (text, query) => {
    const at = Math.max(0, text.toLowerCase().indexOf(query.toLowerCase()));
    return (at > 60 ? "…" : "") + text.slice(Math.max(0, at - 60), at + 160);
  };
  const showResults = async () => {
    const query = input.value.trim();
    if (!query) return void list.replaceChildren();
    const found = (await prepare())(query);
    if (query !== input.value.trim()) return;
    list.replaceChildren(
      ...found.map((hit) => {
        const href = say.root + hit.url.split("/").map(encodeURIComponent).join("/") + (hit.anchor ? `#${encodeURIComponent(hit.anchor)}` : "");
        const link = make("a", { href });
        const same = hit.heading === hit.title || !hit.heading;
        link.append(make("b", { textContent: same ? hit.title : `${hit.title} › ${hit.heading}` }));
        link.append(make("span", { textContent: excerpt(hit.text, query) }));
        return link;
      }),
    );
    if (!found.length) list.append(make("p", { textContent: say.none }));
  };
  const results = document.getElementById("page-results");
  (results || box).append(list);
  input.addEventListener("focus", () => prepare().catch(() => {}));
  input.addEventListener("input", showResults);
  box.addEventListener("keydown", (event) => {
    const links = [...list.querySelectorAll("a")];
    if (event.key === "Enter" && event.target === input && links.length) links[0].click();
    if (event.key === "Escape") {
      list.replaceChildren();
      input.blur();
    }
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    event.preventDefault();
    const at = links.indexOf(document.activeElement) + (event.key === "ArrowDown" ? 1 : -1);
    (links[at] || input).focus();
  });
  list.addEventListener("click", (event) => {
    if (event.target.closest("a") && !results) list.replaceChildren();
  });
  document.addEventListener("pointerdown", (event) => {
    if (!results && !event.target.closest(".search")) list.replaceChildren();
  });
  if (results) {
    input.value = new URLSearchParams(location.search).get("q") || "";
    if (input.value) showResults();
  }

  // --- keys --------------------------------------------------------------------------------------------
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select")) return;
    const actions = new Map([
      ["j", () => go(1)],
      ["k", () => go(-1)],
      ["t", nextTheme],
      ["c", copy],
      ["/", () => input.focus()],
    ]);
    const action = actions.get(event.key);
    if (!action) return;
    event.preventDefault();
    action();
  });
})();

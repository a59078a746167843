// What the page's tests ask of a page: names and contrast (WCAG 2.2 AA). One expression.
{
  /** What lacks a name, is called twice, or refers to nothing; headings that skip; landmarks. */
  names() {
    const wrong = [];
    const all = (selector) => [...document.querySelectorAll(selector)];
    const shown = (one) => one.checkVisibility({ visibilityProperty: true });
    const ids = all("[id]").map((one) => one.id);
    for (const id of new Set(ids.filter((id, i) => ids.indexOf(id) !== i))) wrong.push(`twice: ${id}`);
    const refers = (one) => [one.getAttribute("aria-labelledby"), one.getAttribute("aria-describedby"), one.htmlFor];
    for (const one of all("[aria-labelledby], [aria-describedby], label[for]")) {
      for (const id of refers(one).filter((id) => typeof id === "string" && id)) {
        if (!document.getElementById(id)) wrong.push(`nothing is called ${id}`);
      }
    }
    const named = "button, a, input, select, textarea, summary";
    for (const one of all(named).filter(shown)) {
      const labels = [...(one.labels ?? [])].map((label) => label.textContent.trim());
      const text = one.matches("input, select, textarea") ? "" : one.textContent.trim();
      if (!(one.ariaLabel || text || labels.join(""))) wrong.push(`no name: ${one.outerHTML.slice(0, 120)}`);
    }
    const levels = all("h1, h2, h3, h4").filter(shown).map((one) => Number(one.tagName[1]));
    levels.forEach((level, i) => {
      if (level > (levels[i - 1] ?? 0) + 1) wrong.push(`a heading skips to ${level}`);
    });
    if (levels.filter((level) => level === 1).length !== 1) wrong.push("not one h1");
    for (const landmark of ["main", "nav", "header", "[role=status]"]) {
      if (!document.querySelector(landmark)) wrong.push(`no ${landmark}`);
    }
    if (!document.documentElement.lang) wrong.push("no language");
    return wrong;
  },

  /** Text whose contrast with what is painted under it is below 4.5 (3 for large text). */
  contrast() {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const painted = (colours) => {
      canvas.clearRect(0, 0, 1, 1);
      for (const colour of colours) {
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
      }
      return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const linear = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
    const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    const wrong = new Set();
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      const text = texts.currentNode.textContent.trim();
      const one = texts.currentNode.parentElement;
      if (!text || one.closest("noscript, :disabled, .sr, [inert], option, datalist") || !one.checkVisibility()) continue;
      const under = [];
      for (let up = one; up; up = up.parentElement) {
        under.unshift(getComputedStyle(up).backgroundColor);
        if (up.tagName === "DIALOG") break;
      }
      const style = getComputedStyle(one);
      const two = [luminance(painted([...under, style.color])), luminance(painted(under))];
      const ratio = (Math.max(...two) + 0.05) / (Math.min(...two) + 0.05);
      const size = parseFloat(style.fontSize);
      const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
      if (ratio < (large ? 3 : 4.5)) {
        wrong.add(`${ratio.toFixed(2)} ${one.tagName}.${one.className}: ${text.slice(0, 30)}`);
      }
    }
    return [...wrong];
  },
}

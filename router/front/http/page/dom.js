// Elements from data. Text is always text: nothing here parses markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// Set text only when it changed: selections and screen readers stay undisturbed.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Bring the children of `parent` to one element per item, in order; elements of items that stay, stay.
export function keyed(parent, items, keyOf, create, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let next = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let element = known.get(key);
    known.delete(key);
    if (!element) {
      element = create(item);
      element.dataset.key = key;
    }
    update(element, item);
    if (element === next) next = next.nextElementSibling;
    else parent.insertBefore(element, next);
  }
  for (const gone of known.values()) gone.remove();
}

let toastTimer = 0;

// One short sentence about what was just done or refused.
export function toast(text, isProblem = false) {
  const element = document.getElementById("toast");
  element.textContent = text;
  element.className = isProblem ? "shown problem" : "shown";
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => (element.className = ""), 6000);
}

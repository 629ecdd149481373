// Numbers for people. Nothing measured is a dash, never a zero.

const DASH = "–";

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return DASH;
  if (seconds >= 100) return `${seconds.toFixed(0)} s`;
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  const ms = seconds * 1000;
  return `${ms >= 100 ? ms.toFixed(0) : ms.toFixed(1)} ms`;
}

export function percent(share) {
  if (share === null || share === undefined) return DASH;
  const value = share * 100;
  return `${value > 0 && value < 10 ? value.toFixed(1) : value.toFixed(0)} %`;
}

export function bytes(count) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (count >= size) return `${(count / size).toFixed(count >= 10 * size ? 0 : 1)} ${unit}`;
  }
  return `${count.toFixed(0)} B`;
}

export function rate(perSecond, unit) {
  return `${perSecond >= 10 ? perSecond.toFixed(0) : perSecond.toFixed(1)} ${unit}`;
}

export function count(number) {
  return number === null || number === undefined ? DASH : number.toLocaleString("en");
}

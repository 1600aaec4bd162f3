// The texts of a page whose contrast to the ground beneath them is less than 4.5 : 1, as WCAG 2 reckons it.
(() => {
  const numbers = (colour) => colour.match(/[\d.]+/g).map(Number);
  const rgba = (colour) => {
    const [red, green, blue, alpha = 1] = numbers(colour);
    return colour.startsWith("color(") ? [red * 255, green * 255, blue * 255, alpha] : [red, green, blue, alpha];
  };
  const linear = (part) => (part / 255 <= 0.03928 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([red, green, blue]) => 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue);
  const ground = (element) => {
    const layers = [];
    for (let it = element; it; it = it.parentElement) layers.push(rgba(getComputedStyle(it).backgroundColor));
    return layers
      .reverse()
      .reduce((under, over) => [0, 1, 2].map((at) => over[at] * over[3] + under[at] * (1 - over[3])), [255, 255, 255]);
  };
  const poor = [];
  for (const it of document.querySelectorAll("main *")) {
    const isText = [...it.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim());
    if (!isText || !it.checkVisibility() || it.closest("svg")) continue;
    const [more, less] = [light(rgba(getComputedStyle(it).color)), light(ground(it))].sort((a, b) => b - a);
    const ratio = (more + 0.05) / (less + 0.05);
    if (ratio < 4.5) poor.push(`${it.className} "${it.textContent.trim().slice(0, 40)}" ${ratio.toFixed(2)}`);
  }
  return poor;
})();

// Runs before the page is drawn, so that a chosen theme never flashes in the other one.
"use strict";
try {
  const chosen = localStorage.getItem("postil-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage may be forbidden, as on some disks; the theme is then the system's.
}

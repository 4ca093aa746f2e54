"""A page in a headless browser, as its reader has it: for tests/browser."""

import json
from pathlib import Path
from typing import Any

from selenium import webdriver

from dgemma_local.recording import Recording
from dgemma_local.ui.export import Options
from dgemma_local.ui.export.html import render

SIZE = (1400, 900)


class Page:
    """What stands in the browser, and what a reader does with it."""

    def __init__(self, driver: webdriver.Chrome, folder: Path) -> None:
        self.driver = driver
        self.folder = folder
        self.emulate(motion="reduce")

    def emulate(self, *, motion: str = "reduce", scheme: str = "dark", size: tuple[int, int] = SIZE) -> None:
        """The reader's wishes; a page opened from now on finds them."""
        features = [
            {"name": "prefers-reduced-motion", "value": motion},
            {"name": "prefers-color-scheme", "value": scheme},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size[0] < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def open(self, recording: Recording, **options: Any) -> None:
        self.open_text(render(recording, Options(**options)), "page.html")

    def open_text(self, text: str, name: str) -> None:
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        self.driver.get("about:blank")
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)  # of the page before
        self.driver.get(path.as_uri())

    def js(self, code: str, *values: object) -> Any:
        return self.driver.execute_script(code, *values)

    def text(self, name: str) -> str:
        """Of the element with this id."""
        return str(self.js("return document.getElementById(arguments[0]).textContent", name))

    def press(self, *keys: str) -> None:
        """Where the focus is."""
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)

    def places(self, side: str, what: str) -> list[str]:
        """A datum of every position, in order; side: text or grid."""
        code = "return [...document.getElementById(arguments[0]).children].map((each) => each.dataset[arguments[1]])"
        return list(self.js(code, side, what))

    def scrub(self, at: int) -> None:
        """As a hand on the slider does it."""
        code = "scrub.value = arguments[0]; scrub.dispatchEvent(new Event('input', {bubbles: true}))"
        self.js(code, at)

    def console(self) -> list[dict[str, Any]]:
        return list(self.driver.get_log("browser"))

    def requests(self) -> list[str]:
        """The addresses of all that the page asked for, itself first."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found

"""One headless Chromium for all of these tests; Debian's packages are chromium and chromium-driver."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser_page import Page
from selenium import webdriver

FLAGS = (
    "--headless=new",
    "--no-sandbox",  # it has none for root, and CI's containers are root's
    "--disable-dev-shm-usage",  # 64 MB in a container
    "--disable-gpu",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)


@pytest.fixture(scope="session")
def chromium() -> Iterator[webdriver.Chrome]:
    """Skipped where there is no Chromium; in CI that is a failure."""
    found = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in found:
        refuse = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        refuse("needs chromium and chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = str(found[0])
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=str(found[1])))
    driver.set_script_timeout(10)
    yield driver
    driver.quit()


@pytest.fixture
def page(chromium: webdriver.Chrome, tmp_path: Path) -> Page:
    return Page(chromium, tmp_path)

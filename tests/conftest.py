"""Settings of every test: hypothesis draws the same examples every time, and measures no time on a busy machine."""

from hypothesis import settings

settings.register_profile("the same", deadline=None, derandomize=True)
settings.load_profile("the same")

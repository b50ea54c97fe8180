"""The pages in headless Chromium, with a real service."""

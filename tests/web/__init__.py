"""The pages of `app/web/`: their modules in Node, and the pages in headless Chromium (`scripts/test-web`)."""

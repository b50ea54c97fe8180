"""Where units are computed: one small interface and its implementations."""

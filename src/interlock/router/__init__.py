"""``interlock route``: a small development proxy in front of prefill and decode servers."""

"""The command `tfdp check`; the check itself is `tfdp.testing`."""

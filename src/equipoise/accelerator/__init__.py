"""Backend contract, backends and selection: every device difference goes through here."""

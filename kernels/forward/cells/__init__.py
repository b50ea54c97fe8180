"""ConvTranspose forward on AMX: cells of dst pixels."""

"""Many processes, memory and other libraries: what chapter 7 uses."""

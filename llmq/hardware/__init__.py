"""What computes: devices, cards and their peaks, drivers, NVML."""

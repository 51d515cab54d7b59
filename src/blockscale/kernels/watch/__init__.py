"""What a watch keeps of a quantized matrix, by one kernel."""

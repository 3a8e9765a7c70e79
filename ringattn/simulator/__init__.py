"""What a cluster would do: times, numerics, models of training, advice, calibration. No job on ranks imports this."""

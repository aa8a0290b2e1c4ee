"""HelixPipe (arXiv 2507.00394): attention of a layer on another rank than its weights, planned and proven, not run."""

"""Planning overlapped with training: a worker process, plans made ahead, and batches divided over replicas."""

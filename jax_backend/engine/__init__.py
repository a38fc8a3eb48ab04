"""What runs an algorithm inside a traced function, over the axes of the replicas."""

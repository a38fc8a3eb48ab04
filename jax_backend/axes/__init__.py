"""The mapped axes that replicas stand on, and those that the compiler manages."""
